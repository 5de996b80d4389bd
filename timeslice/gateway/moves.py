"""What a Snapshot and a Restore mean here: orders and waits of the lock protocol. Nothing is touched from here."""

from __future__ import annotations

import asyncio
import math
import os
import time

from timeslice.client.aio import AsyncClient
from timeslice.client.identity import new_waiter_id, process_start
from timeslice.errors import GroupModeError, RefusedError, TimeSliceError, UnknownGroupError, quoted
from timeslice.gateway.operations import Moved
from timeslice.locks import flows, scripts
from timeslice.locks.scripts import Request
from timeslice.locks.view import GroupView
from timeslice.models import Residency

QUEUE_S = 600.0  # an operation waits so long for its turn
GRACE_S = 5.0  # for the word that a step's deadline passed to arrive
_POLL_S = 0.2
_TTL_MS = 6000  # a waiter here is alive as long as its task is; so a gateway that died is passed over soon
_LEASE_MS = 10_000  # it is yielded at once
_CLEANUP_S = 3.0
_SAVED = {Residency.SUSPENDING, Residency.SUSPENDED, Residency.RESTORING}
_WHY = "Snapshot asked for"


class Mover:
    """``node`` is this gateway's, for people who read who gave an order."""

    def __init__(self, client: AsyncClient, node: str, queue_s: float = QUEUE_S) -> None:
        self._client, self._by, self._queue_s = client, f"gateway@{node}", queue_s
        self._host = f"restore.{node}"  # no host of a lease that a gateway keeps for a caller: those are adopted

    async def view(self, group: str) -> GroupView:
        """A group whose state is moved. UnknownGroupError, GroupModeError."""
        view = await self._client.status(group)
        if not view.exists:
            raise UnknownGroupError(f"no group {group}; see ListGroups, or: timeslice groups", group=group)
        if view.mode == "lock":
            raise GroupModeError(f"group {group} is lock-only: nothing is moved there", group=group)
        return view

    async def snapshot(self, group: str, job: str) -> Moved:
        """Have the state of a job that does not hold put out. RefusedError says why it stays."""
        began = await self._order_out(group, job)
        if began is None:
            return _moved(await self.view(group), job)
        until = time.monotonic() + _budget_s(began)
        while True:
            view = await self.view(group)
            ordered = view.state.get("evict") == job or bool(view.state.get("evict_how"))
            stayed = job in view.resident and view.holder != job
            if view.evict_reason and (ordered or stayed):
                raise _failed(view, job, f"it was not moved out: {view.evict_reason}")
            if not ordered:
                return _moved(view, job, device_bytes=_bytes(began, job)[1])
            if time.monotonic() > until:
                why = view.reason or f"its swap is at step {view.state.get('swap_step') or 'none'}"
                raise _failed(view, job, f"not out within {_budget_s(view):g} s, and still ordered: {why}")
            await asyncio.sleep(_POLL_S)

    async def _order_out(self, group: str, job: str) -> GroupView | None:
        """The group as it was before; None: there is nothing to move. A swap that is under way is waited for."""
        until = time.monotonic() + self._queue_s
        while True:
            view = await self.view(group)
            keys = self._client.group_keys(group)
            try:
                call = scripts.evict(keys, job, self._by, _WHY, floor=view.counter)
                return view if await self._client.driver.run(call) else None
            except RefusedError:
                if not (await self.view(group)).swap or time.monotonic() > until:
                    raise
            await asyncio.sleep(_POLL_S)

    async def restore(self, group: str, job: str) -> Moved:
        """Bring a job's saved state back: a grant in its name, given up at once. RefusedError says why it is not."""
        view = await self.view(group)
        residency = view.jobs[job].residency if job in view.jobs else Residency.ABSENT
        host_bytes = _bytes(view, job)[0]
        if residency == Residency.RESIDENT and not view.swap and view.state.get("evict") != job:
            return _moved(view, job)
        if not {residency} & {*_SAVED, Residency.RESIDENT, Residency.FAULTED}:
            raise _failed(view, job, "nothing of it is saved, so there is nothing to bring back")
        await self._take_and_yield(view, job)
        return _moved(await self.view(group), job, storage_bytes=host_bytes)

    async def _take_and_yield(self, view: GroupView, job: str) -> None:
        keys, driver, pid = self._client.group_keys(view.name), self._client.driver, os.getpid()
        request = Request(
            new_waiter_id(), job, self._host, pid, process_start(pid), label="restore", lease_ms=_LEASE_MS,
            ttl_ms=_TTL_MS,
        )  # fmt: skip
        limit_s = self._queue_s + _budget_s(view)
        flow = flows.acquire(keys, request, floor=view.counter, timeout_s=limit_s)
        waiting = asyncio.create_task(driver.drive(flow), name=f"wait of {view.name}/{job}")
        try:
            await self._watch(view.name, request, waiting)
            grant = await waiting
            await driver.run(scripts.yield_(keys, request.waiter, grant.token, floor=grant.counter))
        except BaseException:
            waiting.cancel()
            await asyncio.wait({waiting})
            await driver.run(scripts.cancel(keys, request.waiter, floor=view.counter), deadline_s=_CLEANUP_S)
            raise

    async def _watch(self, group: str, request: Request, waiting: asyncio.Task[flows.Grant]) -> None:
        """Until the wait is over. Other waiters are tried again when they were refused; an operation has failed."""
        until = math.inf
        while not (await asyncio.wait({waiting}, timeout=_POLL_S))[0]:
            view = await self.view(group)
            mine = next((each for each in view.queue if each.waiter == request.waiter), None)
            if mine and mine.deferred not in {"", "silent"}:
                raise _failed(view, request.job, f"it was not brought back: {mine.deferred}")
            if view.swap and view.state.get("swap_waiter") == request.waiter:
                until = min(until, time.monotonic() + _budget_s(view))
            if time.monotonic() > until:
                raise _failed(view, request.job, f"not back within {_budget_s(view):g} s: {view.reason or view.phase}")


def _budget_s(view: GroupView) -> float:
    """How long a swap may take by the settings of its group, up to the word that it failed."""
    config = view.config
    return (config.prepare_timeout_ms + config.suspend_timeout_ms + config.restore_timeout_ms) / 1000 + GRACE_S


def _bytes(view: GroupView, job: str) -> tuple[int, int]:
    members = [member for member in view.members if member.job == job]
    return sum(member.host_bytes for member in members), sum(member.device_bytes for member in members)


def _moved(view: GroupView, job: str, *, storage_bytes: int = 0, device_bytes: int = 0) -> Moved:
    """What is known, where the view or what was seen before tells it. Zero is what nobody measured."""
    in_host, on_device = _bytes(view, job)
    return Moved(storage_bytes=(in_host or storage_bytes) or None, device_bytes=(on_device or device_bytes) or None)


def _failed(view: GroupView, job: str, why: str) -> TimeSliceError:
    return RefusedError(
        f"group {view.name}: job {job}: {quoted(why)}. See: timeslice status {view.name}", group=view.name, job=job
    )
