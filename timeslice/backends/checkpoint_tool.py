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
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

from timeslice.backends.base import Backend, Context, Job, Outcome, Probe, Selection
from timeslice.backends.checks import check_selection, fault, is_alive, living
from timeslice.backends.steps import Step, combine, together
from timeslice.backends.toolrun import State, Tool, ToolFailedError, ToolMissingError, ToolOverdueError
from timeslice.errors import BackendError, FaultKind
from timeslice.models import Residency, Target

SETTLE_S = 2.0  # for a call that is overdue while its peers are put back: often it waited for them
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.01, 0.5

# action -> state that it needs, state that it leaves
ACTIONS = {
    "lock": (State.RUNNING, State.LOCKED),
    "checkpoint": (State.LOCKED, State.CHECKPOINTED),
    "restore": (State.CHECKPOINTED, State.LOCKED),
    "unlock": (State.LOCKED, State.RUNNING),
}
_RESIDENCY = {
    State.RUNNING: Residency.RESIDENT,
    State.LOCKED: Residency.RESIDENT,
    State.CHECKPOINTED: Residency.SUSPENDED,
    State.FAILED: Residency.FAULTED,
}
# A lock fails now and then for no lasting reason. A copy that failed is not tried again: a second restore into a
# device without room can cost the driver its senses.
_RETRIED = ("lock", "unlock")


@dataclass(frozen=True, kw_only=True)
class Seen:
    """One process on the device. Bytes are measured, except ``total_bytes``: all that it has, wherever it is, and
    ``copied_bytes``: of which host memory has a valid copy while they are on the device."""

    state: State
    device_bytes: int
    host_bytes: int
    total_bytes: int
    copied_bytes: int = 0
    on: Mapping[str, int | None] = field(default_factory=dict)  # device -> bytes there, None where nobody can tell


