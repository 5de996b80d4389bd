"""One group's heartbeat: joins it, vouches for the holder, keeps the floor, and reports what was observed."""

from __future__ import annotations

import asyncio
import logging

from timeslice.agent import fencing, procfs
from timeslice.agent.discovery.environment import FRESH_S
from timeslice.agent.executor import Executor
from timeslice.agent.group import Scope
from timeslice.agent.idle import AFTER_S, IdleHolders
from timeslice.agent.look import Looker
from timeslice.errors import RedisUnreachableError, TimeSliceError
from timeslice.locks import scripts
from timeslice.locks.scripts import Observed, Pulse
from timeslice.locks.view import GroupView
from timeslice.models import Residency

log = logging.getLogger("timeslice.agent")

_SOON_S = 0.2  # news that came at a bad time are told again after this pause


class Heartbeat:
    """Beats every third of ``ttl_s``, and at once when a process ended or an order was carried out."""

    def __init__(self, scope: Scope, executor: Executor, ttl_s: float, idle_after_s: float = AFTER_S) -> None:
        self._scope, self._executor, self._ttl_s = scope, executor, ttl_s
        self._looker = Looker(scope)
        self._idle = IdleHolders(scope, idle_after_s)
        self.joined = False

    async def join(self) -> None:
        """The first beat. Every known job was probed before anything is said. A server that is away is waited for, and
        then all is looked at anew. Raises what else is wrong."""
        while not self.joined:
            try:
                await self._tell_all(first=True)
                self.joined = True
            except RedisUnreachableError as error:  # the driver says so
                log.debug("group %s: the first heartbeat failed, trying on: %s", self._scope.name, error)
                await asyncio.sleep(_SOON_S)

    async def absent(self) -> list[str]:
        """The last beat: the group hears all that is here, also if it had lost that. Jobs of which nothing is here, and
        no process that might load something: to be told when the node leaves."""
        found = await self._tell_all(first=False)
        out = {each.job for each in found if each.state in {Residency.ABSENT, Residency.GONE}}
        return sorted(out - set(self._scope.registry.jobs()))

    async def _tell_all(self, *, first: bool) -> list[Observed]:
        """Look at everything, and then say that the node lives, and what is here."""
        scope = self._scope
        view = await scope.driver.view(scope.keys)
        await self._take(view, fresh_s=FRESH_S if first else 0)
        scope.raise_floor(view.counter)
        number = scope.floor
        found = await self._looker.look(view, first=first, whole=True)
        pulse = await self._pulse(view)
        await scope.keep_floor(fence=pulse.token)  # from now on, a server that knows less has lost data
        await self._report(pulse, found, number, whole=True)
        return found

    async def run(self) -> None:
        """Beat for ever; a fault is logged, and the next beat comes in its time."""
        trouble, pause = "", self._ttl_s / 3
        while True:
            try:
                async with asyncio.timeout(pause):  # wait_for of Python 3.11 may swallow a cancellation
                    await self._scope.wake.wait()
            except TimeoutError:
                pass
            self._scope.wake.clear()
            try:
                settled = await self._beat()
                trouble = ""
            except (TimeSliceError, OSError) as error:  # such as no descriptor left to look into /proc
                settled = not isinstance(error, RedisUnreachableError)  # of which the driver says so
                if settled and str(error) != trouble:
                    log.warning("group %s: the heartbeat failed, trying on: %s", self._scope.name, error)
                trouble = str(error)
            pause = self._ttl_s / 3 if settled else self._soon(pause)

    def _soon(self, pause: float) -> float:
        """A short pause, twice as long each time in a row."""
        return _SOON_S if pause >= self._ttl_s / 3 else min(pause * 2, self._ttl_s / 3)

    async def _beat(self) -> bool:
        """One beat. False if some news were not taken yet."""
        scope = self._scope
        view = await scope.driver.view(scope.keys)
        await self._take(view)
        pulse = await self._pulse(view)
        await scope.keep_floor(fence=pulse.token)
        number = scope.floor
        found: list[Observed] = []
        whole = False
        if not self._executor.turn.locked():  # a step tells of its jobs itself, and nobody may probe meanwhile
            await self._executor.tidy(pulse.swap_id)
            async with self._executor.turn:
                ask, scope.ask = scope.ask, False
                whole = not pulse.known  # the group waits for this node's word
                found = await self._looker.look(view, first=ask, whole=whole)
                await self._idle.look(view)
        return await self._report(pulse, found, number, whole=whole)

    async def _take(self, view: GroupView, *, fresh_s: float = FRESH_S) -> None:
        fencing.check_server(self._scope.ledger, view)
        await self._scope.learn(view, fresh_s=fresh_s)

    async def _pulse(self, view: GroupView) -> Pulse:
        scope = self._scope
        fence, ttl_ms = scope.ledger.fence, int(self._ttl_s * 1000)
        lease, ranks = self._vouch(view)
        call = scripts.heartbeat(
            scope.keys, scope.node, ttl_ms, vouch=lease, ranks=ranks, fence=fence, floor=scope.floor
        )
        pulse = await scope.driver.run(call, deadline_s=self._ttl_s / 3)
        if not pulse.known:
            log.info("node %s joined group %s", scope.node, scope.name)
        scope.raise_floor(pulse.counter)
        for target in scope.registry.missing(view.targets):
            record = target.model_dump_json()
            again = scripts.register(scope.keys, target.job, target.host, target.pid, record, floor=scope.floor)
            await scope.driver.run(again, deadline_s=self._ttl_s / 3)
        return pulse

    def _vouch(self, view: GroupView) -> tuple[str, list[int]]:
        """The lease whose holder is seen running here, and of a gang the ranks that are. A stopped, traced or dead
        process is not vouched for."""
        state = view.state
        lease = state.get("lease_id", "")
        if not lease:
            return "", []
        if view.world:
            ranks = [each.rank for each in view.parties if self._runs_here(view, each.host, each.pid, each.start)]
            return (lease, ranks) if ranks else ("", [])
        runs = self._runs_here(view, state.get("host", ""), state.get("pid", ""), state.get("start", ""))
        return (lease, []) if runs else ("", [])

    def _runs_here(self, view: GroupView, host: str, pid: str, start: str) -> bool:
        if host != self._scope.node and host in view.nodes:
            return False  # else a container calls it so, and whether the process is here is seen
        target = self._scope.registry.find(view.state.get("job", ""), pid, start)
        return bool(target and procfs.runs(target))

    async def _report(self, pulse: Pulse, found: list[Observed], number: int, *, whole: bool) -> bool:
        """Tell what was found; ``number`` is the highest that was known before the look. False: tell again soon.

        A node that has joined reports even if it has nothing to tell: the group waits for its word.
        """
        scope = self._scope
        ended = sorted(scope.registry.ended, key=lambda process: (process.job, process.pid))
        if pulse.known and not found and not ended:
            return not scope.registry.departed
        reply = await scope.driver.run(
            scripts.report(scope.keys, scope.node, number, found, ended, whole=whole, floor=scope.floor)
        )
        if reply is None:  # taken out since the beat, or forgotten: the next one joins again
            return False
        scope.registry.ended.difference_update(ended)
        if not reply.ignored:
            for job in found:
                if job.state == Residency.GONE:
                    scope.registry.forget(job.job)
        scope.raise_floor(reply.counter)
        return reply.ignored == 0 and not scope.registry.departed and (whole or pulse.known)
