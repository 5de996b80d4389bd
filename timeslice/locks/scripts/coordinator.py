"""Verbs of a coordinator: own, plan, step, poke, promote, settle."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from timeslice.locks.keys import GroupKeys
from timeslice.locks.scripts.base import Call, check_fresh, make_call, text


@dataclass(frozen=True)
class Mine:
    epoch: int
    counter: int


@dataclass(frozen=True)
class OwnedBy:
    owner: str
    ms_left: int


def own(
    group: GroupKeys, coordinator: str, ttl_ms: int = 10_000, *, instance: str = "", floor: int = 0
) -> Call[Mine | OwnedBy]:
    """Take or keep a group, and do its housekeeping (reap, advance). Two instances of one name are two owners."""

    def parse(reply: list[Any]) -> Mine | OwnedBy:
        if text(reply[0]) == "mine":
            return Mine(int(reply[1]), int(reply[2]))
        return OwnedBy(text(reply[1]), int(reply[2]))

    return make_call("own", group, (floor, coordinator, ttl_ms, instance), parse)


def disown(
    group: GroupKeys, coordinator: str, *, instance: str = "", idle_only: bool = False, floor: int = 0
) -> Call[bool]:
    """Let a group go, so that another may take it at once. False: ``idle_only``, and it is in the middle of a swap."""
    args = (floor, coordinator, instance, "1" if idle_only else "0")
    return make_call("disown", group, args, lambda reply: text(reply[0]) == "ok")


@dataclass(frozen=True)
class Planned:
    plan: str  # the stored plan, which may be an earlier owner's
    step: str


def plan(group: GroupKeys, swap: int, epoch: int, plan: str, budget_ms: int, *, floor: int = 0) -> Call[Planned]:
    """Store the plan before any order goes out; a stored plan is never replaced."""

    def parse(reply: list[Any]) -> Planned:
        check_fresh(group, swap, reply)
        return Planned(text(reply[1]), text(reply[2]))

    return make_call("plan", group, (floor, swap, epoch, plan, budget_ms), parse)


def step(
    group: GroupKeys,
    swap: int,
    epoch: int,
    before: str,
    after: str,
    budget_ms: int,
    *,
    reason: str = "",
    floor: int = 0,
) -> Call[str]:
    """Move a swap on (``prepare``, ``commit``, ``rollback``), or with equal steps say why it hangs.

    Between equal steps ``budget_ms`` 0 lets the deadline stand; more than 0 gives a new one, so that an order that
    came too late can be given again.
    """

    def parse(reply: list[Any]) -> str:
        check_fresh(group, swap, reply)
        return text(reply[1])

    return make_call("step", group, (floor, swap, epoch, before, after, budget_ms, reason), parse)


def poke(group: GroupKeys, swap: int, epoch: int, *, floor: int = 0) -> Call[int]:
    """Ask the swap's waiter for a sign of life. Milliseconds since it last gave one (≤ 1000: it was not poked)."""

    def parse(reply: list[Any]) -> int:
        check_fresh(group, swap, reply)
        return int(reply[1])

    return make_call("poke", group, (floor, swap, epoch), parse)


@dataclass(frozen=True)
class Promoted:
    lease_id: str  # "" if nobody was granted


@dataclass(frozen=True)
class Open:
    """The swap can't be closed: ``node`` has not reported a final state, or ``job`` is still on the device."""

    node: str = ""
    job: str = ""


def _parse_open(reply: list[Any]) -> Open | None:
    kind = text(reply[0])
    if kind == "open":
        return Open(node=text(reply[1]))
    if kind == "crowded":
        return Open(job=text(reply[1]))
    return None


def promote(group: GroupKeys, swap: int, epoch: int, how: str, *, floor: int = 0) -> Call[Promoted | Open]:
    """End a swap that went well, and grant."""

    def parse(reply: list[Any]) -> Promoted | Open:
        check_fresh(group, swap, reply)
        return _parse_open(reply) or Promoted(text(reply[1]))

    return make_call("promote", group, (floor, swap, epoch, how), parse)


def settle(group: GroupKeys, swap: int, epoch: int, reason: str, defer_ms: int, *, floor: int = 0) -> Call[Open | None]:
    """End a swap that was refused or undone; its waiter is put off. None: closed."""

    def parse(reply: list[Any]) -> Open | None:
        check_fresh(group, swap, reply)
        return _parse_open(reply)

    return make_call("settle", group, (floor, swap, epoch, reason, defer_ms), parse)
