"""The ``process`` backend: stops a job's processes, and pages them out where swap exists.

For work on the CPU, and the forced stop of last resort. It frees no accelerator memory, and without swap no memory
at all: then a suspended job only stands still.
"""

# ruff: noqa: ARG002 - the interface has these arguments
from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable, Sequence
from typing import Literal, TypeVar

from timeslice.arena.errors import EmulatedDeviceError, TargetGoneError
from timeslice.arena.process import HeldProcess
from timeslice.arena.process import Target as HeldTarget
from timeslice.backends.base import Backend, Capabilities, Context, DeviceMemory, Job, Outcome, Probe, Selection
from timeslice.backends.checks import check_selection, fault, living
from timeslice.backends.marks import Marks, marks_folder
from timeslice.backends.pageout import free_swap_bytes, page_out, resident_bytes
from timeslice.backends.steps import Step, combine
from timeslice.errors import BackendError, FaultKind
from timeslice.models import Residency, Target, Wire

_RESIDENCY = {
    "running": Residency.RESIDENT,
    "locked": Residency.RESIDENT,
    "suspended": Residency.SUSPENDED,
    "gone": Residency.GONE,
}

T = TypeVar("T")


class Marker(Wire):
    """That we stopped a process, which /proc can't tell from a stop by a user's hand. Outlives the agent."""

    step: Literal["locked", "suspended"]
    was_stopped: bool  # a user had stopped it before: then it stays so


class ProcessBackend(Backend):
    """Options: ``state``, the folder for the marks (default: one of this user's that a reboot empties)."""

    name = "process"
    options = frozenset({"state"})

    def __init__(self, context: Context) -> None:
        self._context = context
        self._marks = Marks(marks_folder(context, "process", "stopped"), Marker)

    def capabilities(self) -> Capabilities:
        return Capabilities(forced=True)

    async def probe(self, job: Job) -> Probe:
        steps = [self._look(job, target) for target in living(job)]
        return Probe(state=combine(_RESIDENCY[step] for step in steps), locked="locked" in steps)

    async def estimate(self, job: Job, selection: Selection) -> int:
        return 0  # swap is not host memory

    async def prepare(self, job: Job, selection: Selection, *, deadline_s: float) -> Outcome:
        check_selection(self.capabilities(), job, selection)
        self._marks.sweep()
        return await self._each(job, lambda target: self._stop(job, target, deadline_s), "stop", undo=True)

    async def suspend(self, job: Job, selection: Selection, *, deadline_s: float) -> Outcome:
        check_selection(self.capabilities(), job, selection)
        return await self._each(job, lambda target: self._suspend(job, target, deadline_s), "page-out", undo=True)

    async def restore(self, job: Job, selection: Selection, *, deadline_s: float) -> Outcome:
        check_selection(self.capabilities(), job, selection)
        return await self._each(job, lambda target: self._mark_locked(job, target), "restore")

    async def release(self, job: Job, *, deadline_s: float) -> Outcome:
        if any(self._look(job, target) == "suspended" for target in living(job)):
            raise fault(FaultKind.UNSUPPORTED, job, "it is suspended; restore it before it is released")
        return await self._each(job, lambda target: self._go_on(job, target), "continue")

    async def abort(self, job: Job, *, deadline_s: float) -> Outcome:
        if (await self.probe(job)).state is Residency.SUSPENDED:
            raise fault(FaultKind.UNSUPPORTED, job, "it is suspended, so there is no prepare to undo; restore it")
        return await self._each(job, lambda target: self._go_on(job, target), "continue")

    async def health(self) -> Sequence[str]:
        return ()  # what it lacks without swap keeps it from freeing, not from working

    async def memory(self) -> Sequence[DeviceMemory]:
        return ()

    async def _each(self, job: Job, step: Callable[[Target], int], name: str, *, undo: bool = False) -> Outcome:
        """All targets or none; ``step`` gives the bytes that it freed."""
        clock = Step(0.0)
        try:
            freed = [await asyncio.to_thread(step, target) for target in living(job)]
        except BackendError:
            if undo:
                for target in living(job):
                    self._go_on(job, target)
            raise
        clock.note(name)
        return clock.outcome(sum(freed), sum(freed))

    def _look(self, job: Job, target: Target) -> Literal["running", "locked", "suspended", "gone"]:
        """What was done to a process, as far as it still shows: a mark on one that runs again is void."""
        marker = self._marks.get(target)
        if not marker:
            return "running"
        stopped = _held(job, target, HeldProcess.is_stopped)
        if stopped:
            return marker.step
        self._marks.drop(target)
        return "gone" if stopped is None else "running"

    def _stop(self, job: Job, target: Target, deadline_s: float) -> int:
        if self._look(job, target) != "running":
            return 0

        def stop(process: HeldProcess) -> None:
            # The mark first: an agent that dies behind the signal must know later that it was its own.
            self._marks.put(target, Marker(step="locked", was_stopped=process.is_stopped()))
            process.stop(deadline_s)

        if target.pid == os.getpid():
            raise fault(FaultKind.UNSUPPORTED, job, "it runs in the agent's own process, which can't stop itself")
        _held(job, target, stop)
        return 0

    def _suspend(self, job: Job, target: Target, deadline_s: float) -> int:
        self._stop(job, target, deadline_s)
        before = resident_bytes(target.pid)
        if self._look(job, target) != "locked":
            return 0
        if free_swap_bytes():
            try:
                page_out(target.pid)
            except ProcessLookupError:
                return 0
            except OSError as error:
                reason = "run the agent as root" if error.errno in (errno.EPERM, errno.EACCES) else "see the kernel log"
                raise fault(FaultKind.UNSUPPORTED, job, f"process {target.pid}: {error.strerror}; {reason}") from error
        self._remark(target, "suspended")
        return max(0, before - resident_bytes(target.pid))

    def _mark_locked(self, job: Job, target: Target) -> int:
        if self._look(job, target) == "suspended":
            self._remark(target, "locked")  # its memory comes back by itself as it runs
        return 0

    def _remark(self, target: Target, step: Literal["locked", "suspended"]) -> None:
        if marker := self._marks.get(target):
            self._marks.put(target, marker.model_copy(update={"step": step}))

    def _go_on(self, job: Job, target: Target) -> int:
        marker = self._marks.get(target)
        if marker and not marker.was_stopped:
            _held(job, target, HeldProcess.go_on)
        self._marks.drop(target)  # behind the signal: an agent that dies in between continues it once more
        return 0


def _held(job: Job, target: Target, use: Callable[[HeldProcess], T]) -> T | None:
    """Do something with exactly this process; None when it is gone."""
    try:
        with HeldProcess(HeldTarget(target.pid, target.start)) as process:
            return use(process)
    except TargetGoneError:
        return None
    except PermissionError as error:
        message = f"no right to signal process {target.pid}; run the agent as root or as its user"
        raise fault(FaultKind.UNSUPPORTED, job, message) from error
    except EmulatedDeviceError as error:
        raise fault(error.kind, job, str(error)) from error
