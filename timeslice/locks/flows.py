"""Decisions of a client without I/O. A flow yields what to send or to wait for; a driver answers.

An operation is a ``Call`` (answered with its parsed reply) or a ``Wait`` (answered with stream entries). A driver
throws RedisUnreachableError into the flow when there is no answer; the flow decides what that means.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from timeslice.errors import (
    AcquireTimeoutError,
    CancelledByOperatorError,
    DeadlockError,
    GangEndedError,
    RedisUnreachableError,
    quoted,
)
from timeslice.locks import scripts
from timeslice.locks.cycles import Held, Watch
from timeslice.locks.keys import GroupKeys
from timeslice.locks.scripts import Call, Ended, Granted, Queued, Renewed, Request

Entries: TypeAlias = list[tuple[str, dict[str, str]]]

_EXPIRY_MARGIN_MS = 20
_LEAST_DEADLINE_S = 1.0  # even a caller that won't wait for the group waits this long for an answer


@dataclass(frozen=True)
class Wait:
    """Block on the stream ``key`` for entries after ``after``, at most ``ms`` milliseconds."""

    key: str
    after: str
    ms: int


Op: TypeAlias = Call[Any] | Wait


@dataclass(frozen=True)
class Grant:
    """What a waiter got. Times in seconds; ``sent_at`` is on the caller's monotonic clock."""

    token: int
    how: str
    swap_s: float
    waited_s: float
    mode: str
    registered: bool
    counter: int
    sent_at: float  # when the call that confirmed it was sent: the lease counts from here
    gang: str = ""  # the id of the gang whose rank asked; it is that of the lease
    needs_weights: bool = False  # its content was discarded, and no weight sync has brought it back yet


def acquire(
    group: GroupKeys,
    request: Request,
    *,
    gang: str = "",
    floor: int = 0,
    timeout_s: float | None = None,
    limit_s: float | None = None,
    note: Callable[[Queued], None] | None = None,
    held: Callable[[], Sequence[Held]] = tuple,
    clock: Callable[[], float] = time.monotonic,
) -> Generator[Op, Any, Grant]:
    """Wait for the group. ``note`` is told at each refresh why the waiter still waits; what it raises ends the wait.

    ``gang`` is the one that a rank was told of by an earlier flow with this request, so that it learns how that ended.
    ``limit_s`` is what the user gave, of which ``timeout_s`` is left; it is only named in the error.
    ``held`` tells what the waiter holds elsewhere; it is asked only when there is a wait.
    An outage is waited for like anything else. Raises AcquireTimeoutError after ``timeout_s``, DeadlockError (in both
    cases the entry is withdrawn first), CancelledByOperatorError, GangEndedError when another rank gave up or died, and
    RedisUnreachableError when the server is away at the end of ``timeout_s``. A caller that is interrupted must send
    ``scripts.cancel`` itself: the flow is not there any more.
    """
    watch = Watch(group, request.waiter, held)
    try:
        grant = yield from _acquire(group, request, gang, floor, timeout_s, limit_s, note, watch, clock)
    except (AcquireTimeoutError, CancelledByOperatorError, DeadlockError, GangEndedError):
        yield from watch.clear()
        raise
    yield from watch.clear()
    return grant


