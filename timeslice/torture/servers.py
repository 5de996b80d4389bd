"""What is done to a server, and how the server itself shows that it has happened."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis

from timeslice.locks.scripts import text
from timeslice.torture.clock import Clock
from timeslice.torture.fleet import Fleet
from timeslice.torture.schedule import Planned

HOUR_S = 3600
_PROBE_S = 0.1  # a server that answers at all answers by then
_ABOUT_S = 60  # of a clock that was moved by an hour
_CANARY_KEEP_S = 600
_PASSWORD = "rotated"  # noqa: S105 - of a server that lives for a minute, on a socket of its own
_CANARY_SCRIPT = "return 'canary'"

Do = Callable[[], object]
Took = Callable[[], bool]


@dataclass(frozen=True)
class Act:
    """``took`` as in `faults.Deed`."""

    harm: str
    do: Do
    took: Took
    heal: Do
    late: bool = False


class Victim:
    """One server. A canary, a key or a connection or a script of our own, shows what happened to all of them; the
    traffic brings its own back at once. ``key``: one that the server has, whose slot the canary shares."""

    def __init__(self, fleet: Fleet, name: str, key: str) -> None:
        self._fleet, self._name, self._canary = fleet, name, f"{key}:canary"
        self._script, self._dropped, self._flushed = "", False, False

    def acts(self, planned: Planned, clock: Clock | None) -> dict[str, Act]:
        """By kind of fault; without ``clock`` it can't be moved."""
        fleet, name = self._fleet, self._name
        alone = fleet.kind == "standalone"
        # A server that is away may be replaced by another, which may know less.
        gone = "{}" if alone else "failover"

        def nothing() -> None:
            pass

        def start() -> None:
            fleet.start_one(name)

        ms = int(planned.lasts_s * 1000)
        full, empty = ("CONFIG", "SET", "maxmemory", 1), ("CONFIG", "SET", "maxmemory", 0)
        # Sentinels and peers ask on, so that they do not take a paused one for dead.
        pause = ("CLIENT", "PAUSE", ms, "ALL" if alone else "WRITE")
        acts = {
            "kill-server": Act(gone.format("kill"), lambda: fleet.kill(name), self.away, start),
            "stop-server": Act(gone.format("stop"), lambda: fleet.pause(name), self.stopped, lambda: fleet.go_on(name)),
            "sleep": Act("sleep", self._behind("DEBUG", "SLEEP", planned.lasts_s), self.silent, nothing),
            "drop": Act("drop", self._drop, lambda: self._dropped, nothing),
            "pause": Act("pause", lambda: self._ask(*pause), self.silent, nothing),
            "forget": Act("forget", self._forget, self.forgot, nothing),
            "full": Act("full", lambda: self._ask(*full), self.refuses, lambda: self._ask(*empty)),
            "password": Act("password", self._lock_out, self.refuses_strangers, self._let_in),
            "flush": Act("flush", self._flush, lambda: self._flushed, nothing),
            "wipe": Act("wipe", self._wipe, lambda: self._flushed and self.away(), start),
        }
        if clock:
            step = HOUR_S if planned.amount > 0 else -HOUR_S
            acts["clock"] = Act(
                "clock", lambda: clock.move(step), lambda: self.runs_off(step), lambda: clock.move(0), late=True
            )
        return acts

    def away(self) -> bool:
        """Its process has ended."""
        return not self._fleet.servers[self._name].running

    def stopped(self) -> bool:
        """Its process is stopped."""
        return is_stopped(self._fleet.servers[self._name].pid)

    def silent(self) -> bool:
        """It does not answer a write."""
        with self._fleet.client(self._name, timeout_s=_PROBE_S) as client:
            try:
                client.set(self._canary, "", ex=_CANARY_KEEP_S)
            except redis.exceptions.TimeoutError:
                return True
        return False

    def refuses(self) -> bool:
        """It has no memory for a write."""
        with self._fleet.client(self._name) as client:
            try:
                client.set(self._canary, "", ex=_CANARY_KEEP_S)
            except redis.exceptions.OutOfMemoryError:
                return True
        return False

    def forgot(self) -> bool:
        """It does not know the canary's script."""
        with self._fleet.client(self._name) as client:
            known: Any = client.script_exists(self._script)
        return bool(self._script) and not any(known)

    def runs_off(self, seconds: int) -> bool:
        """Its wall clock is off by so much."""
        with self._fleet.client(self._name) as client:
            told: Any = client.time()
        return bool(abs(told[0] - time.time() - seconds) < _ABOUT_S)

    def refuses_strangers(self) -> bool:
        """It asks for a password that nobody was told."""
        with self._fleet.client(self._name) as client:
            try:
                client.ping()
            except redis.exceptions.AuthenticationError:
                return True
        return False

    def _lock_out(self) -> None:
        """As in the middle of a rotation: the server has the new password, and who connects has not."""
        with self._fleet.client(self._name) as client:
            client.config_set("requirepass", _PASSWORD)
            try:
                client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
            except redis.exceptions.RedisError:
                pass  # read back is whether it refuses

    def _let_in(self) -> None:
        with self._fleet.client(self._name, password=_PASSWORD) as client:
            client.config_set("requirepass", "")

    def _drop(self) -> None:
        with self._fleet.client(self._name) as canary, canary.client() as one:  # a connection of its own
            number = text(one.execute_command("CLIENT", "ID"))
            self._ask("CLIENT", "KILL", "TYPE", "normal")
            with self._fleet.client(self._name) as client:
                listed = client.execute_command("CLIENT", "LIST", "ID", number)
            self._dropped = not text(listed or "").strip()

    def _forget(self) -> None:
        with self._fleet.client(self._name) as client:
            self._script = text(client.script_load(_CANARY_SCRIPT))
        self._ask("SCRIPT", "FLUSH")

    def _flush(self) -> None:
        with self._fleet.client(self._name) as client:
            client.set(self._canary, "", ex=_CANARY_KEEP_S)
            self._ask("FLUSHALL")
            self._flushed = not client.exists(self._canary)

    def _wipe(self) -> None:
        self._flush()
        self._fleet.kill(self._name)

    def _behind(self, *command: str | float) -> Do:
        """On a thread: the server answers when it is over."""
        return lambda: threading.Thread(target=self._ask, args=command, daemon=True, name="torture-deed").start()

    def _ask(self, *command: str | float) -> None:
        with self._fleet.client(self._name) as client:
            try:
                client.execute_command(*command)
            except (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError):
                pass  # our own connection is one of those that it is done to; what came of it is read back


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped by a signal. OSError when there is none."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
