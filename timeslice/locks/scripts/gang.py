"""Verbs of a gang: the ranks of one program, which wait and hold as one."""

from __future__ import annotations

from timeslice.errors import UsageError
from timeslice.locks.keys import GroupKeys
from timeslice.locks.scripts.base import Call, make_call, text
from timeslice.locks.scripts.client import Ended, Granted, Queued, Request, parse_asked


def join(
    group: GroupKeys, request: Request, *, gang: str = "", floor: int = 0, score: str = ""
) -> Call[Granted | Queued | Ended]:
    """A rank asks for the group, or refreshes its wait (same ``request.waiter``).

    ``gang`` is the gang's id, as the answers tell it. The gang is queued when the last of its ranks is there.
    """
    r, party = request, request.party
    if party is None:
        raise UsageError("only a request with a party joins a gang", group=group.name, job=r.job)
    args = (
        floor, r.waiter, gang, party.gang, party.rank, party.world, r.job, r.host, r.pid, r.start, r.priority, r.label,
        r.lease_ms, r.ttl_ms, "lock" if r.lock_only else "", score,
    )  # fmt: skip
    return make_call("join", group, args, lambda reply: parse_asked(group, r.job, reply))


def gang_point(group: GroupKeys, gang: str, rank: int, number: int, min_slice_ms: int, *, floor: int = 0) -> Call[bool]:
    """Whether this rank yields at its ``number``-th yield point (from 1) of the lease ``gang``.

    All ranks get the same answer for the same point, however far apart they are. The rank that reaches a point first
    decides: the gang yields there if others wait and the lease is at least ``min_slice_ms`` old. A rank that was told
    True yields (with its rank), and asks for the group again; its next lease counts its points from 1. A repeated call
    is answered like the first. False also if this rank is not inside: what its lease is, the next renewal tells.
    """
    args = (floor, gang, rank, number, min_slice_ms)
    return make_call("point", group, args, lambda reply: text(reply[0]) == "ok" and bool(reply[1]))
