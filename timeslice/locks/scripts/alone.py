"""Calls about keys that belong to no group: a node's, and any key's server for its clock."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from timeslice.locks.keys import Keys
from timeslice.locks.loader import load
from timeslice.locks.scripts.base import Arg, Call, text


def clock(key: str) -> Call[int]:
    """Milliseconds, on the clock of the server that has ``key``: the servers of a cluster may differ."""
    return Call(load("alone/clock"), (key,), (), lambda reply: int(text(reply)))


def take_node(
    keys: Keys, node: str, instance: str, lease_ms: int, keep_s: int, fields: Mapping[str, str]
) -> Call[dict[str, str] | None]:
    """Take or renew a node's instance lease and write ``fields`` into its record. The answer is None, or the record of
    another instance whose lease runs."""

    def parse(reply: list[Any]) -> dict[str, str] | None:
        if text(reply[0]) == "ok":
            return None
        flat = [text(each) for each in reply[1:]]
        return dict(zip(flat[::2], flat[1::2], strict=True))

    words = [word for pair in fields.items() for word in pair]
    args: tuple[Arg, ...] = (instance, lease_ms, keep_s, *words)
    return Call(load("alone/take_node"), (keys.node_state(node), keys.commands(node)), args, parse)


def leave_node(keys: Keys, node: str, instance: str, *, left: bool) -> Call[bool]:
    """Let a node's instance lease go; ``left``: and what is kept of the node. False: it is another instance's."""
    args = (instance, "1" if left else "0")
    call_keys = (keys.node_state(node), keys.commands(node))
    return Call(load("alone/leave_node"), call_keys, args, lambda reply: text(reply[0]) == "ok")
