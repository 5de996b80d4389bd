"""Backends on a checkpoint tool with cuda-checkpoint's flags: everything but what the device itself tells.

A job's processes go through each step together: lock all, checkpoint all; restore all, unlock all, under one deadline,
because a locked rank may keep its peers from answering. Each target is looked at before an action and after it, so a
repeat is harmless and a tool that claims too much is noticed.
"""

# ruff: noqa: ARG002 - the interface has these arguments
from __future__ import annotations

import asyncio
import time
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from timeslice.backends.base import Backend, Context, Job, Outcome, Probe, Selection
from timeslice.backends.checks import check_selection, fault, is_alive, living
from timeslice.backends.steps import Step, combine, together
from timeslice.backends.toolrun import State, Tool, ToolFailedError, ToolMissingError, ToolOverdueError
from timeslice.errors import BackendError, FaultKind
from timeslice.models import Residency, Target

SETTLE_S = 2.0  # for a call that is overdue while its peers are put back: often it waited for them
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.01, 0.5

# action -> state that it needs, state that it leaves
_ACTIONS = {
    "lock": (State.RUNNING, State.LOCKED),
    "checkpoint": (State.LOCKED, State.CHECKPOINTED),
    "restore": (State.CHECKPOINTED, State.LOCKED),
    "unlock": (State.LOCKED, State.RUNNING),
}
_RESIDENCY = {
    State.RUNNING: Residency.RESIDENT,
    State.LOCKED: Residency.RESIDENT,
    State.CHECKPOINTED: Residency.SUSPENDED,
}
# A lock fails now and then for no lasting reason. A copy that failed is not tried again: a second restore into a
# device without room can cost the driver its senses.
_RETRIED = ("lock", "unlock")


@dataclass(frozen=True, kw_only=True)
class Seen:
    """One process on the device. Bytes are measured, except ``total_bytes``: all that it has, wherever it is."""

    state: State
    device_bytes: int
    host_bytes: int
    total_bytes: int


