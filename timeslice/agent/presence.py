"""One job on this node: its processes, who moves it, what was just observed of it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from timeslice.agent import procfs, selection
from timeslice.agent.calling import Caller, Deadline
from timeslice.agent.choice import BackendSet
from timeslice.agent.devices import Devices, left_behind
from timeslice.agent.doubts import Doubts
from timeslice.agent.journal import Journal
from timeslice.agent.owed import Debt, Debts
from timeslice.agent.state import ERROR_LENGTH, Note, Seen
from timeslice.agent.targets import TargetRegistry
from timeslice.backends.base import Backend, Job, Probe, Selection
from timeslice.errors import BackendError, FaultKind
from timeslice.models import GroupConfig, Residency, Target

EXIT_S = 2.0  # a process that a backend saw end is gone for the kernel within this time
MEASURE_S = 5.0
FREE_S = 10.0  # device memory of an ended process may be freed late
_PAUSE_S = 0.05
_OUT = {Residency.ABSENT, Residency.GONE, Residency.SUSPENDED}


@dataclass(frozen=True)
class Presence:
    """A job with living processes here, as observed a moment ago."""

    job: Job
    backend: Backend
    probe: Probe
    debt: Debt | None = None  # seems to be out, and its device memory was not measured free yet

    @property
    def name(self) -> str:
        return self.job.job

    def asked(self, config: GroupConfig) -> Selection:
        """What is to leave, as its processes or the group's settings say."""
        return selection.resolve(self.job.targets, config, self.backend.capabilities().modes)

    def everything(self, asked: Selection | None = None) -> Selection:
        """All of it, be it that only a part was ``asked`` for; kept if that can be."""
        return selection.whole(self.job.targets, asked, self.backend.capabilities().modes)

    def seen(self, probe: Probe | None = None) -> Seen:
        """As it was found, or as ``probe`` shows it now."""
        return seen(self.job.job, probe or self.probe, self.backend.name, None if probe else self.debt)


def seen(job: str, probe: Probe, backend: str, debt: Debt | None = None) -> Seen:
    """One that owes device memory is not out, and what it owes is what it has there."""
    state = Residency.SUSPENDING if debt else probe.state
    taken = max(probe.device_bytes, debt.left if debt else 0)
    return Seen(job=job, state=state, host_bytes=probe.host_bytes, device_bytes=taken, backend=backend)


@contextmanager
def naming(job: str) -> Iterator[None]:
    """What a backend, or a deadline, says went wrong is said of this job: the message may not say whose it is."""
    try:
        yield
    except BackendError as error:
        error.job = error.job or job
        raise


