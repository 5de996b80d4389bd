"""The backend ``tmpcopy``: a process keeps its state in one file of a fast folder, which is too small for two jobs.

The file is called ``PID-START.state``, after the process that it belongs to (`state_file`). Moved out it is in the slow
folder. A process must not touch its file while ``PID-START.locked`` stands beside it.
"""

# ruff: noqa: ARG002 - the interface has these arguments
from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from timeslice.backends.base import Backend, Capabilities, Context, DeviceMemory, Job, Outcome, Probe, Selection
from timeslice.backends.checks import check_selection, fault, living
from timeslice.backends.steps import Step, combine
from timeslice.errors import BackendError, FaultKind
from timeslice.models import Residency, Target


def state_file(folder: Path, pid: int, start: int) -> Path:
    """Where the process with this number and start time (field 22 of /proc/PID/stat) keeps its state."""
    return folder / f"{pid}-{start}.state"


class TmpcopyBackend(Backend):
    """Options: ``fast`` and ``slow``, the two folders. Both have to be there."""

    name = "tmpcopy"
    options = frozenset({"fast", "slow"})

    def __init__(self, context: Context) -> None:
        given = {name: context.options.get(name, "") for name in sorted(self.options)}
        for name, folder in given.items():
            if not folder or not Path(folder).is_dir():
                raise BackendError(
                    f"group {context.group}, node {context.node}: tmpcopy: its option {name}={folder} is no folder; "
                    "write --backend tmpcopy:fast=DIR,slow=DIR",
                    kind=FaultKind.UNSUPPORTED,
                    group=context.group,
                    node=context.node,
                )
        self._fast, self._slow = Path(given["fast"]), Path(given["slow"])

    def capabilities(self) -> Capabilities:
        return Capabilities()  # offload only; the process has to heed the lock, so by force it is of no use

    async def probe(self, job: Job) -> Probe:
        # What is observed, whatever this instance may have done before: an agent may just have been started again.
        targets = living(job)
        return Probe(
            state=combine(map(self._where, targets)),
            device_bytes=sum(_size(self._at(self._fast, target)) for target in targets),
            host_bytes=sum(_size(self._at(self._slow, target)) for target in targets),
            locked=any(self._lock(target).exists() for target in targets),
        )

    async def estimate(self, job: Job, selection: Selection) -> int:
        return 0  # the slow folder is no host memory

    async def prepare(self, job: Job, selection: Selection, *, deadline_s: float) -> Outcome:
        check_selection(self.capabilities(), job, selection)
        return await self._each(job, "lock", self._hold)

    async def suspend(self, job: Job, selection: Selection, *, deadline_s: float) -> Outcome:
        check_selection(self.capabilities(), job, selection)
        try:
            return await self._each(job, "copy out", self._move_out)
        except BackendError:
            await self._each(job, "copy back", self._move_in)  # a failed suspend leaves the job where it was
            await self._each(job, "unlock", self._let_go)
            raise

    async def restore(self, job: Job, selection: Selection, *, deadline_s: float) -> Outcome:
        check_selection(self.capabilities(), job, selection)
        try:
            return await self._each(job, "copy in", self._move_in)
        except BackendError:
            await self._each(job, "copy out", self._move_out)  # all of it stays out
            raise

    async def release(self, job: Job, *, deadline_s: float) -> Outcome:
        return await self._run_on(job)

    async def abort(self, job: Job, *, deadline_s: float) -> Outcome:
        return await self._run_on(job)

    async def health(self) -> Sequence[str]:
        closed = [folder for folder in (self._fast, self._slow) if not os.access(folder, os.W_OK)]
        return [f"{folder} can't be written; give the agent's user the right to" for folder in closed]

    async def memory(self) -> Sequence[DeviceMemory]:
        return ()  # so nothing is measured, and freed_share stays 0

    async def _run_on(self, job: Job) -> Outcome:
        if (await self.probe(job)).state is Residency.SUSPENDED:
            raise fault(FaultKind.UNSUPPORTED, job, "it is suspended; restore it before it may run")
        return await self._each(job, "unlock", self._let_go)

    async def _each(self, job: Job, name: str, step: Callable[[Target], int]) -> Outcome:
        """One step for all processes; ``step`` gives the bytes that it moved."""
        clock = Step(0.0)
        try:
            moved = [await asyncio.to_thread(step, target) for target in living(job)]
        except OSError as error:
            message = f"{name} failed: {error.strerror} ({error.filename}); free space there"
            raise fault(FaultKind.TRANSIENT, job, message) from error
        clock.note(name)
        return clock.outcome(sum(moved), sum(moved))

    def _where(self, target: Target) -> Residency:
        # A file gets its name when it is complete, and the other one is removed after that: both is as good as inside.
        if self._at(self._fast, target).exists():
            return Residency.RESIDENT
        return Residency.SUSPENDED if self._at(self._slow, target).exists() else Residency.ABSENT

    def _hold(self, target: Target) -> int:
        if self._where(target) is Residency.RESIDENT:
            self._lock(target).touch()
        return 0

    def _let_go(self, target: Target) -> int:
        self._lock(target).unlink(missing_ok=True)
        return 0

    def _move_out(self, target: Target) -> int:
        self._hold(target)
        return _move(self._at(self._fast, target), self._at(self._slow, target))

    def _move_in(self, target: Target) -> int:
        if self._where(target) is Residency.RESIDENT:  # an interrupted suspend
            self._at(self._slow, target).unlink(missing_ok=True)
            return 0
        return _move(self._at(self._slow, target), self._at(self._fast, target))

    def _lock(self, target: Target) -> Path:
        return self._at(self._fast, target).with_suffix(".locked")

    @staticmethod
    def _at(folder: Path, target: Target) -> Path:
        return state_file(folder, target.pid, target.start)


def _move(source: Path, goal: Path) -> int:
    """Bytes moved; 0 if there is nothing to move. Killed anywhere it can be done again."""
    if not source.exists():
        return 0
    draft = goal.with_suffix(".new")
    try:
        shutil.copyfile(source, draft)
        draft.replace(goal)
    except OSError:
        draft.unlink(missing_ok=True)
        raise
    source.unlink()
    return _size(goal)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
