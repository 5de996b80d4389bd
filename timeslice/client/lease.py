"""A lease as its holder sees it.

::

    held ──yield──> yielding ──answered──> yielded
      │ ^              │                      │
      │ └───────────────── a yield point ─────┤ not had again
      └────────────────┴──── the server or the clock says so ──> lost   (final)

``yielding`` is the unknown state: until the server answers, the group may still be ours.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import threading
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Literal, Self

from timeslice.client.phases import measured
from timeslice.client.points import ASK_S, point
from timeslice.client.steps import run, run_async
from timeslice.errors import LeaseLostError, LeaseUncertainError, quoted
from timeslice.locks import scripts
from timeslice.locks.flows import Grant
from timeslice.locks.keys import GroupKeys
from timeslice.locks.scripts import Call, NotHolder, Renewed, Request, Yielded

if TYPE_CHECKING:
    from timeslice.client.aio import AsyncClient
    from timeslice.client.context import Holding
    from timeslice.client.core import BaseClient
    from timeslice.client.sync import Client
    from timeslice.client.terms import Terms

log = logging.getLogger("timeslice")

# However long the lease: after data loss nobody is granted for 30 s, and in that time each holder must have renewed.
LONGEST_RENEWAL_S = 10.0

State = Literal["held", "yielding", "yielded", "lost"]


class BaseLease:
    """What leases of both clients share.

    ``lost`` is set when the lease is over without having been yielded: stop using the device then. It is never
    cleared. ``grant`` tells how the group was had: ``waited_s``, ``swap_s`` and ``how`` (``no-op``, ``first load``,
    ``restored``). Times are seconds.
    """

    def __init__(
        self, client: BaseClient[Any, Any], keys: GroupKeys, request: Request, grant: Grant, terms: Terms
    ) -> None:
        self.group = keys.name
        self.job = request.job
        self.lost = threading.Event()
        self.taken_by: object = None  # the thread or task
        self.holding: Holding | None = None  # where it came from a hold
        self.done = False  # the body of its hold has ended without an error
        self.waited = False  # its group was not had at once
        self.in_body = True  # a loss is its holder's to know; before that its hold sees to it
        self.beside: tuple[BaseLease, ...] = ()  # all of its hold, which stand or fall together
        self.at_point = False  # a yield point has given it back, or is about to, and takes it again
        self._client = client
        self._keys = keys
        self._terms = terms
        self._why = ""
        self._changing = threading.Lock()
        self._watchers: list[Callable[[], None]] = []
        self._pid = os.getpid()
        self._adopt(request, grant)

    def _adopt(self, request: Request, grant: Grant) -> None:
        self.lease_id = request.waiter
        self.fencing_token = grant.token
        self.grant = grant
        self.lock_only = grant.mode == "lock"
        self.lease_s = request.lease_ms / 1000
        self.pending = 0  # waiters, when the server last told
        self.points = 0  # yield points since the grant; counted for a gang
        self._request = request
        self._state: State = "held"
        self._stands(grant.sent_at)
        self.ask_at = grant.sent_at

    def _stands(self, sent_at: float) -> None:
        """The lease counts from when the last confirmed call was sent: the server counts from later."""
        self.told_at = sent_at  # monotonic
        self.expires_at = sent_at + self.lease_s
        self.renew_at = sent_at + min(self.lease_s / 3, LONGEST_RENEWAL_S)
        self.ask_at = sent_at + ASK_S

    def regranted(self, request: Request, grant: Grant) -> Self:
        """Go on with a new grant: the end of a yield point."""
        with self._changing:
            self._adopt(request, grant)
        return self

    @property
    def state(self) -> State:
        """``yielding`` means unknown: the yield has not been answered yet."""
        return self._state

    @property
    def key(self) -> tuple[str, int | None]:
        """Tells leases of one process apart: the ranks of a gang share the lease's id, and may be threads."""
        party = self._request.party
        return self.lease_id, party.rank if party else None

    @property
    def needs_weights(self) -> bool:
        """The job's content was discarded while it was out: push the weights before computing with them.

        As of the grant. A hold with ``phase="weight_sync"`` whose body ends without an exception clears it; of a gang,
        on all ranks. One inside another hold of the group does not, nor does a lease from ``acquire``.
        """
        return self.grant.needs_weights

    @property
    def inherited(self) -> bool:
        """True in a forked child: the lease is its parent's, and nothing here touches it."""
        return self._pid != os.getpid()

    def stands_beside(self, url: str, keys: GroupKeys) -> bool:
        """Whether this is a live lease on another group of that server and prefix."""
        here = self._client.url == url and self._keys.prefix == keys.prefix and self.group != keys.name
        return here and self._state == "held" and not self.inherited

    def stands_on(self, url: str, keys: GroupKeys) -> bool:
        """Whether this is a live lease on that very group, which its holder has not let go at a yield point."""
        same = self._client.url == url and self._keys.prefix == keys.prefix and self.group == keys.name
        return same and self._state == "held" and not self.at_point and not self.inherited

    def ensure_held(self) -> None:
        """Return if the lease still stands.

        Raises LeaseLostError when it is over, and LeaseUncertainError when the server of a served group could not be
        asked for longer than the lease: then nobody else was granted unless the agents say so.
        """
        if self.inherited:
            raise self._error(f"it belongs to process {self._pid}, the parent; a forked child takes its own hold")
        if self._state == "held" and time.monotonic() >= self.expires_at:
            if not self.lock_only:
                raise LeaseUncertainError(
                    f"group {self.group}: the server did not confirm the lease of job {self.job} for {self.lease_s:g} "
                    "s. Pause the work and ask again; it is held again or lost as soon as the server answers.",
                    group=self.group,
                    job=self.job,
                    token=self.fencing_token,
                )
            self._expire()
        if self._state == "lost":
            raise self._error(self._why)
        if self.at_point:
            raise LeaseUncertainError(
                f"group {self.group}: job {self.job} is at a yield point and takes the group again. Pause the work and "
                "ask again; it is held again or lost when the point returns.",
                group=self.group,
                job=self.job,
                token=self.fencing_token,
            )
        if self._state != "held":
            raise self._error("it was yielded")

    def record(self, *, bytes: int | None = None, seconds: float | None = None) -> None:  # noqa: A002 - says it best
        """Record what this hold moved and how long that took, such as the weights of a sync: a PhaseMeasured event.

        Sent in the background; it never waits.
        """
        measured(self, bytes, seconds)

    def _error(self, why: str) -> LeaseLostError:
        return LeaseLostError(
            f"group {self.group}: the lease of job {self.job} (token {self.fencing_token}) is over: {why}. "
            "Stop using the device; take a new hold to go on.",
            group=self.group,
            job=self.job,
            token=self.fencing_token,
        )

    # for the renewal thread

    def renewal(self) -> Call[Renewed | scripts.Lost]:
        mode = "lock" if self.lock_only else "served"
        floor = self._client.floors.get(self.group, 0)
        return scripts.renew(self._keys, self._request, self.fencing_token, floor=floor, mode=mode)

    def note_renewal(self, reply: Renewed | scripts.Lost, sent_at: float, lease_id: str = "") -> None:
        """``lease_id``: what was renewed. A yield point may have taken the group anew since."""
        self._client.raise_floor(self.group, reply.counter)
        if lease_id and lease_id != self.lease_id:
            return
        if isinstance(reply, Renewed):
            self.pending = reply.pending
            self._stands(sent_at)
        elif self._state == "held":  # while a yield is under way, "lost" only says that it has arrived
            self._lose(_why(reply))

    def note_clock(self, now: float) -> None:
        """Lose a lock-only lease whose time is over: there is no agent that would keep a rival out."""
        if self.lock_only and now >= self.expires_at:
            self._expire()

    # for the client

    def begin_body(self) -> bool:
        """From now on a loss is told to ``on_lost``. False if it is over already."""
        with self._changing:
            self.in_body = self.in_body or self._state == "held"
            return self._state == "held"

    def yield_call(self) -> Call[Yielded | NotHolder]:
        floor = self._client.floors.get(self.group, 0)
        party = self._request.party
        rank = party.rank if party else None
        return scripts.yield_(self._keys, self.lease_id, self.fencing_token, rank=rank, done=self.done, floor=floor)

    def begin_yield(self) -> bool:
        """True for the one caller that may send the yield."""
        if self.inherited:
            return False
        with self._changing:
            if self._state != "held":
                return False
            self._state = "yielding"
        return True

    def end_yield(self, reply: Yielded | NotHolder, lease_id: str = "") -> None:
        if lease_id and lease_id != self.lease_id:
            return  # left to the renewal thread by a yield point, which has taken the group anew since
        if isinstance(reply, NotHolder):
            self._lose(_why(reply))
            return
        self._client.raise_floor(self.group, reply.counter)
        with self._changing:
            if self._state == "yielding":  # a loss is final, whatever the server says later
                self._state = "yielded"

    @property
    def yield_name(self) -> str:
        return f"group {self.group}: yield of job {self.job}"

    def yield_later(self) -> None:
        """Leave the yield to the renewal thread."""
        ending = functools.partial(self.end_yield, lease_id=self.lease_id)
        self._client.renewer.later(self.yield_call(), self.yield_name, ending)

    def leave_at_point(self) -> None:
        """The yield of a yield point is on its way: what becomes of it is told by the next grant."""
        with self._changing:
            if self._state == "yielding":
                self._state = "yielded"

    def give_up(self, why: str) -> None:
        """End a lease that a yield point gave back and could not have again."""
        held = self._state == "held"  # an interrupt came just after the grant
        if self._lose(why, final=("lost",)) and held:
            self.yield_later()

    def _expire(self) -> None:
        if self._lose(f"the server did not confirm it for {self.lease_s:g} s"):
            # The server may have stood still meanwhile and still count us in.
            self.yield_later()

    def _lose(self, why: str, *, final: tuple[State, ...] = ("lost", "yielded")) -> bool:
        with self._changing:
            if self._state in final:
                return False
            self._state, self._why = "lost", why
            told = self.in_body
        self._client.renewer.drop(self)
        self.lost.set()
        log.warning(
            "group %s: job %s lost its lease (token %s): %s", self.group, self.job, self.fencing_token, self._why
        )
        for watcher in self._watchers:
            watcher()
        if self._terms.on_lost and told:
            self._client.renewer.apart(self._call_on_lost, "timeslice-on-lost")
        return True

    def _call_on_lost(self) -> None:
        try:
            if self._terms.on_lost:
                on_lost: Callable[[Any], object] = self._terms.on_lost
                on_lost(self)
        except Exception:
            log.exception("group %s: the on_lost callback of job %s failed", self.group, self.job)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.group} job={self.job} token={self.fencing_token} {self._state}>"


