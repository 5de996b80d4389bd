"""Verbs of a client: acquire, renew, yield, cancel, register."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from timeslice.errors import GroupModeError, RefusedError
from timeslice.locks.keys import GroupKeys
from timeslice.locks.scripts.base import Call, in_words, make_call, text


@dataclass(frozen=True)
class Party:
    """One rank of a gang of ``world``. ``gang`` names the gang: all its ranks bring the same, no other gang does."""

    gang: str
    rank: int
    world: int


@dataclass(frozen=True)
class Request:
    """What a waiter asks for. ``waiter`` is made before anything is sent and becomes the lease id.

    Each rank of a gang makes its own. The server makes the gang's, which is the lease id of all.
    """

    waiter: str
    job: str
    host: str
    pid: int
    start: int  # the process's start time, so that a reused pid is never taken for it
    priority: int = 0  # -100 (last) to 100 (first)
    label: str = ""  # the job's phase, for people
    lease_ms: int = 30_000
    ttl_ms: int = 15_000
    lock_only: bool = False
    party: Party | None = None


@dataclass(frozen=True)
class Granted:
    token: int
    how: str  # "no-op", "first load", "restored"
    swap_ms: int
    counter: int
    mode: str  # "served" or "lock"
    registered: bool  # False: the agents of this host don't know this process yet
    needs_weights: bool = False  # its content was discarded, and no weight sync has brought it back yet
    gang: str = ""
    unconfirmed: int = 0  # ranks of the gang that have not confirmed the grant; no body begins before all have


@dataclass(frozen=True)
class Queued:
    position: int  # 0 is next
    score: str  # "" while not all ranks of the gang are there
    phase: str
    reason: str
    holder: str
    holder_ms: int  # what is left of the holder's lease
    counter: int
    mode: str  # "" while nobody declared or serves the group
    registered: bool
    gang: str = ""


@dataclass(frozen=True)
class Ended:
    """This waiter was cancelled or has yielded already. Of a gang: by which operator, else why it is over for all."""

    by: str = ""
    reason: str = ""


def acquire(group: GroupKeys, request: Request, *, floor: int = 0, score: str = "") -> Call[Granted | Queued | Ended]:
    """Ask for the group, or refresh the wait (same waiter id). ``score`` re-enters at an earlier place."""

    r = request
    mode = "lock" if r.lock_only else ""
    args = (
        floor, r.waiter, r.job, r.host, r.pid, r.start, r.priority, r.label, r.lease_ms, r.ttl_ms, mode, score,
    )  # fmt: skip
    return make_call("acquire", group, args, lambda reply: parse_asked(group, r.job, reply))


def parse_asked(group: GroupKeys, job: str, reply: list[Any]) -> Granted | Queued | Ended:
    """The answer to a waiter or to a rank, who is told its gang behind the rest."""
    kind = text(reply[0])
    if kind == "granted":
        token, how, swap_ms, counter, mode, registered, _, needs_weights, *of_gang = reply[1:]
        return Granted(
            int(token),
            text(how),
            int(swap_ms),
            int(counter),
            text(mode),
            bool(registered),
            bool(needs_weights),
            *((text(of_gang[0]), int(of_gang[1])) if of_gang else ()),
        )
    if kind == "queued":
        position, score, phase, reason, holder, holder_ms, counter, mode, registered, *gang = reply[1:]
        return Queued(
            int(position),
            text(score),
            text(phase),
            in_words(reason),
            text(holder),
            int(holder_ms),
            int(counter),
            text(mode),
            bool(registered),
            "".join(map(text, gang)),
        )
    if kind == "mode":
        raise GroupModeError(
            f"group {group.name} is {text(reply[1])}, not lock-only: agents swap device state there. "
            "Ask for it without lock-only, or use another group name.",
            group=group.name,
            job=job,
        )
    if kind == "full":
        raise RefusedError(
            f"group {group.name}: {text(reply[1])} requests wait already, as many as may, so that of job {job} is not "
            f"queued. See who they are: timeslice queue {group.name}; ask again when some have gone.",
            group=group.name,
            job=job,
        )
    return Ended(*map(text, reply[1:]))


@dataclass(frozen=True)
class Renewed:
    counter: int
    pending: int  # how many wait; none while the group is paused
    unconfirmed: int = 0  # ranks of the gang without which no body begins
    registered: bool = True  # False: the agents of this host don't know this process yet


@dataclass(frozen=True)
class Lost:
    holder: str  # job that holds now, or ""
    token: int
    counter: int
    by: str = ""  # the operator who took it away
    reason: str = ""  # what the operator gave as the reason; without operator: why a gang is over


def renew(
    group: GroupKeys, request: Request, token: int, *, floor: int = 0, mode: str = "served"
) -> Call[Renewed | Lost]:
    """Renew the lease; the first renewal confirms a grant that came by the stream.

    A rank renews with the gang's id as ``waiter``.
    """

    def parse(reply: list[Any]) -> Renewed | Lost:
        if text(reply[0]) == "ok":
            return Renewed(int(reply[2]), int(reply[3]), int(reply[4]), bool(reply[5]))
        return Lost(text(reply[1]), int(reply[2]), int(reply[3]), text(reply[4]), text(reply[5]))

    r = request
    of_gang = (r.party.rank, r.party.world) if r.party else ("", "")
    args = (floor, r.waiter, token, r.job, r.host, r.pid, r.start, r.lease_ms, r.label, mode, *of_gang)
    return make_call("renew", group, args, parse)


@dataclass(frozen=True)
class Yielded:
    """Given up. ``pending`` wait for the group; ``kept``: nothing moves, the state stays on the devices."""

    pending: int
    kept: bool  # nobody waited: the state stays on the device
    counter: int


@dataclass(frozen=True)
class NotHolder:
    holder: str
    token: int
    by: str = ""  # the operator who took it away
    reason: str = ""


def yield_(
    group: GroupKeys,
    lease_id: str,
    token: int | None,
    *,
    rank: int | None = None,
    done: bool = False,
    by: str = "",
    floor: int = 0,
) -> Call[Yielded | NotHolder]:
    """Give the group up; with ``rank``, one rank of a gang leaves, and the last one gives the group up.

    ``token`` None is an operator (``by``) who yields for a job. ``done``: the body did its work to the end.
    """

    def parse(reply: list[Any]) -> Yielded | NotHolder:
        if text(reply[0]) == "ok":
            return Yielded(int(reply[1]), bool(reply[2]), int(reply[3]))
        return NotHolder(text(reply[1]), int(reply[2]), text(reply[4]), text(reply[5]))

    args = (floor, lease_id, "" if token is None else token, by, int(done), "" if rank is None else rank)
    return make_call("yield", group, args, parse)


def cancel(group: GroupKeys, waiter: str, *, by: str = "client", why: str = "", floor: int = 0) -> Call[str]:
    """Withdraw a waiter. Returns what it was: ``queued``, ``granted``, ``unknown``, or ``holds`` (refused).

    A rank's own id ends its gang for all ranks; ``why`` is told to the others.
    """

    def parse(reply: list[Any]) -> str:
        return "holds" if text(reply[0]) == "holds" else text(reply[1])

    return make_call("cancel", group, (floor, waiter, by, why), parse)


def register(group: GroupKeys, job: str, host: str, pid: int, record: str, *, floor: int = 0) -> Call[bool]:
    """Note a process of a job as a target of its node's agent. False: no agent of that node serves the group."""

    def parse(reply: list[Any]) -> bool:
        kind = text(reply[0])
        if kind == "refused":
            raise RefusedError(
                f"group {group.name}: process {pid} of job {job} can't be registered: {text(reply[1])}",
                group=group.name,
                job=job,
                node=host,
            )
        return kind == "ok"

    return make_call("register", group, (floor, job, host, pid, record), parse)


def waits(group: GroupKeys, lease_id: str, elsewhere: str, waiter: str, *, still: bool, floor: int = 0) -> Call[bool]:
    """Note in a held group that its holder waits in group ``elsewhere``, or no longer. False: not the holder."""
    args = (floor, lease_id, f"{elsewhere}/{waiter}", "1" if still else "0")
    return make_call("waits", group, args, lambda reply: text(reply[0]) == "ok")


def nudge(group: GroupKeys, waiter: str, *, floor: int = 0) -> Call[bool]:
    """Have a waiter look again at once. False: it waits no longer."""
    return make_call("nudge", group, (floor, waiter), lambda reply: text(reply[0]) == "ok")
