"""A Redis Cluster, formed without redis-cli."""

from __future__ import annotations

from typing import Any, Self

from redis.crc import key_slot

from timeslice.errors import RedisUnreachableError
from timeslice.torture.fleet_base import HOST, Fleet, FleetOptions, await_true, quoted

SLOTS = 16_384
NODE_TIMEOUT_MS = 2000  # a silent master is replaced after about 1.5 times as long


class ClusterFleet(Fleet):
    """``masters`` servers that share the slots, ``master1`` and so on, and a replica of each, ``replica1`` and so on.

    These are the roles at the start; a failover swaps two of them.
    """

    kind = "cluster"

    def __init__(self, options: FleetOptions, *, masters: int = 3, replicas: bool = True) -> None:
        super().__init__(options)
        args: tuple[str, ...] = ("--cluster-enabled", "yes", "--cluster-config-file", "nodes.conf")
        args += ("--cluster-node-timeout", str(NODE_TIMEOUT_MS))
        # A replica that was away for a moment may take over all the same.
        args += ("--cluster-replica-validity-factor", "0", "--repl-diskless-sync-delay", "0")
        if options.tls:
            args += ("--tls-cluster", "yes")
        self._masters = [f"master{number}" for number in range(1, masters + 1)]
        self._replicas = [f"replica{number}" for number in range(1, masters + 1)] if replicas else []
        for name in self._masters + self._replicas:
            self._add(name, f"masterauth {quoted(options.password)}\n" if options.password else "", args)

    @property
    def url(self) -> str:
        return self.options.url("cluster", [self.ports[name] for name in self._masters])

    def start(self) -> Self:
        for name in self.names():
            self.start_one(name)
        if len(self._nodes(self.names()[0])) < len(self.servers):  # else it was formed by an earlier start
            self._form()
        await_true("the cluster's coming up", lambda: all(map(self._ready, self.names())))
        return self

    def _form(self) -> None:
        count = len(self._masters)
        for number, name in enumerate(self._masters):
            first, after = number * SLOTS // count, (number + 1) * SLOTS // count
            self._ask(name, "CLUSTER ADDSLOTSRANGE", first, after - 1)
            self._ask(name, "CLUSTER SET-CONFIG-EPOCH", number + 1)
        for name in self.names()[1:]:
            self._ask(self.names()[0], "CLUSTER MEET", HOST, self.ports[name])
        await_true("the cluster's meeting", lambda: all(map(self._met, self.names())))
        for master, replica in zip(self._masters, self._replicas, strict=False):
            self._ask(replica, "CLUSTER REPLICATE", self._ask(master, "CLUSTER MYID").decode())

    def _met(self, name: str) -> bool:
        nodes = self._nodes(name)
        return len(nodes) == len(self.servers) and not any("handshake" in node["flags"] for node in nodes)

    def _ready(self, name: str) -> bool:
        info = self._ask(name, "CLUSTER INFO") or {}
        replication = self._ask(name, "INFO", "replication") or {}
        linked = replication.get("role") == "master" or replication.get("master_link_status") == "up"
        return info.get("cluster_state") == "ok" and linked

    def holder_of(self, key: str) -> str:
        """The living master that has the slot by the newest epoch: one that was replaced may not know it yet."""
        slot, found = key_slot(key.encode()), []
        for name in self.names():
            for node in self._nodes(name):
                mine = {"myself", "master"} <= set(node["flags"].split(","))
                if mine and any(int(ends[0]) <= slot <= int(ends[-1]) for ends in node["slots"]):
                    found.append((int(node["epoch"]), name))
        if not found:
            raise RedisUnreachableError(f"no server of this cluster serves the slot of {key} now")
        return max(found)[1]

    def _nodes(self, name: str) -> list[dict[str, Any]]:
        """How this server sees all of them; empty if it does not answer."""
        return list((self._ask(name, "CLUSTER NODES") or {}).values())