class CheckpointBackend(Backend):
    """What a subclass adds: `see`, the capabilities, health and memory."""

    bare_bytes = 0  # a process with less than this on the device has a context and no state

    def __init__(self, context: Context, tool: Tool) -> None:
        self._context = context
        self._tool = tool

    @abstractmethod
    async def see(self, job: Job, target: Target) -> Seen | None:
        """Look at a living target without changing anything; None when it has no context on the group's devices."""

    async def state_of(self, job: Job, target: Target, until: float) -> State | None:
        """State of a living target, after whatever a dead operator left half done was put right."""
        return await self._tool.state(target, until)

    async def probe(self, job: Job) -> Probe:
        seen = await self._see_all(job)
        state = combine(_RESIDENCY[s.state] for s in seen.values() if not self._is_bare(s))
        if any(self._tool.overdue(target) for target in seen):
            state = Residency.FAULTED
        return Probe(
            state=state,
            device_bytes=sum(s.device_bytes for s in seen.values()),
            host_bytes=sum(s.host_bytes for s in seen.values()),
            locked=any(s.state is State.LOCKED for s in seen.values()),
        )

    async def estimate(self, job: Job, selection: Selection) -> int:
        seen = await self._see_all(job)
        return sum(max(0, s.total_bytes - s.host_bytes) for s in seen.values() if s.state is not State.CHECKPOINTED)

    async def prepare(self, job: Job, selection: Selection, *, deadline_s: float) -> Outcome:
        check_selection(self.capabilities(), job, selection)
        step = Step(deadline_s)
        if any(not self._is_bare(s) for s in (await self._see_all(job)).values()):
            await self._lock_all(job, step)
        return step.outcome()

    async def suspend(self, job: Job, selection: Selection, *, deadline_s: float) -> Outcome:
        check_selection(self.capabilities(), job, selection)
        step = Step(deadline_s)
        before = await self._see_all(job)
        if all(self._is_bare(s) for s in before.values()):
            return step.outcome()
        await self._lock_all(job, step)
        moved = sum(s.total_bytes for s in before.values() if s.state is not State.CHECKPOINTED)
        try:
            await self._all(job, "checkpoint", await self._members(job, step.until, State.LOCKED), step.until)
        except Exception as error:
            await self._run_on(job, step, error)
            raise
        step.note("checkpoint")
        left = sum(s.device_bytes for s in (await self._see_all(job)).values())
        return step.outcome(moved, max(0, sum(s.device_bytes for s in before.values()) - left))

    async def restore(self, job: Job, selection: Selection, *, deadline_s: float) -> Outcome:
        check_selection(self.capabilities(), job, selection)
        step = Step(deadline_s)
        members = await self._members(job, step.until, State.CHECKPOINTED)
        try:
            await self._all(job, "restore", members, step.until)
        except Exception as error:
            await self._put_out_again(job, step, error)
            raise
        step.note("restore")
        seen = await self._see_all(job)
        return step.outcome(sum(s.total_bytes for target, s in seen.items() if target in members))

    async def release(self, job: Job, *, deadline_s: float) -> Outcome:
        step = Step(deadline_s)
        if await self._members(job, step.until, State.CHECKPOINTED):
            raise fault(FaultKind.UNSUPPORTED, job, "it is suspended; restore it before it is released")
        await self._all(job, "unlock", await self._members(job, step.until, State.LOCKED), step.until)
        step.note("unlock")
        return step.outcome()

    async def abort(self, job: Job, *, deadline_s: float) -> Outcome:
        step = Step(deadline_s)
        states = await self._states(job, step.until)
        if states and all(state is State.CHECKPOINTED for state in states.values()):
            raise fault(FaultKind.UNSUPPORTED, job, "it is suspended, so there is no prepare to undo; restore it")
        await self._bring_back(job, step.until)
        step.note("unlock")
        return step.outcome()

    def _is_bare(self, seen: Seen) -> bool:
        return seen.state is not State.CHECKPOINTED and seen.device_bytes < self.bare_bytes

    async def _see_all(self, job: Job) -> dict[Target, Seen]:
        targets = living(job)
        found = await asyncio.gather(*(self.see(job, target) for target in targets))
        return {target: seen for target, seen in zip(targets, found, strict=True) if seen}

    async def _states(self, job: Job, until: float) -> dict[Target, State]:
        targets = living(job)
        states = await together(self._look(job, target, until) for target in targets)
        return {target: state for target, state in zip(targets, states, strict=True) if state}

    async def _members(self, job: Job, until: float, wanted: State) -> list[Target]:
        return [target for target, state in (await self._states(job, until)).items() if state is wanted]

    async def _look(self, job: Job, target: Target, until: float) -> State | None:
        """State of a target; None when it ended or has no context."""
        pause = _FIRST_PAUSE_S
        while await self._tool.idle(target, until):
            if not is_alive(target):
                return None
            try:
                return await self.state_of(job, target, until)
            except ToolOverdueError:
                break
            except ToolMissingError as error:
                raise fault(FaultKind.UNSUPPORTED, job, str(error)) from error
            except ToolFailedError as error:
                if not is_alive(target):
                    return None
                if time.monotonic() + pause > until:
                    raise fault(
                        FaultKind.TRANSIENT, job, f"the state of process {target.pid} can't be read: {error}"
                    ) from error
            await asyncio.sleep(pause)
            pause = min(pause * 2, _LONGEST_PAUSE_S)
        raise self._overdue(job, target)

    def _overdue(self, job: Job, target: Target) -> BackendError:
        return fault(FaultKind.POISONED, job, self._tool.overdue(target) or "a checkpoint tool was overdue")

    async def _lock_all(self, job: Job, step: Step) -> None:
        targets = await self._members(job, step.until, State.RUNNING)
        try:
            await self._all(job, "lock", targets, step.until)
        except Exception as error:
            await self._run_on(job, step, error)
            raise
        step.note("lock")

    async def _all(self, job: Job, action: str, targets: Sequence[Target], until: float) -> None:
        await together(self._act(job, target, action, until) for target in targets)

    async def _act(self, job: Job, target: Target, action: str, until: float) -> None:
        """One action on one target, until it is seen to have worked or the target is gone."""
        needed, wanted = _ACTIONS[action]
        pause, complaint = _FIRST_PAUSE_S, ""
        while True:
            state = await self._look(job, target, until)
            if state is None or state is wanted:
                return
            if complaint and (action not in _RETRIED or time.monotonic() + pause > until):
                raise fault(FaultKind.TRANSIENT, job, complaint)
            if state is not needed:
                raise fault(
                    FaultKind.TRANSIENT, job, f"{action} needs process {target.pid} {needed}, and it is {state}"
                )
            if complaint:
                await asyncio.sleep(pause)
                pause = min(pause * 2, _LONGEST_PAUSE_S)
            try:
                await self._tool.act(target, action, until)
                complaint = f"{action} of process {target.pid} claimed success, and the process is still {needed}"
            except (ToolFailedError, ToolMissingError) as error:
                complaint = str(error)
            except ToolOverdueError:
                raise self._overdue(job, target) from None

    async def _run_on(self, job: Job, step: Step, cause: Exception) -> None:
        """After a failed prepare or suspend: everything back on the device and running, or a poisoned fault."""
        try:
            await self._bring_back(job, step.undo_until())
        except BackendError as error:
            raise fault(FaultKind.POISONED, job, f"{cause}; and putting it back failed: {error}") from cause
        if isinstance(cause, BackendError) and cause.kind is FaultKind.POISONED:  # an overdue call that ended after all
            raise fault(FaultKind.TRANSIENT, job, f"{cause}; but it ended, and all was put back") from cause

    async def _bring_back(self, job: Job, until: float) -> None:
        await together(self._bring_target_back(job, target, until) for target in living(job))

    async def _bring_target_back(self, job: Job, target: Target, until: float) -> None:
        if not await self._tool.idle(target, min(until, time.monotonic() + SETTLE_S)):
            raise self._overdue(job, target)
        if await self._look(job, target, until) is State.CHECKPOINTED:
            await self._act(job, target, "restore", until)
        if await self._look(job, target, until) is State.LOCKED:
            await self._act(job, target, "unlock", until)

    async def _put_out_again(self, job: Job, step: Step, cause: Exception) -> None:
        """After a failed restore: the targets that came in leave again, so the job is suspended as a whole."""
        until = step.undo_until()
        try:
            await self._all(job, "checkpoint", await self._members(job, until, State.LOCKED), until)
        except BackendError as error:
            raise fault(FaultKind.POISONED, job, f"{cause}; and putting it out again failed: {error}") from cause
