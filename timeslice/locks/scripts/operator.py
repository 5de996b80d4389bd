"""Verbs of an operator: pause, configure, delete."""

from __future__ import annotations

from typing import Any

from timeslice.errors import GroupModeError, RefusedError, UnknownGroupError
from timeslice.locks.keys import GroupKeys
from timeslice.locks.scripts.base import Arg, Call, make_call, text


def pause(group: GroupKeys, pause: bool, by: str, *, floor: int = 0) -> Call[str]:
    """Stop or resume granting. Returns the group's phase."""
    return make_call("pause", group, (floor, "1" if pause else "0", by), lambda reply: text(reply[1]))


def configure(
    group: GroupKeys, settings: dict[str, str], *, mode: str = "", only_new: bool = False, floor: int = 0
) -> Call[str]:
    """Create a group or change its settings. Returns its mode."""

    def parse(reply: list[Any]) -> str:
        kind = text(reply[0])
        if kind == "exists":
            raise RefusedError(
                f"group {group.name} exists already ({text(reply[1])}); "
                f"change it with: timeslice group set {group.name}",
                group=group.name,
            )
        if kind == "mode":
            raise GroupModeError(
                f"group {group.name} is {text(reply[1])}; its mode can't be changed. Delete it first.",
                group=group.name,
            )
        return text(reply[1])

    args: list[Arg] = [floor, mode, "1" if only_new else "0"]
    for field, value in settings.items():
        args += [field, value]
    return make_call("configure", group, args, parse)


def delete(group: GroupKeys) -> Call[None]:
    """Remove a group that nobody uses."""

    def parse(reply: list[Any]) -> None:
        kind = text(reply[0])
        if kind == "unknown":
            raise UnknownGroupError(f"no group {group.name}; see: timeslice groups", group=group.name)
        if kind == "refused":
            raise RefusedError(f"group {group.name} is in use: {text(reply[1])}", group=group.name)

    return make_call("delete", group, (0,), parse)
