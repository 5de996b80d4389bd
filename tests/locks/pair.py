"""A master and its replica, for what asynchronous replication loses: cut off, written to, failed over."""

from __future__ import annotations

from collections.abc import Callable

import redis

from tests.locks.lab import Lab
from tests.support.jobs import wait_until
from tests.support.ports import free_port
from timeslice.embedded import EmbeddedServer
from timeslice.locks.connection import connect

Start = Callable[..., EmbeddedServer]


class Pair:
    """One group on a master; what is written after `cut` the replica, which `fail_over` promotes, never gets."""

    def __init__(self, start: Start, prefix: str) -> None:
        self.master = start(port=free_port(), args=("--repl-diskless-sync-delay", "0"))
        self.replica = start()
        self.lab = Lab(self.master.url, prefix)
        self._heir: redis.Redis = connect(self.replica.url)
        self._heir.execute_command("REPLICAOF", "127.0.0.1", self.master.port)  # type: ignore[no-untyped-call]
        self._caught_up()

    def _caught_up(self) -> None:
        wait_until(lambda: self.lab.redis.wait(1, 100) == 1, "the replica has caught up")

    def cut(self) -> None:
        """The replica has all that was written up to now, and gets nothing more."""
        self._caught_up()
        self._heir.execute_command("REPLICAOF", "NO", "ONE")  # type: ignore[no-untyped-call]

    def fail_over(self) -> None:
        """The master dies, and everybody talks to what was its replica."""
        self.lab.redis.close()
        self.master.kill()
        self.lab.redis = self._heir
        self.lab.redis.hincrby(self.lab.group.state, "clock_ms", -1000)  # so long it took at least, in the field

    def close(self) -> None:
        self.lab.redis.close()
        self._heir.close()