class Presences:
    """Looks jobs of one group up. ``last`` keeps what was last seen of each."""

    def __init__(
        self, group: str, node: str, registry: TargetRegistry, backends: BackendSet, journal: Journal, caller: Caller
    ) -> None:
        self._group, self._node = group, node
        self.registry, self.backends, self.journal, self.caller = registry, backends, journal, caller
        self.last: dict[str, Seen] = {}
        self.debts = Debts(journal, self._measure)
        self.doubts = Doubts(group, node, registry, backends, self._measure)

    async def find(self, job: str, deadline: Deadline, *, force: bool = False) -> Presence | None:
        """The job as it is now, or None when no process of it lives here. BackendError when it can't be told: above all
        when its workload was cut off, for then it may be anywhere.

        ``force``: looked at, and then moved, from outside if some backend can.
        """
        if job in self.registry.adrift():
            raise BackendError(
                f"group {self._group}: the workload of job {job} is cut off from node {self._node}, and did not say "
                "that it ended; let it register again",
                kind=FaultKind.TRANSIENT,
                group=self._group,
                job=job,
                node=self._node,
            )
        targets = self.registry.alive(job)
        if not targets and job in self.registry.hidden:
            raise BackendError(
                f"group {self._group}: job {job} may have processes on node {self._node} that did not register, and "
                f"they can't be told now: {self.registry.hidden[job]}; once they can, this goes on by itself",
                kind=FaultKind.TRANSIENT,
                group=self._group,
                job=job,
                node=self._node,
            )
        if not targets:
            return None
        self.registry.verify(targets)
        note = self.note_of(job, targets)
        backend = self.backends.choose(job, targets, note.backend if note else "", force=force)
        here = Job(group=self._group, job=job, node=self._node, targets=targets)
        with naming(job):
            probe = await self.caller.look(f"probe of job {job}", lambda: backend.probe(here), deadline)
        return Presence(here, backend, probe, await self.debts.of_one_out(job, targets, probe))

    def note_of(self, job: str, targets: Sequence[Target]) -> Note | None:
        """How these processes left the device, if they did. Not how others did, of an earlier run of the job."""
        note = self.journal.ledger.notes.get(job)
        known = note is not None and any((target.pid, target.start) in note.processes for target in targets)
        return note if known else None

    async def act(
        self, job: str, action: Callable[[Presence], Awaitable[Seen]], deadline: Deadline, *, force: bool = False
    ) -> Seen:
        """Run ``action`` on a job. Processes that end meanwhile are left out; with the last one the job is gone,
        which is out, not a fault: F02."""
        while (found := await self.find(job, deadline, force=force)) is not None:
            # One that is on its way out shows nothing any more, though the kernel may not have freed its memory yet.
            if any(procfs.exits(target) for target in found.job.targets) and await self._some_ended(found):
                continue
            try:
                with naming(job):
                    result = await action(found)
            except BackendError as error:
                if error.kind is not FaultKind.GONE or not await self._some_ended(found):
                    raise
                continue
            if result.state in _OUT and (why := await self.doubts.beside(job)):
                raise self._may_be_here(job, why)
            living = {(target.pid, target.start) for target in self.registry.alive(job)}
            if any((target.pid, target.start) in living for target in found.job.targets):  # who answered is still there
                self.last[job] = result
                return result
        return await self.gone(job, deadline)

    async def gone(self, job: str, deadline: Deadline) -> Seen:
        """The word that a job is gone of which no process is watched here, once its device memory was measured free.

        BackendError(transient) when that is not so within the deadline, or can't be told.
        """
        wait = deadline.within(FREE_S)
        while taken := await self.left_behind(job):
            if wait.left() <= 0:
                raise BackendError(
                    f"group {self._group}: job {job} has no process on node {self._node} any more, but {taken} bytes "
                    "of its device memory are still taken; find who holds them, or wait",
                    kind=FaultKind.TRANSIENT,
                    group=self._group,
                    job=job,
                    node=self._node,
                )
            await asyncio.sleep(_PAUSE_S)
        if why := await self.doubts.about(job):
            raise self._may_be_here(job, why)
        self.last.pop(job, None)
        return self.out(job)

    def _may_be_here(self, job: str, why: str) -> BackendError:
        return BackendError(
            f"group {self._group}: job {job} may still be on the devices of node {self._node}: {why}",
            kind=FaultKind.TRANSIENT,
            group=self._group,
            job=job,
            node=self._node,
        )

    def unknown(self, job: str, why: str) -> Seen:
        """The word for a job that may be here, and that nobody can see."""
        return Seen(job=job, state=Residency.UNKNOWN, why=why[:ERROR_LENGTH])

    def out(self, job: str) -> Seen:
        """The word for a job without processes here: gone if it had some."""
        return Seen(job=job, state=Residency.GONE if job in self.registry.departed else Residency.ABSENT)

    async def left_behind(self, job: str) -> int:
        """Device bytes that ended processes of the job still seem to have."""
        had = self.last[job].device_bytes if job in self.last else 0
        dead = frozenset(self.registry.departed.get(job, ()))
        if not dead and not had:
            return 0
        others = sum(seen.device_bytes for name, seen in self.last.items() if name != job)
        devices = await self._measure()
        return left_behind(devices, dead - self.registry.pids(), others, had)

    async def _measure(self) -> Devices:
        return await self.caller.look("measuring devices", self.backends.measure, Deadline(MEASURE_S))

    async def _some_ended(self, found: Presence) -> bool:
        """Whether one of these processes has ended; a backend may see it a moment before the kernel says so."""
        wait = Deadline(EXIT_S)
        while self.registry.alive(found.name) == found.job.targets:
            if wait.left() <= 0:
                return False
            await asyncio.sleep(_PAUSE_S)
        return True