def _why(reply: scripts.Lost | NotHolder) -> str:
    if reply.by:
        return f"{quoted(reply.by)} revoked it" + (f" ({quoted(reply.reason)})" if reply.reason else "")
    if reply.reason:
        return quoted(reply.reason)
    return (
        f"job {quoted(reply.holder)} holds the group now (token {reply.token})"
        if reply.holder
        else "nobody holds the group now"
    )


class Lease(BaseLease):
    """A lease had from Client."""

    _client: Client

    def yield_(self) -> Yielded | None:
        """Give the group up. None: it had ended already, or the server does not answer (then tried on behind)."""
        return self._client.yield_(self)

    def yield_point(
        self, min_slice: float = 5.0, timeout: float | None = None, ready: Callable[[], bool] | None = None
    ) -> bool:
        """Let others have a turn, at a place where nothing of this job computes; True if they had one. Seconds.

        If others wait and the job has had the group for ``min_slice``, it is yielded and taken again before this
        returns: the same lease goes on, with a new ``fencing_token``. Else this costs nothing: the server is asked at
        most once a second, and only after ``min_slice``.

        ``ready`` tells whether there is something to compute. While it is false the group is yielded whoever waits,
        and taken again once it is true; it is asked about 20 times a second::

            timeslice.until_ready(batches.full)           # wait for the first batch off the device
            with timeslice.hold("trainers") as lease:
                for _ in range(steps):
                    lease.yield_point(ready=batches.full)  # starved: others train until there is a batch
                    train(batches.get())

        ``timeout``: seconds to wait until it is held again. What ends the wait (AcquireTimeoutError, DeadlockError, an
        error of ``ready``, ...) is raised; then the lease is over, and ``lost`` is set.
        Raises LeaseLostError if it was lost before, or if meanwhile another one was lost that this code holds.
        A point inside of which another task or thread is in a nested hold of the group yields nothing. Of a hold of
        several groups only this one is yielded: call it on the last one.
        The ranks of a gang all call it equally often, without ``ready``; each asks the server, and all yield or none.
        While the server is away they wait for it as long as the lease stands; then what ``ensure_held`` raises.
        With ``TIMESLICE_DISABLE=1`` it only waits for ``ready``.
        """
        return run(point(self, min_slice, timeout, ready))

    def pause(self, seconds: float) -> None:
        time.sleep(seconds)


class AsyncLease(BaseLease):
    """A lease had from AsyncClient."""

    _client: AsyncClient

    async def yield_(self) -> Yielded | None:
        """As ``Lease.yield_``."""
        return await self._client.yield_(self)

    async def yield_point(
        self,
        min_slice: float = 5.0,
        timeout: float | None = None,
        ready: Callable[[], bool | Awaitable[bool]] | None = None,
    ) -> bool:
        """As ``Lease.yield_point``; ``ready`` may be a coroutine function."""
        return await run_async(point(self, min_slice, timeout, ready))

    def pause(self, seconds: float) -> Awaitable[None]:
        return asyncio.sleep(seconds)

    async def wait_lost(self) -> None:
        """Return when the lease is lost; for ``asyncio.wait`` beside the work."""
        loop = asyncio.get_running_loop()
        told = asyncio.Event()

        def tell() -> None:
            try:
                loop.call_soon_threadsafe(told.set)
            except RuntimeError:
                pass  # the loop is closed: nobody waits there any more

        self._watchers.append(tell)
        try:
            if not self.lost.is_set():
                await told.wait()
        finally:
            self._watchers.remove(tell)
