"""The ``composite`` backend: several backends as one, such as ``channel+cuda``. Each is a stage.

On the way out the stages go in order, on the way back in reverse. A stage that has to ask the job (``channel``) comes
before the one that freezes it, so a later stage is locked only when every earlier one is out, and let go before an
earlier one comes back::

    channel+arena   prepare  ask channel             suspend  channel out, arena lock, arena out
                    restore  arena in, arena go, channel in              release  -
    quiesce+arena   prepare  quiesce, arena lock     suspend  arena out
                    restore  arena in                release  arena go, quiesce over

Where a job stands follows from what its stages show, also in a new agent: what is frozen can't be asked, and is out or
in with what freezes it. Half-way is ``resident`` and ``locked``: it does not run, and both ways are open.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from timeslice.backends.base import Backend, Capabilities, Context, DeviceMemory, Job, Outcome, Probe, Selection
from timeslice.backends.checks import fault
from timeslice.backends.registry import get_backend
from timeslice.backends.stages import NAME, Look, Tally, all_run, asks, combined, make_stages, moves
from timeslice.backends.steps import Step
from timeslice.errors import BackendError, FaultKind
from timeslice.models import Residency

_ALL = Selection()
_OUT = {Residency.SUSPENDED, Residency.FAULTED}
_MOST_HELD = 1024


class CompositeBackend(Backend):
    """Options: ``stages``, names with + between, and ``STAGE.KEY`` for the option KEY of a stage."""

    name = NAME
    options = None

    def __init__(self, context: Context) -> None:
        self._stages = make_stages(context, get_backend)
        self._asking = True
        self._held: dict[str, int] = {}  # job -> host bytes of stages that can't be asked while it is frozen

    def capabilities(self) -> Capabilities:
        every = [stage.capabilities() for stage in self._stages if self._asking or not asks(stage)]
        return Capabilities(
            modes=next(each.modes for each in every if each.modes),
            forced=True,  # by force those that ask are passed over, and the last one never does
            freed_share=max(each.freed_share for each in every),
            overlaps=all(each.overlaps for each in every if each.modes),
        )

    def outside(self) -> Backend:
        """The stages that don't ask. On the way back the others are asked too, where the job can answer then: it may
        have left in the usual way half-way."""
        stages = tuple(stage if asks(stage) else stage.outside() for stage in self._stages)
        if not self._asking or (stages == self._stages and not any(map(asks, stages))):
            return self
        view = copy.copy(self)
        view.name = f"{NAME}/outside"
        view._asking = False  # noqa: SLF001 - it is one of us
        view._stages = stages  # noqa: SLF001
        return view

    async def probe(self, job: Job) -> Probe:
        looks = await self._looks(job)
        found = combined(looks)
        if found.state is Residency.ABSENT:
            self._held.pop(job.job, None)
        unseen = self._held.get(job.job, 0) if any(look.probe is None for look in looks) else 0
        return replace(found, host_bytes=found.host_bytes + unseen)

    async def estimate(self, job: Job, selection: Selection) -> int:
        """What one stage takes off the device is not there for the next one."""
        need = taken = 0
        for look in await self._looks(job):
            if look.probe and look.has_any:
                need += max(0, await look.stage.estimate(job, self._part(look.stage, selection)) - taken)
                taken += look.probe.device_bytes
        return need

    async def prepare(self, job: Job, selection: Selection, *, deadline_s: float) -> Outcome:
        """Up to the first stage that asks: the job has to run until that has moved."""
        step, tally = Step(deadline_s), Tally()
        looks = await self._looks(job)
        self._check(job, looks, selection)
        try:
            for look in _to_do(looks):
                await self._prepare(look.stage, job, selection, step, tally)
                if asks(look.stage):
                    break
        except Exception as error:
            await self._undo(job, step, error)
            raise
        return tally.outcome(step)

    async def suspend(self, job: Job, selection: Selection, *, deadline_s: float) -> Outcome:
        step, tally = Step(deadline_s), Tally()
        looks = await self._looks(job)
        self._check(job, looks, selection)
        try:
            await self._go_out(job, looks, selection, step, tally)
        except Exception as error:
            await self._undo(job, step, error)
            raise
        return tally.outcome(step)

    async def restore(self, job: Job, selection: Selection, *, deadline_s: float) -> Outcome:
        step, tally = Step(deadline_s), Tally()
        back: list[Backend] = []  # and still to be let go
        try:
            for stage in reversed(self._stages):
                if asks(stage):
                    await self._let_go(job, back, step, tally)
                    back.clear()
                    if not self._can_ask(job):
                        continue
                if (await stage.probe(job)).state in _OUT:
                    await self._restore(stage, job, selection, step, tally)
                back.append(stage)
        except Exception as error:
            await self._put_out_again(job, selection, step, error)
            raise
        self._held.pop(job.job, None)
        return tally.outcome(step)

    async def release(self, job: Job, *, deadline_s: float) -> Outcome:
        step, tally = Step(deadline_s), Tally()
        await self._refuse_suspended(job, "restore it before it is released")
        await self._bring_back(job, step, tally, "release")
        return tally.outcome(step)

    async def abort(self, job: Job, *, deadline_s: float) -> Outcome:
        step, tally = Step(deadline_s), Tally()
        await self._refuse_suspended(job, "so there is no prepare to undo; restore it")
        await self._bring_back(job, step, tally, "abort")
        return tally.outcome(step)

    async def health(self) -> Sequence[str]:
        return [f"{stage.name}: {line}" for stage in self._stages for line in await stage.health()]

    async def memory(self) -> Sequence[DeviceMemory]:
        for stage in reversed(self._stages):
            if devices := await stage.memory():
                return devices
        return ()

    async def _looks(self, job: Job) -> list[Look]:
        """From the last stage, since only what is not frozen there can be asked."""
        looks: list[Look] = []
        for stage in reversed(self._stages):
            silent = asks(stage) and (not self._asking or any(look.freezes for look in looks))
            looks.insert(0, Look(stage, None if silent else await stage.probe(job)))
        return looks

    def _can_ask(self, job: Job) -> bool:
        return self._asking or all_run(job)

    def _part(self, stage: Backend, selection: Selection) -> Selection:
        """What is to leave is the application's to choose; what freezes the rest takes all of it."""
        return selection if asks(stage) or not any(map(asks, self._stages)) else _ALL

    def _check(self, job: Job, looks: Sequence[Look], selection: Selection) -> None:
        first = next((look.stage for look in looks if moves(look.stage) and (look.has_any or not look.probe)), None)
        if not self._asking or first is None:
            return
        if selection.tags or selection.slot:
            raise fault(FaultKind.UNSUPPORTED, job, "this backend freezes whole processes; leave tags and slot out")
        if selection.mode not in first.capabilities().modes:
            raise fault(FaultKind.UNSUPPORTED, job, f"mode {selection.mode} is not possible in stage {first.name}")

    async def _go_out(self, job: Job, looks: list[Look], selection: Selection, step: Step, tally: Tally) -> None:
        for look in _to_do(looks):
            stage, part = look.stage, self._part(look.stage, selection)
            await self._prepare(stage, job, selection, step, tally)
            if moves(stage):
                await tally.run(stage, "suspend", step, stage.suspend, job, part)
            if asks(stage):
                while len(self._held) >= _MOST_HELD:
                    self._held.pop(next(iter(self._held)))
                self._held[job.job] = (await stage.probe(job)).host_bytes

    async def _prepare(self, stage: Backend, job: Job, selection: Selection, step: Step, tally: Tally) -> None:
        part = self._part(stage, selection)
        await tally.run(stage, "prepare", step, stage.prepare, job, part)

    async def _restore(self, stage: Backend, job: Job, selection: Selection, step: Step, tally: Tally) -> None:
        part = self._part(stage, selection)
        await tally.run(stage, "restore", step, stage.restore, job, part)

    async def _let_go(self, job: Job, stages: Sequence[Backend], step: Step, tally: Tally) -> None:
        for stage in stages:
            await tally.run(stage, "release", step, stage.release, job)

    async def _bring_back(self, job: Job, step: Step, tally: Tally, last: Literal["release", "abort"]) -> None:
        """All stages, from whatever they show."""
        for stage in reversed(self._stages):
            if asks(stage) and not self._can_ask(job):
                continue
            probe = await stage.probe(job)
            if probe.state in _OUT:
                await self._restore(stage, job, _ALL, step, tally)
                await self._let_go(job, [stage], step, tally)
            elif probe.locked:
                end = stage.release if last == "release" else stage.abort
                await tally.run(stage, last, step, end, job)

    async def _refuse_suspended(self, job: Job, remedy: str) -> None:
        if combined(await self._looks(job)).state is Residency.SUSPENDED:
            raise fault(FaultKind.UNSUPPORTED, job, f"it is suspended, {remedy}")

    async def _undo(self, job: Job, step: Step, cause: Exception) -> None:
        """After a failed prepare or suspend: everything in and running, or a poisoned fault."""
        try:
            await self._bring_back(job, _undo_step(step), Tally(), "abort")
        except BackendError as error:
            raise fault(FaultKind.POISONED, job, f"{cause}; and putting it back failed: {error}") from cause

    async def _put_out_again(self, job: Job, selection: Selection, step: Step, cause: Exception) -> None:
        """After a failed restore: the stages that came in leave again, so the job is suspended as a whole."""
        try:
            await self._go_out(job, await self._looks(job), selection, _undo_step(step), Tally())
        except BackendError as error:
            raise fault(FaultKind.POISONED, job, f"{cause}; and putting it out again failed: {error}") from cause


def _to_do(looks: Sequence[Look]) -> list[Look]:
    """The stages that a job on its way out still has to pass: none that it has nothing for, nor what it left behind."""
    if combined(looks).state not in {Residency.RESIDENT, Residency.FAULTED}:
        return []
    return [look for look in looks if look.probe and (look.has_any or not moves(look.stage))]


def _undo_step(step: Step) -> Step:
    return Step(step.undo_until() - time.monotonic())
