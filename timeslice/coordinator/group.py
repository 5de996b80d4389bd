"""The actor of one owned group: looks, decides (``swap.decide``), acts, and sleeps until something wakes it.

No wake is lost: it knows the last entry of the inbox before it looks, and then reads the inbox from there.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from dataclasses import replace
from typing import Any

from timeslice import metrics
from timeslice.coordinator import swap
from timeslice.errors import RedisUnreachableError, StaleCommandError
from timeslice.locks import flows, scripts
from timeslice.locks.drivers import AsyncDriver
from timeslice.locks.keys import Keys
from timeslice.locks.view import GroupView
from timeslice.models import Command

log = logging.getLogger("timeslice.coordinator.group")

COMMANDS_KEPT = 1000  # of a node's command stream
ACK_PATIENCE_S = 0.02  # the first of several nodes' reports may be looked at so much later, together with the others
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 1.0


class GroupActor:
    """Drives the swaps of one group for as long as it is ours.

    ``floor`` is the highest counter seen; ``busy`` says that a swap is under way. ``leaving`` has it let the group go
    between two swaps, however fast they come.
    """

    def __init__(
        self, driver: AsyncDriver, keys: Keys, name: str, coordinator: str, lease_ms: int, instance: str = ""
    ) -> None:
        self.name, self.floor, self.busy, self.leaving = name, 0, False, False
        self._driver, self._keys, self._group = driver, keys, keys.group(name)
        self._coordinator, self._instance, self._lease_ms = coordinator, instance, lease_ms
        self._epoch = 0
        self._renew_at = 0.0  # monotonic
        self._pause_s = _FIRST_PAUSE_S  # before the next try, should this one fail
        self._after = "0-0"  # last inbox entry known
        self._about = (0, 0)  # swap and epoch that the memory is about
        self._memory = swap.Memory()
        self._reclaimed = ("", 0)  # job and token of the last lease that ended without a yield
        self._refusals: dict[str, int] = {}  # waiter -> refused so often in a row

    async def run(self) -> None:
        """Take the group and drive it. Returns when it is another coordinator's, or no served group any more."""
        while True:
            try:
                await self._drive()
                return
            except StaleCommandError as error:  # also when a waiter took back a swap that was not planned yet
                self.floor = max(self.floor, error.token or 0)
                log.debug("%s", error)
            except RedisUnreachableError as error:  # the driver says so
                log.debug("group %s: %s", self.name, error)
            self._about = (0, 0)  # what was sent may be lost, so it is sent again: the same id gets the same answer
            await asyncio.sleep(self._pause_s)
            self._pause_s = min(self._pause_s * 2, _LONGEST_PAUSE_S)

    async def release(self, *, idle_only: bool = False) -> bool:
        """Let the group go, so that another coordinator may take it at once; ``run`` must not go on after that.

        False: it is in the middle of a swap, and with ``idle_only`` it stays ours then.
        """
        name, instance = self._coordinator, self._instance
        call = scripts.disown(self._group, name, instance=instance, idle_only=idle_only, floor=self.floor)
        return await self._driver.run(call)

    async def _drive(self) -> None:
        if not await self._renew():
            return
        await self._catch_up()
        while True:
            view = await self._driver.view(self._group)
            self.floor = max(self.floor, view.counter)
            self.busy = view.swap != 0
            metrics.WAITERS.labels(self.name).set(len(view.queue))
            metrics.BLOCKED.labels(self.name).set(view.phase == "blocked")
            self._note_reclaim(view)
            if view.mode != "served":
                log.info("group %s: no served group any more", self.name)
                return
            if self.leaving and await self.release(idle_only=True):
                log.info("group %s: released, so that each coordinator has its share", self.name)
                return
            if view.epoch != self._epoch or time.monotonic() >= self._renew_at:
                if not await self._renew():
                    return
                if view.epoch != self._epoch:
                    continue
            seen_at = time.monotonic()
            wait = await self._act(view)
            self._pause_s = _FIRST_PAUSE_S
            until = self._renew_at
            if wait.until_ms is not None:
                until = min(until, seen_at + max(wait.until_ms - view.now_ms, 0) / 1000)
            await self._sleep(until, wait.reports)

    def _note_reclaim(self, view: GroupView) -> None:
        """Say once of each lease that ended without a yield whose it was. An operator's eviction is none."""
        reclaimed = (view.state.get("evict", ""), view.number("token"))
        if reclaimed[0] and not view.state.get("evict_how") and reclaimed != self._reclaimed:
            metrics.RECLAIMS.labels(self.name).inc()
            log.warning("group %s: the lease of job %s (token %d) ended without a yield; its state must be out before "
                        "anybody is granted", self.name, *reclaimed)  # fmt: skip
            self._reclaimed = reclaimed

    async def _renew(self) -> bool:
        """Keep the group, and have its housekeeping done. False if it is another's."""
        sent = time.monotonic()
        name, instance = self._coordinator, self._instance
        call = scripts.own(self._group, name, self._lease_ms, instance=instance, floor=self.floor)
        reply = await self._driver.run(call, deadline_s=self._lease_ms / 1000)
        if isinstance(reply, scripts.OwnedBy):
            log.info("group %s: owned by %s now", self.name, reply.owner or "nobody: no agent serves it any more")
            return False
        if reply.epoch != self._epoch:
            log.info("group %s: owned with epoch %d", self.name, reply.epoch)
        self._epoch, self.floor = reply.epoch, max(self.floor, reply.counter)
        self._renew_at = sent + self._lease_ms / 3000
        return True

    async def _catch_up(self) -> None:
        """Note the inbox's last entry: whatever comes later wakes us."""

        async def attempt() -> Any:
            return await self._driver.client.xrevrange(self._group.inbox, count=1)

        entries = await self._driver.retry(attempt)
        self._after = scripts.text(entries[0][0]) if entries else "0-0"

    async def _sleep(self, until: float, reports: int) -> None:
        """Return at a wake, or at ``until`` (monotonic). Wakes by the first of several ``reports`` are collected."""
        while (left := until - time.monotonic()) > 0:
            wait = flows.Wait(self._group.inbox, self._after, math.ceil(left * 1000))
            entries = await self._driver.wait(wait)
            if not entries:
                break
            self._after = entries[-1][0]
            why = [fields.get("why") for _, fields in entries]
            if "answered" in why:
                self._memory = replace(self._memory, answered=True)
            acks = why.count("ack")
            if acks < len(why) or acks >= reports:
                return
            reports -= acks
            until = min(until, time.monotonic() + ACK_PATIENCE_S)
        await self._catch_up()  # after data loss the entries' ids may have started anew, below those known

    async def _act(self, view: GroupView) -> swap.Wait:
        """Act until there is nothing to do before the next wake."""
        while True:
            self._recall(view)
            action = swap.decide(view, self._memory)
            if isinstance(action, swap.Wait):
                return action
            after = await self._execute(action, view)
            if after is None:
                return swap.Wait()
            view = after

    def _recall(self, view: GroupView) -> None:
        """Begin with an empty memory when the swap or our ownership is another one."""
        if (view.swap, self._epoch) == self._about:
            return
        self._about = (view.swap, self._epoch)
        present = {entry.waiter for entry in view.queue} | {""}  # an operator's order has no waiter
        self._refusals = {who: count for who, count in self._refusals.items() if who in present}
        self._memory = swap.Memory(refusals=self._refusals.get(view.state.get("swap_waiter", ""), 0))

    async def _execute(self, action: swap.Action, view: GroupView) -> GroupView | None:
        """Do one action. The view as it is then, or None when only news can tell."""
        group, number, epoch, run = self._group, view.swap, self._epoch, self._driver.run
        floor = self.floor
        match action:
            case swap.Ask():
                seen_ms = await run(scripts.poke(group, number, epoch, floor=floor))
                self._memory = swap.asked(self._memory, view, seen_ms)
                return view
            case swap.Store(plan, budget_ms):
                stored = await run(scripts.plan(group, number, epoch, plan.model_dump_json(), budget_ms, floor=floor))
                self._memory = swap.Memory(refusals=self._memory.refusals)
                log.info("group %s: swap %d planned: %s", self.name, number, stored.plan)
                return swap.moved(view, stored.step, stored.plan, budget_ms)
            case swap.Send():
                await self._send(action, view)
                self._memory = swap.sent(self._memory, action.nodes, view.now_ms)
                return view
            case swap.Move():
                return await self._move(action, view)
            case swap.Hang(step, reason):
                log.warning("group %s: swap %d: %s", self.name, number, reason or "goes on")
                await run(scripts.step(group, number, epoch, step, step, 0, reason=reason, floor=floor))
                return None
            case swap.Promote(how):
                return await self._promote(how, view)
            case swap.Settle(reason, pause_ms):
                await self._settle(reason, pause_ms, view)
        return None

    async def _send(self, action: swap.Send, view: GroupView) -> None:
        """All orders in one round trip."""
        orders = [
            Command(
                id=swap.command_id(view, self._memory, action.step, node),
                group=self.name,
                node=node,
                swap=view.swap,
                epoch=self._epoch,
                step=action.step,
                out=action.plan.out,
                into=action.plan.into,
                force=action.plan.force,
                suspend_timeout_ms=view.config.suspend_timeout_ms,
                restore_timeout_ms=view.config.restore_timeout_ms,
            )
            for node in action.nodes
        ]

        kept = ("MAXLEN", "~", COMMANDS_KEPT)
        await self._driver.pipe(
            [("XADD", self._keys.commands(each.node), *kept, "*", "body", each.model_dump_json()) for each in orders]
        )
        log.debug("group %s: swap %d: %s ordered of %s", self.name, view.swap, action.step, ", ".join(action.nodes))

    async def _move(self, action: swap.Move, view: GroupView) -> GroupView:
        again = action.before == action.after
        if action.why:
            log.warning("group %s: swap %d: %s; %s", self.name, view.swap, action.why, action.after)
        step = await self._driver.run(
            scripts.step(
                self._group,
                view.swap,
                self._epoch,
                action.before,
                action.after,
                action.budget_ms,
                reason=action.why if again else "",
                floor=self.floor,
            )
        )
        memory = self._memory
        attempt, why = (memory.attempt + 1, memory.why) if again else (1, action.why)
        self._memory = replace(memory, sent={}, attempt=attempt, why=why)
        return swap.moved(view, step, view.state.get("plan", ""), action.budget_ms)

    async def _promote(self, how: str, view: GroupView) -> GroupView | None:
        job = view.state.get("swap_job", "")
        reply = await self._driver.run(scripts.promote(self._group, view.swap, self._epoch, how, floor=self.floor))
        if isinstance(reply, scripts.Promoted):
            self.busy = False
            metrics.SWAPS.labels(self.name, "done").inc()
            metrics.SWAP_SECONDS.labels(self.name).observe((view.now_ms - view.number("swap_since_ms")) / 1000)
            self._refusals.pop(view.state.get("swap_waiter", ""), None)
            log.info("group %s: swap %d for job %s done (%s)", self.name, view.swap, job or "(none)", how)
        elif reply.job:  # it came on the device behind the plan's back
            undone = swap.undo(view, self._memory, f"job {reply.job} is still on the device")
            return await self._execute(undone, view)
        return None

    async def _settle(self, reason: str, pause_ms: int, view: GroupView) -> None:
        waiter, job = view.state.get("swap_waiter", ""), view.state.get("swap_job", "")
        call = scripts.settle(self._group, view.swap, self._epoch, reason, pause_ms, floor=self.floor)
        if await self._driver.run(call) is not None:
            return  # a node began behind our back: its report wakes us
        self.busy = False
        metrics.SWAPS.labels(self.name, "deferred").inc()
        log.warning("group %s: swap %d for job %s not done: %s", self.name, view.swap, job or "(none)", reason)
        if reason == "silent":
            return
        self._refusals[waiter] = self._memory.refusals + 1
        # Renewing does the housekeeping: the waiter is tried again when its time is over, by us if by nobody else.
        self._renew_at = min(self._renew_at, time.monotonic() + (pause_ms + 1) / 1000)
