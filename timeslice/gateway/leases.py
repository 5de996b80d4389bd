"""Leases of callers that have no heartbeat of their own. The rule: timeslice/gateway/README.md.

The gateway renews each lease for its caller, until the caller yields, all of its job's processes have ended, or the
maximum hold is over. It keeps nothing that Redis has not: another gateway finds the leases by their host,
``gateway@<node>``, and goes on with them.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from dataclasses import dataclass
from typing import TypeAlias

from timeslice.client.lease import AsyncLease
from timeslice.errors import (
    LeaseLostError,
    NotHolderError,
    RedisUnreachableError,
    ServerUnsuitableError,
    TimeSliceError,
    UnknownGroupError,
    UsageError,
)
from timeslice.gateway.faults import UnavailableError
from timeslice.gateway.holds import GatewayClient, Hold, asks_for, refuse_unknown, why_not_holder
from timeslice.gateway.operations import FullError
from timeslice.locks import scripts
from timeslice.locks.scripts import Yielded, text
from timeslice.locks.view import GroupView
from timeslice.names import check_name, is_name

log = logging.getLogger("timeslice.gateway")

LOOK_S = 1.0  # between two looks at what is held or waited for
PAST_S = 900.0  # for what ended is remembered; longer than an unanswered yield is tried on

Key: TypeAlias = tuple[str, str]  # group, job


@dataclass(eq=False)
class _Asking:
    """One request for all callers of a job that ask for the same group at a time."""

    task: asyncio.Task[Hold]
    callers: int = 0
    refusal: TimeSliceError | None = None  # why it was cancelled, if not because the gateway stops


@dataclass(frozen=True)
class _Past:
    lease: AsyncLease
    lost: str  # why it was lost, or "" for one that was yielded
    until: float


class Leases:
    """What the gateway holds and waits for. All of it runs in one event loop."""

    def __init__(self, client: GatewayClient, max_hold_s: float, max_waits: int) -> None:
        self._client = client
        self._max_hold_s = max_hold_s
        self._max_waits = max_waits
        self._held: dict[Key, Hold] = {}
        self._asking: dict[Key, _Asking] = {}
        self._leaving: set[asyncio.Task[None]] = set()
        self._past: dict[Key, _Past] = {}
        self._stopping = False

    # for callers

    async def take(self, group: str, job: str) -> tuple[AsyncLease, bool]:
        """Wait for the group; at once if it is held for the job already (then False). Cancelled, the last caller of
        a job takes the request out of the queue, and gives up what was granted in that moment."""
        key = (check_name("group", group), check_name("job", job))
        if key not in self._asking and (held := await self._confirmed(key)):
            return held.lease, False
        asking = self._join(key)
        try:
            await asyncio.wait({asking.task})
        except asyncio.CancelledError:
            leaving = asyncio.create_task(self._leave(key, asking))
            self._leaving.add(leaving)
            leaving.add_done_callback(self._leaving.discard)
            await asyncio.shield(leaving)  # who is cancelled once more has left all the same
            raise
        self._forget(key, asking)
        if asking.task.cancelled():
            raise asking.refusal or self._stops(key)
        return asking.task.result().lease, True

    async def give_up(self, group: str, job: str) -> Yielded:
        """Yield for the job. NotHolderError if no gateway holds the group for it."""
        key = (check_name("group", group), check_name("job", job))
        view = await self.look(group)
        hold = self._held.get(key)
        if hold is None or hold.lease.lease_id != view.state.get("lease_id"):
            hold = self._adopt(view, job) or hold
        if hold:
            return await self._release(key, hold)
        past = self._past.get(key)
        if past and not past.lost:
            lease = past.lease
            call = scripts.yield_(self._client.group_keys(group), lease.lease_id, lease.fencing_token)
            reply = await self._client.driver.run(call)
            if isinstance(reply, Yielded):
                return reply
        raise NotHolderError(past.lost if past and past.lost else why_not_holder(view, job), group=group, job=job)

    async def look(self, group: str) -> GroupView:
        """The group as it stands. UnknownGroupError."""
        view = await self._client.driver.view(self._client.keys.group(group))
        if not view.exists:
            raise UnknownGroupError(
                f"no group {group}: nobody declared or serves it. See: timeslice groups", group=group
            )
        return view

    async def groups(self) -> list[str]:
        """Names of all groups."""
        (members,) = await self._client.driver.pipe([("SMEMBERS", self._client.keys.groups)])
        return sorted(filter(is_name, map(text, members)))

    # for the server

    async def resume(self) -> None:
        """Go on with the leases of a gateway of this name that ended a moment ago."""
        for group in await self.groups():
            try:
                view = await self._client.driver.view(self._client.keys.group(group))
            except (ServerUnsuitableError, UsageError) as error:  # no reason to be away for the others
                log.warning("group %s can't be read, so no lease of it is gone on with: %s", group, error)
                continue
            if view.state.get("host") == self._client.host and self._adopt(view, view.holder):
                log.info("group %s: going on with the lease of job %s", group, view.holder)

    async def watch(self) -> None:
        """Look after what is held and waited for, for ever."""
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                await self.look_after_all()
            except Exception:
                log.exception("looking after leases failed; going on")

    async def look_after_all(self) -> None:
        """End what is over, and forget what was long ago."""
        now = time.monotonic()
        self._past = {key: past for key, past in self._past.items() if past.until > now}
        for key, hold in list(self._held.items()):
            try:
                if self._standing(key) is hold:
                    await self._look_after(key, hold)
            except TimeSliceError as error:
                log.info("group %s: the lease of job %s could not be looked after: %s", *key, error)
        for group in {group for group, _ in self._asking}:
            try:
                refuse_unknown(await self.look(group))
            except UnavailableError as error:
                self._refuse(group, error)
            except TimeSliceError as error:
                log.info("group %s: %s", group, error)  # the waits themselves ride that out, or end with it

    def _refuse(self, group: str, error: UnavailableError) -> None:
        """End all waits for a group."""
        for key in [key for key in self._asking if key[0] == group]:
            asking = self._asking.pop(key)
            asking.refusal = error
            asking.task.cancel()

    async def end_waits(self) -> None:
        """Withdraw what is asked for, and ask for nothing any more."""
        self._stopping = True
        waiting = [asking.task for asking in self._asking.values()]
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, *self._leaving, return_exceptions=True)

    async def stop(self) -> None:
        """Leave leases to their terms: callers compute under them, and the next gateway of this name goes on with
        them."""
        await self.end_waits()
        for hold in self._held.values():
            self._client.renewer.drop(hold.lease)
        await self._client.close()

    # asking

    def _join(self, key: Key) -> _Asking:
        if self._stopping:
            raise self._stops(key)
        waits = sum(asking.callers for asking in self._asking.values())
        if waits >= self._max_waits:
            raise FullError(
                f"group {key[0]}: {waits} calls wait at this gateway, as many as may (--max-waits), so job {key[1]} is "
                "not queued. Ask again later, or at another gateway.",
                group=key[0],
                job=key[1],
            )
        asking = self._asking.get(key)
        if asking is None:
            asking = self._asking[key] = _Asking(asyncio.create_task(self._ask(*key)))
        asking.callers += 1
        return asking

    async def _ask(self, group: str, job: str) -> Hold:
        asks_for.set(sys.intern(job))
        view = await self.look(group)
        if hold := self._adopt(view, job):
            return hold
        refuse_unknown(view)
        return self._keep(await self._client.acquire(group, job=job, gang=False))

    async def _leave(self, key: Key, asking: _Asking) -> None:
        asking.callers -= 1
        if asking.callers:
            return
        self._forget(key, asking)  # who asks from now on asks anew
        asking.task.cancel()
        if not asking.task.done():  # else without a pause, in which another caller would find it held
            await asyncio.wait({asking.task})
        if not (asking.task.cancelled() or asking.task.exception() or asking.task.result().taken_over):
            try:
                await self._release(key, asking.task.result())
            except TimeSliceError as error:
                log.info("group %s: giving up what was granted to job %s as it left: %s", *key, error)

    def _forget(self, key: Key, asking: _Asking) -> None:
        if self._asking.get(key) is asking:
            del self._asking[key]

    def _stops(self, key: Key) -> UnavailableError:
        return UnavailableError(
            f"group {key[0]}: the gateway stops; the request of job {key[1]} is withdrawn. Ask again.",
            group=key[0],
            job=key[1],
        )

    # keeping

    def _adopt(self, view: GroupView, job: str) -> Hold | None:
        past = self._past.get((view.name, job))
        if past and past.lease.lease_id == view.state.get("lease_id"):
            return None  # its yield is under way
        lease = self._client.adopt(view, job)
        held_s = (view.now_ms - view.number("granted_at_ms")) / 1000
        return self._keep(lease, held_s, taken_over=True) if lease else None

    def _keep(self, lease: AsyncLease, held_s: float = 0.0, *, taken_over: bool = False) -> Hold:
        key = (lease.group, lease.job)
        self._past.pop(key, None)
        hold = self._held[key] = Hold(lease, time.monotonic() + self._max_hold_s - held_s, taken_over)
        return hold

    def _standing(self, key: Key) -> Hold | None:
        """What is held, if it still is. LeaseUncertainError while the server does not answer."""
        hold = self._held.get(key)
        if hold:
            try:
                hold.lease.ensure_held()
            except LeaseLostError as error:
                self._end(key, hold, str(error))
                return None
        return hold

    async def _confirmed(self, key: Key) -> Hold | None:
        """What is held by the server's word: it may have been yielded through another gateway, or taken away."""
        if hold := self._standing(key):
            sent = time.monotonic()
            hold.lease.note_renewal(await self._client.driver.run(hold.lease.renewal()), sent)
            return self._standing(key)
        return None

    def _end(self, key: Key, hold: Hold, lost: str) -> None:
        if self._held.get(key) is hold:
            del self._held[key]
        self._past[key] = _Past(hold.lease, lost, time.monotonic() + PAST_S)

    async def _release(self, key: Key, hold: Hold) -> Yielded:
        lease = hold.lease
        self._end(key, hold, "")
        reply = await lease.yield_()
        if reply is None:
            if lease.lost.is_set():
                try:
                    lease.ensure_held()
                except LeaseLostError as error:
                    self._end(key, hold, str(error))
                    raise
            raise RedisUnreachableError(
                f"group {lease.group}: the yield of job {lease.job} is not answered; it is tried on. Repeat it.",
                group=lease.group,
                job=lease.job,
            )
        return reply

    async def _look_after(self, key: Key, hold: Hold) -> None:
        """End a lease whose job's processes have all ended, or that was held for too long."""
        view = await self.look(hold.lease.group)
        vouched = hold.vouched
        if hold.has_ended(view):
            await self._revoke(key, hold, view, "all processes of the job have ended")
        elif time.monotonic() > hold.until:
            await self._revoke(key, hold, view, f"held for {self._max_hold_s:g} s, the gateway's maximum")
        elif hold.vouched and not vouched:
            log.debug("group %s: agents see processes of job %s; their end ends its lease", *key)

    async def _revoke(self, key: Key, hold: Hold, view: GroupView, why: str) -> None:
        """Take it away. The caller may still compute: agents move a served job off the device before the next
        grant, and a lock-only group is granted when the old term is over."""
        lease = hold.lease
        by, keys = self._client.host, self._client.group_keys(lease.group)
        await self._client.driver.run(
            scripts.revoke(keys, lease.job, lease.lease_id, lease.fencing_token, by, why, floor=view.counter)
        )
        self._client.renewer.drop(lease)
        log.warning("group %s: the lease of job %s (token %s) is ended: %s", *key, lease.fencing_token, why)
        self._end(key, hold, f"group {lease.group}: the lease of job {lease.job} was ended by {by}: {why}")