def _acquire(
    group: GroupKeys,
    request: Request,
    gang: str,
    floor: int,
    timeout_s: float | None,
    limit_s: float | None,
    note: Callable[[Queued], None] | None,
    watch: Watch,
    clock: Callable[[], float],
) -> Generator[Op, Any, Grant]:
    started = clock()
    until = None if timeout_s is None else started + timeout_s
    score, after = "", "0-0"
    by = ""

    def left() -> float:
        return math.inf if until is None else until - clock()

    def all_in(token: int, mode: str, lease_id: str) -> Generator[Op, Any, float]:
        """Wait until each rank has confirmed the grant: no body runs before. Returns when its renewal was sent."""
        after, patience = "0-0", clock() + max(left(), _LEAST_DEADLINE_S)
        while clock() < patience:
            block_ms = min(request.ttl_ms / 3, (patience - clock()) * 1000)
            try:
                entries: Entries = yield Wait(group.grant(lease_id), after, int(block_ms))
                after = entries[-1][0] if entries else after
            except RedisUnreachableError:
                pass  # the renewal is patient, a wait is not
            asked = clock()
            try:
                renewal = yield scripts.renew(group, replace(request, waiter=lease_id), token, floor=floor, mode=mode)
            except RedisUnreachableError:
                continue
            if not isinstance(renewal, Renewed):
                raise _over(group, request, renewal.by, renewal.reason)
            if not renewal.unconfirmed:
                return asked
        limit = timeout_s if limit_s is None else limit_s
        yield scripts.cancel(group, request.waiter, why="not all its ranks came in", floor=floor)
        raise _not_all_in(group, request, limit)

    while True:
        sent = clock()
        try:
            if request.party:
                call = scripts.join(group, request, gang=gang, floor=floor, score=score)
            else:
                call = scripts.acquire(group, request, floor=floor, score=score)
            reply = yield replace(call, deadline_s=max(left(), _LEAST_DEADLINE_S))
        except RedisUnreachableError:
            if left() <= 0:
                raise
            continue
        if isinstance(reply, Ended):
            raise _over(group, request, reply.by or by, reply.reason)
        floor = max(floor, reply.counter)
        lease_id = watch.waiter = reply.gang or request.waiter
        if isinstance(reply, Granted):
            if reply.unconfirmed:
                sent = yield from all_in(reply.token, reply.mode, lease_id)
            found = _grant(reply, reply.token, reply.how, reply.swap_ms, floor, sent, started)
            return replace(found, needs_weights=reply.needs_weights)
        if reply.gang != gang:
            gang, after = reply.gang, "0-0"  # a stream of its own
        score = reply.score or score
        if note:
            note(reply)
        if left() <= 0:
            limit = timeout_s if limit_s is None else limit_s
            yield scripts.cancel(group, request.waiter, why=f"it was not granted within {limit:g} s", floor=floor)
            raise _timed_out(group, request, reply, limit)
        deadlock = yield from watch.look()
        if deadlock:
            yield scripts.cancel(group, request.waiter, why="it would wait in a circle", floor=floor)
            raise deadlock
        block_ms = max(min(request.ttl_ms / 3, left() * 1000), 0)
        if reply.holder and reply.mode == "lock":
            block_ms = min(block_ms, reply.holder_ms + _EXPIRY_MARGIN_MS)  # nobody else wakes us when it expires
        try:
            entries: Entries = yield Wait(group.grant(lease_id), after, int(block_ms))
        except RedisUnreachableError:
            continue
        for entry_id, fields in entries:
            after = entry_id
            if fields.get("kind") in {"cancelled", "ended"}:
                raise _over(group, request, fields.get("by", ""), fields.get("reason", ""))
            if fields.get("kind") != "grant":
                continue
            sent, token = clock(), scripts.number(fields.get("token", ""))
            floor = max(floor, token)
            try:
                confirming = replace(request, waiter=lease_id)
                renewal = yield scripts.renew(group, confirming, token, floor=floor, mode=reply.mode or "served")
            except RedisUnreachableError:
                break
            if isinstance(renewal, Renewed):
                if renewal.unconfirmed:
                    sent = yield from all_in(token, reply.mode or "served", lease_id)
                how, swap_ms = fields.get("how", ""), scripts.number(fields.get("swap_ms", ""))
                found = _grant(reply, token, how, swap_ms, floor, sent, started)
                # Whether agents serve this host is as of now: when it asked there may have been none.
                registered, needs_weights = renewal.registered, fields.get("needs_weights") == "1"
                mode = reply.mode or "served"  # likewise
                return replace(found, mode=mode, registered=registered, needs_weights=needs_weights)
            by = renewal.by


def _grant(
    reply: Granted | Queued, token: int, how: str, swap_ms: int, counter: int, sent: float, started: float
) -> Grant:
    waited_s = max(sent - started, 0.0)
    return Grant(token, how, swap_ms / 1000, waited_s, reply.mode, reply.registered, counter, sent, reply.gang)


def _over(group: GroupKeys, request: Request, by: str, reason: str) -> CancelledByOperatorError | GangEndedError:
    """Why a wait is over that its waiter did not withdraw."""
    if request.party and not by:
        rank, world = request.party.rank, request.party.world
        why = quoted(reason) or "another rank gave up, or its process ended"
        return GangEndedError(
            f"group {group.name}: the gang of job {request.job} is over, so rank {rank} waits no longer: {why}. To go "
            f"on, all {world} ranks take a new hold.",
            group=group.name,
            job=request.job,
        )
    wait = f"the wait of job {request.job}"
    return CancelledByOperatorError(
        f"group {group.name}: {f'{quoted(by)} cancelled {wait}' if by else f'{wait} was cancelled'}",
        group=group.name,
        job=request.job,
    )


def _not_all_in(group: GroupKeys, request: Request, timeout_s: float | None) -> AcquireTimeoutError:
    within = "" if timeout_s is None else f" within {timeout_s:g} s"
    return AcquireTimeoutError(
        f"group {group.name}: the gang of job {request.job} was granted, but not all of its ranks came in{within}; it "
        f"is over for all of them. See: timeslice queue {group.name}",
        group=group.name,
        job=request.job,
    )


def _timed_out(group: GroupKeys, request: Request, last: Queued, timeout_s: float | None) -> AcquireTimeoutError:
    if request.party and not last.score:
        what = (
            f"{quoted(last.reason)}. All {request.party.world} take this hold, each with its own rank and the same job"
        )
    else:
        why = quoted(last.reason or (f"job {last.holder} holds it" if last.holder else f"the group is {last.phase}"))
        what = f"{why} (position {last.position + 1} in the queue)"
    return AcquireTimeoutError(
        f"group {group.name}: job {request.job} was not granted within {timeout_s:g} s: {what}. "
        f"See: timeslice queue {group.name}",
        group=group.name,
        job=request.job,
    )
