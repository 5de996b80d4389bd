"""Verbs of a node agent: heartbeat, leave, accepted, ack, report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from timeslice.errors import GroupModeError, StaleCommandError
from timeslice.locks.keys import GroupKeys
from timeslice.locks.scripts.base import Arg, Call, make_call, text


@dataclass(frozen=True)
class Pulse:
    """What a heartbeat brings back."""

    counter: int
    lease_id: str
    job: str
    host: str
    pid: str
    start: str
    token: int
    swap_id: int
    known: bool  # False: this node joined and has not reported since; report everything, be it nothing


def heartbeat(
    group: GroupKeys,
    node: str,
    ttl_ms: int,
    *,
    vouch: str = "",
    ranks: Sequence[int] = (),
    fence: int = 0,
    floor: int = 0,
) -> Call[Pulse]:
    """Join the group, say that this node lives, and vouch for the lease id of a holder that it watches; of a gang, for
    the ``ranks`` that run on this node.

    ``fence``: the highest grant or swap that it ever saw. After data loss no older lease is put back, and one that was
    ends.
    """

    def parse(reply: list[Any]) -> Pulse:
        if text(reply[0]) == "lock":
            raise GroupModeError(
                f"group {group.name} was declared lock-only; no agent can serve it. "
                f"Delete it first (timeslice group delete {group.name}) or serve another name.",
                group=group.name,
                node=node,
            )
        lease, job, host, pid, start = (text(item) for item in reply[2:7])
        return Pulse(int(reply[1]), lease, job, host, pid, start, int(reply[7]), int(reply[8]), bool(reply[9]))

    vouched = " ".join([vouch, *map(str, ranks)])
    return make_call("heartbeat", group, (floor, node, ttl_ms, vouched, fence), parse)


def leave(group: GroupKeys, node: str, absent: Sequence[str] = (), *, floor: int = 0) -> Call[bool]:
    """Take one's own node out of the group. False: state of jobs is on it, so it stays, unreachable.

    ``absent``: jobs of which nothing is there, seen just now. The group takes who was let in to be on every node.
    """
    return make_call("leave", group, (floor, node, *absent), lambda reply: text(reply[0]) == "ok")


def accepted(
    group: GroupKeys, node: str, swap: int, epoch: int, step: str, command: str, *, floor: int = 0
) -> Call[int]:
    """Ask whether an order still stands. Milliseconds left for it; StaleCommandError if it does not."""

    def parse(reply: list[Any]) -> int:
        kind = text(reply[0])
        if kind == "ok":
            return int(reply[1])
        raise StaleCommandError(
            f"group {group.name}: order {command} is {kind} (the group is at {int(reply[1])}); nothing was touched",
            group=group.name,
            node=node,
            token=int(reply[1]),
        )

    return make_call("accepted", group, (floor, node, swap, epoch, step, command), parse)


@dataclass(frozen=True)
class Observed:
    """What an agent sees of one job on its node. Bytes are of the host copy and on the device."""

    job: str
    state: str  # a residency of timeslice.models.Residency
    host_bytes: int = 0
    device_bytes: int = 0
    backend: str = ""
    unheld: bool = False  # on the device although it does not hold
    discarded: bool = False  # of a step: its content was dropped, not kept
    saved_bytes: int = 0  # of a step: it did not have to copy them
    why: str = ""  # of one that is unknown: why nobody can see whether it is there


def ack(
    group: GroupKeys,
    node: str,
    swap: int,
    command: str,
    observed: Sequence[Observed],
    *,
    outcome: Literal["", "prepared", "done", "failed", "rolled back"] = "",
    kind: str = "",
    error: str = "",
    floor: int = 0,
) -> Call[bool]:
    """Report a step of a swap; the one with an outcome must name every job of the step, for it is the last word.

    False: the command is not what this node last accepted, and nothing was noted. Look, and ``report``.
    """
    args: list[Arg] = [floor, node, swap, command, outcome, kind, error]
    for item in observed:
        args += [item.job, item.state, item.host_bytes, item.device_bytes, item.backend]
        args += [int(item.discarded), item.saved_bytes, item.why]
    return make_call("ack", group, args, lambda reply: text(reply[0]) == "ok")


@dataclass(frozen=True)
class Exited:
    """A process that ended."""

    job: str
    pid: int
    start: int


@dataclass(frozen=True)
class Reported:
    counter: int
    ignored: int  # jobs whose news came at a bad time: look and report again


def report(
    group: GroupKeys,
    node: str,
    seen: int,
    observed: Sequence[Observed],
    ended: Sequence[Exited] = (),
    *,
    whole: bool = True,
    floor: int = 0,
) -> Call[Reported | None]:
    """Tell what was observed outside of a swap. ``seen`` is the counter known before the look.

    None: the node is no member, and nothing was noted. Join by a heartbeat, then report everything.

    ``whole``: it is all that is on the node's devices, which a group that waits for the node's word needs.
    """
    args: list[Arg] = [floor, node, seen, int(whole), len(observed)]
    for item in observed:
        args += [item.job, item.state, item.host_bytes, item.device_bytes, item.backend, int(item.unheld)]
        args.append(item.why)
    for process in ended:
        args += [process.job, process.pid, process.start]

    def parse(reply: list[Any]) -> Reported | None:
        return Reported(int(reply[1]), int(reply[2])) if text(reply[0]) == "ok" else None

    return make_call("report", group, args, parse)
