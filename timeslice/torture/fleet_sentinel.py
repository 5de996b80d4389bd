"""One master, its replicas, and the sentinels that watch them."""

from __future__ import annotations

from collections import Counter
from typing import Self

from timeslice.errors import RedisUnreachableError
from timeslice.torture.fleet_base import HOST, Fleet, FleetOptions, await_true, quoted

MASTER = "timeslice"
DOWN_AFTER_MS = 1000
FAILOVER_TIMEOUT_MS = 4000  # a failover that did not succeed is tried again after twice as long


class SentinelFleet(Fleet):
    """``redis1`` to ``redis3``, of which the first is master at the start; ``sentinel1`` to ``sentinel3``."""

    kind = "sentinel"

    def __init__(self, options: FleetOptions, *, replicas: int = 2, sentinels: int = 3) -> None:
        super().__init__(options)
        secret = quoted(options.password) if options.password else ""
        self._data = [f"redis{number}" for number in range(1, replicas + 2)]
        self._sentinels = [f"sentinel{number}" for number in range(1, sentinels + 1)]
        for name in self._data:
            # In the file, where the server itself changes it when the sentinels give it another role.
            config = f"replicaof {HOST} {self.ports['redis1']}\n" if name != "redis1" else ""
            config += f"masterauth {secret}\n" if secret else ""
            self._add(name, config, ("--repl-diskless-sync-delay", "0"))
        for name in self._sentinels:
            config = f"sentinel monitor {MASTER} {HOST} {self.ports['redis1']} {sentinels // 2 + 1}\n"
            config += f"sentinel down-after-milliseconds {MASTER} {DOWN_AFTER_MS}\n"
            config += f"sentinel failover-timeout {MASTER} {FAILOVER_TIMEOUT_MS}\n"
            config += f"sentinel auth-pass {MASTER} {secret}\nsentinel sentinel-pass {secret}\n" if secret else ""
            self._add(name, config, ("--sentinel",), data=False)

    @property
    def url(self) -> str:
        ports = [self.ports[name] for name in self._sentinels]
        return self.options.url("sentinel", ports, f"/{MASTER}", sentinel_secret=True)

    def start(self) -> Self:
        for name in self.names():
            self.start_one(name)
        await_true("the sentinels' finding each other", lambda: all(map(self._ready, self._sentinels)))
        return self

    def _ready(self, sentinel: str) -> bool:
        """It knows the other sentinels, and that every replica is in step with the master."""
        told = self._ask(sentinel, "SENTINEL MASTER", MASTER) or {}
        replicas = self._ask(sentinel, "SENTINEL SLAVES", MASTER) or []
        return (
            told.get("num-other-sentinels") == len(self._sentinels) - 1
            and told.get("flags") == "master"
            and len(replicas) == len(self._data) - 1
            and all(each["master-link-status"] == "ok" and each["flags"] == "slave" for each in replicas)
        )

    def holder_of(self, key: str) -> str:  # noqa: ARG002 - one master has all keys
        """The master that most of the sentinels name, if it takes writes."""
        votes: Counter[int] = Counter()
        for sentinel in self._sentinels:
            if address := self._ask(sentinel, "SENTINEL GET-MASTER-ADDR-BY-NAME", MASTER):
                votes[int(address[1])] += 1
        by_port = {self.ports[name]: name for name in self._data}
        for port, _ in votes.most_common(1):
            if (self._ask(by_port[port], "ROLE") or [b""])[0] == b"master":
                return by_port[port]
        raise RedisUnreachableError(f"no server is master of {MASTER} now")
