"""The backend that moves nothing: for jobs without device state, for tests of what stands above, and for the bench."""

# ruff: noqa: ARG002 - the interface has these arguments
from __future__ import annotations

from collections.abc import Sequence

from timeslice.backends.base import Backend, Capabilities, Context, DeviceMemory, Job, Outcome, Probe, Selection
from timeslice.backends.checks import check_selection, living
from timeslice.models import Residency


class NoopBackend(Backend):
    """Believes what it was told. After a restart it knows of nothing suspended, which is then the truth."""

    name = "noop"

    def __init__(self, context: Context) -> None:
        self._context = context
        self._suspended: set[str] = set()
        self._locked: set[str] = set()

    def capabilities(self) -> Capabilities:
        return Capabilities(forced=True, overlaps=True)  # nothing of the process is needed, nothing is copied

    async def probe(self, job: Job) -> Probe:
        if not living(job):
            self._suspended.discard(job.job)
            self._locked.discard(job.job)
            return Probe(state=Residency.ABSENT)
        state = Residency.SUSPENDED if job.job in self._suspended else Residency.RESIDENT
        return Probe(state=state, locked=job.job in self._locked)

    async def estimate(self, job: Job, selection: Selection) -> int:
        return 0

    async def prepare(self, job: Job, selection: Selection, *, deadline_s: float) -> Outcome:
        check_selection(self.capabilities(), job, selection)
        if living(job) and job.job not in self._suspended:
            self._locked.add(job.job)
        return Outcome()

    async def suspend(self, job: Job, selection: Selection, *, deadline_s: float) -> Outcome:
        check_selection(self.capabilities(), job, selection)
        if living(job):
            self._suspended.add(job.job)
            self._locked.discard(job.job)
        return Outcome()

    async def restore(self, job: Job, selection: Selection, *, deadline_s: float) -> Outcome:
        check_selection(self.capabilities(), job, selection)
        if job.job in self._suspended and living(job):
            self._suspended.discard(job.job)
            self._locked.add(job.job)
        return Outcome()

    async def release(self, job: Job, *, deadline_s: float) -> Outcome:
        self._locked.discard(job.job)
        return Outcome()

    async def abort(self, job: Job, *, deadline_s: float) -> Outcome:
        self._locked.discard(job.job)
        return Outcome()

    async def health(self) -> Sequence[str]:
        return ()

    async def memory(self) -> Sequence[DeviceMemory]:
        return ()
