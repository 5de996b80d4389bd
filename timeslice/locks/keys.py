"""The one place where Redis names are built. Keys of one group share one hash tag, so they share a slot."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from timeslice.names import check_name, check_prefix


@dataclass(frozen=True)
class Keys:
    """Every Redis name under one prefix."""

    prefix: str = "ts"

    def __post_init__(self) -> None:
        check_prefix(self.prefix)

    def group(self, name: str) -> GroupKeys:
        return GroupKeys(self.prefix, check_name("group", name))

    @property
    def groups(self) -> str:
        """SET of group names."""
        return f"{self.prefix}:groups"

    @property
    def nodes(self) -> str:
        """SET of node names."""
        return f"{self.prefix}:nodes"

    @property
    def coordinators(self) -> str:
        """ZSET coordinator -> deadline_ms."""
        return f"{self.prefix}:coordinators"

    def commands(self, node: str) -> str:
        """STREAM of commands to a node's agent, consumer group ``agent``."""
        return f"{self.prefix}:{{node:{check_name('node', node)}}}:commands"

    def node_state(self, node: str) -> str:
        """HASH with a node's heartbeat, instance, capabilities and memory.

        No leaf of a node is one of a group, so that an ACL pattern for all groups matches nothing of a node.
        """
        return f"{self.prefix}:{{node:{check_name('node', node)}}}:record"

    def channel(self, job: str, process: str) -> str:
        """STREAM of commands to an in-process workload, and its answers."""
        return f"{self.prefix}:{{job:{check_name('job', job)}}}:channel:{process}"


@dataclass(frozen=True)
class GroupKeys:
    """The keys of one group. ``all`` is the KEYS list that every script of a group takes."""

    prefix: str
    name: str

    def _key(self, leaf: str) -> str:
        return f"{self.prefix}:{{{self.name}}}:{leaf}"

    @cached_property
    def all(self) -> tuple[str, ...]:
        leaves = (
            "state",
            "queue",
            "waiters",
            "alive",
            "grant:",
            "ended",
            "jobs",
            "members",
            "nodes",
            "inbox",
            "events",
            "config",
            "targets",
        )
        return tuple(self._key(leaf) for leaf in leaves)

    def grant(self, waiter: str) -> str:
        """STREAM of one waiter: its grant, pokes, or the word that it was cancelled."""
        return self._key(f"grant:{waiter}")

    @property
    def state(self) -> str:
        return self._key("state")

    @property
    def queue(self) -> str:
        return self._key("queue")

    @property
    def waiters(self) -> str:
        return self._key("waiters")

    @property
    def alive(self) -> str:
        return self._key("alive")

    @property
    def ended(self) -> str:
        return self._key("ended")

    @property
    def jobs(self) -> str:
        return self._key("jobs")

    @property
    def members(self) -> str:
        return self._key("members")

    @property
    def nodes(self) -> str:
        return self._key("nodes")

    @property
    def inbox(self) -> str:
        return self._key("inbox")

    @property
    def events(self) -> str:
        return self._key("events")

    @property
    def config(self) -> str:
        return self._key("config")

    @property
    def targets(self) -> str:
        return self._key("targets")
