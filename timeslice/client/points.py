"""Yield points: places inside a long hold where the job can let others have a turn, and the wait for work to do.

Written once, in generators that `steps` runs, as all that both clients do.
"""

from __future__ import annotations

import inspect
import logging
import math
import numbers
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from timeslice.client import standing
from timeslice.client.context import enter_point
from timeslice.client.steps import Steps, run, run_async
from timeslice.errors import AcquireTimeoutError, RedisUnreachableError, TimeSliceError, UsageError
from timeslice.locks import scripts

if TYPE_CHECKING:
    from timeslice.client.lease import AsyncLease, Lease

log = logging.getLogger("timeslice")

Ready = Callable[[], Any]

ASK_S = 1.0  # for so long counts what the server said of waiters
_ASK_LATER_S = 10.0  # when it does not answer: the renewal thread learns first that it does again
_POLL_S = 0.05


def until_ready(ready: Callable[[], bool], timeout: float | None = None, poll: float = _POLL_S) -> bool:
    """Wait, off the devices, until ``ready()`` is true. False: it was not within ``timeout`` seconds.

    ``ready`` is called every ``poll`` seconds; what it raises ends the wait. An asynchronous trainer so asks for the
    pool when it has something to train on, and not before; see ``Lease.yield_point`` for the loop.
    """
    _check(ready, timeout=timeout, poll=poll)
    return run(_until(ready, timeout, poll, time.sleep))


async def until_ready_async(
    ready: Callable[[], bool | Awaitable[bool]], timeout: float | None = None, poll: float = _POLL_S
) -> bool:
    """As ``until_ready``, without holding the event loop up; ``ready`` may be a coroutine function."""
    import asyncio

    _check(ready, timeout=timeout, poll=poll)
    return await run_async(_until(ready, timeout, poll, asyncio.sleep))


def point(lease: Lease | AsyncLease, min_slice: float, timeout: float | None, ready: Ready | None) -> Steps[bool]:
    """True if the group was yielded and taken again."""
    _check(ready, min_slice=min_slice, timeout=timeout)
    client: Any = lease._client  # noqa: SLF001
    until = math.inf if timeout is None else time.monotonic() + timeout
    if client.disabled:
        yield from _wait_ready(lease, ready, until, timeout)
        return False
    lease.ensure_held()
    party = lease._request.party  # noqa: SLF001
    if party and ready:
        raise UsageError(
            f"group {lease.group}: the ranks of job {lease.job} hold as one, and `ready` is what one of them sees. Let "
            "one rank wait with until_ready before the hold, and tell the others.",
            group=lease.group,
            job=lease.job,
        )
    starved = ready is not None and not (yield from _ask(ready))
    if not starved and not (yield from (_all_yield if party else _others_wait)(lease, min_slice)):
        return False
    while not enter_point(lease):
        if party:
            raise UsageError(
                f"group {lease.group}: the ranks of job {lease.job} yield, and another thread or task of rank "
                f"{party.rank} is in a nested hold. Call yield_point where none is.",
                group=lease.group,
                job=lease.job,
            )
        # Some other thread or task of the job is inside, and may compute: nothing is yielded.
        if not starved or (yield from _ask(ready)):
            return False
        if time.monotonic() >= until:
            raise _not_ready(lease, timeout)
        yield lease.pause(_POLL_S)
        lease.ensure_held()
    others = [each for each in standing.around(*lease.beside) if each is not lease]
    try:
        yield from client._yield(lease)  # noqa: SLF001
        lease.leave_at_point()
        if lease.state == "lost":
            lease.ensure_held()
        yield from _wait_ready(lease, ready, until, timeout)
        left = None if timeout is None else max(until - time.monotonic(), 0.0)
        yield from client._acquire(lease.group, lease._terms, left, limit=timeout, again=lease)  # noqa: SLF001
    except BaseException as error:
        lease.give_up(f"it was yielded at a yield point and could not be had again ({type(error).__name__})")
        raise
    finally:
        lease.at_point = False
    # The others of this hold, and those around it, were kept: the body goes on only if they still stand.
    yield from standing.ensure_around(client, others, lease.told_at)
    return True


def _others_wait(lease: Lease | AsyncLease, min_slice: float) -> Steps[bool]:
    """Whether the slice was long enough and somebody waits, as of a second ago."""
    now = time.monotonic()
    if now - lease.grant.sent_at < min_slice:
        return False
    if now >= lease.ask_at:
        lease_id = lease.lease_id
        lease.ask_at = now + _ASK_LATER_S
        try:
            reply: Any = yield lease._client.driver.run(lease.renewal(), deadline_s=0)  # noqa: SLF001
        except TimeSliceError as error:
            log.info("group %s: a yield point of job %s does not know who waits: %s", lease.group, lease.job, error)
            return False
        lease.note_renewal(reply, now, lease_id)
        lease.ensure_held()
    return lease.pending > 0


def _all_yield(lease: Lease | AsyncLease, min_slice: float) -> Steps[bool]:
    """Whether the gang yields here. All ranks get the same answer, so each of them asks, each time."""
    party, client = lease._request.party, lease._client  # noqa: SLF001
    if party is None:
        return False
    lease.points += 1  # asked again, it is the same point
    floor = client.floors.get(lease.group, 0)
    call = scripts.gang_point(
        lease._keys,  # noqa: SLF001
        lease.lease_id,
        party.rank,
        lease.points,
        int(min_slice * 1000),
        floor=floor,
    )
    while True:
        try:
            return bool((yield client.driver.run(call, deadline_s=max(lease.expires_at - time.monotonic(), 0.0))))
        except RedisUnreachableError:
            # No rank may go on without the answer: others may have been told to yield.
            yield lease.pause(_POLL_S)
            lease.ensure_held()


def _wait_ready(lease: Lease | AsyncLease, ready: Ready | None, until: float, timeout: float | None) -> Steps[None]:
    left = None if timeout is None else max(until - time.monotonic(), 0.0)
    if ready and not (yield from _until(ready, left, _POLL_S, lease.pause)):
        raise _not_ready(lease, timeout)


def _until(ready: Ready, timeout: float | None, poll: float, pause: Callable[[float], Any]) -> Steps[bool]:
    until = math.inf if timeout is None else time.monotonic() + timeout
    while not (yield from _ask(ready)):
        left = until - time.monotonic()
        if left <= 0:
            return False
        yield pause(min(poll, left))
    return True


def _ask(ready: Ready | None) -> Steps[bool]:
    answer = ready() if ready else True
    if inspect.isawaitable(answer):
        answer = yield answer
    if inspect.iscoroutine(answer):
        answer.close()
        raise UsageError(f"{ready!r} is a coroutine function: use AsyncClient, or until_ready_async")
    return bool(answer)


def _not_ready(lease: Lease | AsyncLease, timeout: float | None) -> AcquireTimeoutError:
    return AcquireTimeoutError(
        f"group {lease.group}: job {lease.job} had nothing to compute within {timeout:g} s: ready() stayed false. Look "
        "at what should make it true, or wait longer.",
        group=lease.group,
        job=lease.job,
    )


def _check(ready: Ready | None, **seconds: Any) -> None:
    for name, value in seconds.items():
        if value is None and name == "timeout":
            continue
        if isinstance(value, bool) or not isinstance(value, numbers.Real) or not 0 <= float(value) < math.inf:
            raise UsageError(f"{name}={value!r}: give 0 or more seconds")
    if not callable(ready) and not (ready is None and "min_slice" in seconds):
        raise UsageError(f"ready={ready!r} can't be called: give a function that tells whether there is work")
