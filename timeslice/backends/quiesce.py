"""The stage ``quiesce`` of a composite: tells a job's processes before they are frozen, and after they run again.

For jobs with live NCCL communicators, which don't survive a freeze: something in each process has to destroy them
before it and to rebuild them after it. What was told is written down for each process before it is told, so an agent
that dies in between tells ``after`` to one that may not have heard ``before``: both have to be harmless when repeated.
"""

# ruff: noqa: ARG002 - the interface has these arguments
from __future__ import annotations

import copy
import logging
import time
from collections.abc import Mapping, Sequence

from timeslice.backends.base import Backend, Capabilities, Context, DeviceMemory, Job, Outcome, Probe, Selection
from timeslice.backends.checks import fault, living
from timeslice.backends.hooks import Command, Hook, Signals
from timeslice.backends.marks import Marks, marks_folder
from timeslice.backends.steps import Step
from timeslice.errors import BackendError, FaultKind, UsageError
from timeslice.models import Residency, Target, Wire

log = logging.getLogger("timeslice.agent")

_COMMANDS = {"before", "after"}
_SIGNALS = {"signal_before", "signal_after", "settle"}


class Told(Wire):
    """That a process was told to make ready for a freeze."""


class QuiesceBackend(Backend):
    """Moves nothing. Options: ``signal_before`` (RTMIN+1), ``signal_after`` (RTMIN+2) and ``settle`` (1 second), or
    commands ``before`` and ``after`` instead; ``state``, the folder of what was told."""

    name = "quiesce"
    options = frozenset({"state", *_COMMANDS, *_SIGNALS})

    def __init__(self, context: Context) -> None:
        self._hook = _checked_hook(context)
        self._marks = Marks(marks_folder(context, self.name, f"quiesced-{context.group}"), Told)
        self._lenient = False

    def capabilities(self) -> Capabilities:
        return Capabilities(modes=frozenset(), forced=True)

    def outside(self) -> Backend:
        """By force it tells whoever can hear it, and goes on without the others."""
        view = copy.copy(self)
        view._lenient = True  # noqa: SLF001 - it is one of us
        return view

    async def probe(self, job: Job) -> Probe:
        """``locked`` while some process was told to make ready."""
        return Probe(state=Residency.ABSENT, locked=bool(self._told(job)))

    async def estimate(self, job: Job, selection: Selection) -> int:
        return 0

    async def prepare(self, job: Job, selection: Selection, *, deadline_s: float) -> Outcome:
        """Tell every process ``before``; all or none."""
        step = Step(deadline_s)
        self._marks.sweep()
        told = {(target.pid, target.start) for target in self._told(job)}
        fresh = self._able(job, [target for target in living(job) if (target.pid, target.start) not in told])
        if not fresh:
            return step.outcome()
        for target in fresh:
            self._marks.put(target, Told())
        try:
            await self._hook.run(job, fresh, "before", step.until)
        except BackendError as error:
            if not self._lenient:
                await self._take_back(job, step, error)
                raise
            log.warning("%s; by force, so it is frozen all the same", error)
        step.note("before")
        return step.outcome()

    async def suspend(self, job: Job, selection: Selection, *, deadline_s: float) -> Outcome:
        return Outcome()

    async def restore(self, job: Job, selection: Selection, *, deadline_s: float) -> Outcome:
        return Outcome()

    async def release(self, job: Job, *, deadline_s: float) -> Outcome:
        """Tell ``after`` to every process that was told ``before``. Repeated until it has worked."""
        step = Step(deadline_s)
        if told := self._told(job):
            await self._hook.run(job, told, "after", step.until)
            for target in told:
                self._marks.drop(target)
            step.note("after")
        return step.outcome()

    async def abort(self, job: Job, *, deadline_s: float) -> Outcome:
        return await self.release(job, deadline_s=deadline_s)

    async def health(self) -> Sequence[str]:
        return ()

    async def memory(self) -> Sequence[DeviceMemory]:
        return ()

    def _told(self, job: Job) -> list[Target]:
        return [target for target in living(job) if self._marks.get(target)]

    def _able(self, job: Job, targets: Sequence[Target]) -> list[Target]:
        """Those that can be told. BackendError(unsupported) when one can't, and nothing is told then."""
        found = []
        for target in targets:
            if not (why := self._hook.able(job, target)):
                found.append(target)
            elif not self._lenient:
                raise fault(FaultKind.UNSUPPORTED, job, why)
        return found

    async def _take_back(self, job: Job, step: Step, cause: BackendError) -> None:
        try:
            await self.release(job, deadline_s=step.undo_until() - time.monotonic())
        except BackendError as error:
            raise fault(FaultKind.POISONED, job, f"{cause}; and telling it to run on failed: {error}") from cause


def _hook(options: Mapping[str, str]) -> Hook:
    if not options.keys() & _COMMANDS:
        return Signals(options)
    if mixed := sorted(options.keys() & _SIGNALS):
        raise UsageError(f"{mixed[0]} and a command exclude each other; let the command do both")
    return Command(options)


def _checked_hook(context: Context) -> Hook:
    try:
        return _hook(context.options)
    except UsageError as error:
        raise BackendError(
            f"group {context.group}, node {context.node}: quiesce: {error}",
            kind=FaultKind.UNSUPPORTED,
            group=context.group,
            node=context.node,
        ) from None