class CheckpointBackend(Backend):
    """What a subclass adds: `see`, the capabilities, health and memory; and what its devices need beyond that."""

    bare_bytes = 0  # a process with less than this on the device has a context and no state
    actions: Mapping[str, tuple[State, State]] = ACTIONS  # a tool may lack some: then nothing is done for them
    one_by_one: Collection[str] = ()  # actions that must not work on two processes at once

    def __init__(self, context: Context, tool: Tool) -> None:
        self._context = context
        self._tool = tool
        self._turn = asyncio.Lock()

    @abstractmethod
    async def see(self, job: Job, target: Target) -> Seen | None:
        """Look at a living target without changing anything; None when it has no context on the group's devices."""

    async def state_of(self, job: Job, target: Target, until: float) -> State | None:
        """State of a living target, after whatever a dead operator left half done was put right."""
        return await self._tool.state(target, until)

    async def do(self, job: Job, target: Target, action: str, until: float) -> None:
        """One call of the tool."""
        await self._tool.act(target, action, until)

    def movable(self, seen: Mapping[Target, Seen]) -> list[Target]:
        """Which processes of a job have to move. One that has nothing now may get something before it is locked, so
        all do as soon as one has."""
        return list(seen) if any(not self._is_bare(each) for each in seen.values()) else []

    async def check_shape(self, job: Job, seen: Mapping[Target, Seen]) -> None:
        """BackendError(unsupported) for what could leave and not come back. Nothing was touched yet."""

    async def note_leaving(self, job: Job, seen: Mapping[Target, Seen]) -> None:
        """The last moment at which all of it is on the device."""

    async def taken(self, job: Job, targets: Collection[Target]) -> int:
        """Bytes on the devices, as measured before these leave and again afterwards."""
        return sum(each.device_bytes for target, each in (await self._see_all(job)).items() if target in targets)

    async def check_room(self, job: Job, targets: Sequence[Target]) -> None:
        """BackendError when these can't come back now. Asked before each restore."""

    async def check_return(self, job: Job, targets: Sequence[Target], until: float) -> None:
        """BackendError when these came back other than they left."""

    def failure(self, job: Job, target: Target, action: str, complaint: str) -> BackendError:
        """The fault for an action that failed for good."""
        return fault(FaultKind.TRANSIENT, job, complaint)

    async def probe(self, job: Job) -> Probe:
        seen = await self._see_all(job)
        state = combine(_RESIDENCY[seen[each].state] for each in self.movable(seen) if not self._is_bare(seen[each]))
        if any(self._tool.overdue(target) for target in living(job)):
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
        await self._lock_all(job, await self._leaving(job), step)
        return step.outcome()

    async def suspend(self, job: Job, selection: Selection, *, deadline_s: float) -> Outcome:
        check_selection(self.capabilities(), job, selection)
        step = Step(deadline_s)
        leaving = await self._leaving(job)
        if not leaving:
            return step.outcome()
        await self._lock_all(job, leaving, step)
        going = [s for s in leaving.values() if s.state is not State.CHECKPOINTED]
        saved = sum(s.copied_bytes for s in going)
        moved = sum(s.total_bytes for s in going) - saved
        try:
            before = await self.taken(job, leaving)
            await self.note_leaving(job, leaving)
            await self._all(job, "checkpoint", await self._ready(job, "checkpoint", step.until, leaving), step.until)
            step.note("checkpoint")
            freed = max(0, before - await self.taken(job, leaving))
        except Exception as error:
            await self._run_on(job, step, error)
            raise
        return step.outcome(moved, freed, saved)

    async def restore(self, job: Job, selection: Selection, *, deadline_s: float) -> Outcome:
        check_selection(self.capabilities(), job, selection)
        step = Step(deadline_s)
        members = await self._ready(job, "restore", step.until)
        await self.check_room(job, members)
        try:
            await self._all(job, "restore", members, step.until)
            await self.check_return(job, members, step.until)
            step.note("restore")
            seen = await self._see_all(job)
        except Exception as error:
            await self._put_out_again(job, members, step, error)
            raise
        return step.outcome(sum(s.total_bytes for target, s in seen.items() if target in members))

    async def release(self, job: Job, *, deadline_s: float) -> Outcome:
        step = Step(deadline_s)
        if await self._ready(job, "restore", step.until):
            raise fault(FaultKind.UNSUPPORTED, job, "it is suspended; restore it before it is released")
        await self._all(job, "unlock", await self._ready(job, "unlock", step.until), step.until)
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

    async def _leaving(self, job: Job) -> dict[Target, Seen]:
        """Who has to move, once it is certain that all of them can."""
        seen = await self._see_all(job)
        leaving = {target: seen[target] for target in self.movable(seen)}
        for target, each in leaving.items():
            if each.state is State.FAILED:
                raise self._given_up(job, target)
        await self.check_shape(job, leaving)
        return leaving

    async def _ready(
        self, job: Job, action: str, until: float, among: Collection[Target] | None = None
    ) -> list[Target]:
        """Who is in the state that an action needs; nobody for an action that the tool does not have."""
        states = await self._states(job, until)
        needed = self.actions[action][0] if action in self.actions else None
        return [target for target, state in states.items() if state is needed and (among is None or target in among)]

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

    @staticmethod
    def _given_up(job: Job, target: Target) -> BackendError:
        return fault(FaultKind.POISONED, job, f"the driver gave process {target.pid} up; end it")

    def _overdue(self, job: Job, target: Target) -> BackendError:
        return fault(FaultKind.POISONED, job, self._tool.overdue(target) or "a checkpoint tool was overdue")

    async def _lock_all(self, job: Job, leaving: Collection[Target], step: Step) -> None:
        targets = await self._ready(job, "lock", step.until, leaving)
        try:
            await self._all(job, "lock", targets, step.until)
        except Exception as error:
            await self._run_on(job, step, error)
            raise
        step.note("lock")

    async def _all(self, job: Job, action: str, targets: Sequence[Target], until: float) -> None:
        """One action on targets that were just seen ready for it. None is looked at again before its turn: while some
        of them are locked, the others may not even tell their state."""
        steps = [self._act(job, target, action, until, self.actions[action][0]) for target in targets]
        if action not in self.one_by_one:
            await together(steps)
            return
        for number, step in enumerate(steps):
            try:
                await step
            except BaseException:
                for rest in steps[number + 1 :]:
                    rest.close()
                raise

    async def _act(self, job: Job, target: Target, action: str, until: float, state: State | None = None) -> None:
        """One action on one target, until it is seen to have worked or the target is gone. ``state`` is what was just
        seen of it."""
        needed, wanted = self.actions[action]
        pause, complaint = _FIRST_PAUSE_S, ""
        while True:
            state = state or await self._look(job, target, until)
            if state is None or state is wanted or not is_alive(target):
                return
            if complaint and (action not in _RETRIED or time.monotonic() + pause > until):
                raise self.failure(job, target, action, complaint)
            if state is not needed:
                kind = FaultKind.POISONED if state is State.FAILED else FaultKind.TRANSIENT
                raise fault(kind, job, f"{action} needs process {target.pid} {needed}, and it is {state}")
            if complaint:
                await asyncio.sleep(pause)
                pause = min(pause * 2, _LONGEST_PAUSE_S)
            complaint, state = await self._attempt(job, target, action, until), None

    async def _attempt(self, job: Job, target: Target, action: str, until: float) -> str:
        """What is wrong if the target does not show the wanted state now."""
        async with self._turn if action in self.one_by_one else nullcontext():
            if action == "restore":
                await self.check_room(job, [target])
            try:
                await self.do(job, target, action, until)
            except (ToolFailedError, ToolMissingError) as error:
                return str(error)
            except ToolOverdueError:
                raise self._overdue(job, target) from None
        return f"{action} of process {target.pid} claimed success, and the process is still {self.actions[action][0]}"

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
        state = await self._look(job, target, until)
        if state is State.LOCKED:
            await self._act(job, target, "unlock", until)
        elif state is State.FAILED:
            raise self._given_up(job, target)

    async def _put_out_again(self, job: Job, members: Collection[Target], step: Step, cause: Exception) -> None:
        """After a failed restore: the targets that came in leave again, so the job is suspended as a whole."""
        until = step.undo_until()
        came = None if "lock" in self.actions else members  # where nothing is locked, who ran all along stays
        try:
            await self._all(job, "checkpoint", await self._ready(job, "checkpoint", until, came), until)
        except BackendError as error:
            raise fault(FaultKind.POISONED, job, f"{cause}; and putting it out again failed: {error}") from cause
