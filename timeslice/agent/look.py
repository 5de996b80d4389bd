"""Compares what is really on this node with what the group believes, outside of swaps. Level-triggered: a difference
is reported until the group has it, so that a lost report or lost data heals at the next heartbeat."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, replace

from timeslice import metrics
from timeslice.agent import procfs
from timeslice.agent.calling import Deadline
from timeslice.agent.choice import CHANNEL, HTTP
from timeslice.agent.doubts import OUT
from timeslice.agent.group import Scope
from timeslice.agent.presence import seen
from timeslice.agent.state import Seen
from timeslice.agent.targets import MAX_ENDED
from timeslice.backends.base import Job, Probe
from timeslice.errors import BackendError
from timeslice.locks.scripts import Observed
from timeslice.locks.view import GroupView, MemberView
from timeslice.models import Residency

log = logging.getLogger("timeslice.agent")

LOOK_S = 5.0
ANSWER_S = 0.5  # for a workload that has not answered before: the heartbeat waits meanwhile
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 30.0  # until it is asked again
_LOWER = {Residency.ABSENT, Residency.GONE}


@dataclass(frozen=True)
class _Finding:
    seen: Seen
    measured: bool  # the backend measures device memory, so that "nothing there" means something


class Looker:
    """Looks at every job of one group. The caller holds the executor's turn."""

    def __init__(self, scope: Scope) -> None:
        self._scope = scope
        self._believed: dict[str, str] = {}  # job with processes here -> residency, when the server last knew it
        self._strays: set[str] = set()  # cut off, and at the last look nothing was known of them
        self._silent: dict[str, tuple[float, float]] = {}  # job that gave no answer -> when to ask, pause after that

    async def look(self, view: GroupView, *, first: bool = False, whole: bool = False) -> list[Observed]:
        """What the group should be told: what it does not know, or with ``whole`` all.

        ``first``: nothing is remembered yet, so the jobs themselves are asked.
        """
        scope = self._scope
        owing = scope.ledger.owed
        adrift = self._adrift(view)

        async def find(job: str) -> _Finding | None:
            if job in adrift:
                return adrift[job]
            look = self._ask if first or job in owing else self._observe
            seen = await (self._welcome(view, job) if job in back else look(job))
            # One on its way out shows nothing any more, though the kernel may not have freed its memory yet.
            if any(procfs.exits(target) for target in scope.registry.alive(job)):
                seen = None
            seen = seen or await self._heard(view, job) or self._remembered(view, job)
            return await self._with_hidden(view, job, seen)

        back = {job for job, _ in scope.registry.cut_off} - adrift.keys()
        jobs = {*scope.registry.jobs(), *adrift}
        found = [f for f in await asyncio.gather(*map(find, sorted(jobs))) if f]
        found += [f for f in await asyncio.gather(*map(self._unseen, sorted(self._departed()))) if f]
        found = [f for f in found if f.seen.state != Residency.UNKNOWN or f.seen.job != view.holder]  # it is at work
        scope.note([finding.seen for finding in found])
        scope.out_at = {job: at for job, at in scope.out_at.items() if job in view.jobs or scope.registry.alive(job)}
        unheld = {f.seen.job for f in found if self._is_unheld(view, f.seen)}
        unknown = sum(f.seen.state == Residency.UNKNOWN for f in found)
        metrics.UNKNOWN_JOBS.labels(scope.name).set(unknown)
        metrics.UNHELD_JOBS.labels(scope.name).set(len(unheld))
        self._remember(view)
        news = [finding for finding in found if whole or self._is_news(view, finding, finding.seen.job in unheld)]
        for finding in found:
            if finding.seen.state == Residency.GONE and not self._is_known(view, finding.seen.job):
                scope.registry.forget(finding.seen.job)
        return [_observed(finding.seen, unheld) for finding in news]

    async def _unseen(self, job: str) -> _Finding | None:
        """A job with no process that is watched here. None while memory of processes that ended is not free yet."""
        presences = self._scope.presences
        if await presences.left_behind(job):
            return None
        why = await presences.doubts.about(job)
        if why and presences.doubts.told.get(job) == Residency.SUSPENDED:
            return None
        return _Finding(presences.unknown(job, why) if why else presences.out(job), measured=True)

    async def _with_hidden(self, view: GroupView, job: str, found: _Finding | None) -> _Finding | None:
        """What was found of a job's watched processes, and what follows of those that may be hidden."""
        presences, told = self._scope.presences, _member(view, self._scope.node, job)
        if found and found.seen.state not in _LOWER:
            return found
        if job in presences.doubts.presumed and (why := await presences.doubts.beside(job)):
            return _Finding(presences.unknown(job, why), measured=True)
        if found is None and told and told.state == Residency.UNKNOWN:  # it can be moved now: it is where it was let in
            return _Finding(Seen(job=job, state=Residency.RESIDENT), measured=False)
        return found

    async def _observe(self, job: str) -> _Finding | None:
        """From outside, without asking the job; None if that tells nothing."""
        targets = self._scope.registry.alive(job)
        backend = self._scope.backends.observer(targets)
        if backend is None or not targets:
            return None
        here = Job(group=self._scope.name, job=job, node=self._scope.node, targets=targets)
        try:
            probe = await self._scope.caller.look(f"probe of job {job}", lambda: backend.probe(here), Deadline(LOOK_S))
        except BackendError as error:
            log.warning("group %s: job %s could not be looked at: %s", self._scope.name, job, error)
            return None
        if probe.state is Residency.ABSENT and any(target.channel for target in targets):
            return None  # a workload may keep its state where only it can see it
        note, last = self._scope.presences.note_of(job, targets), self._scope.presences.last.get(job)
        if note and note.backend != backend.name:
            stayed = last.device_bytes if last and last.state == Residency.SUSPENDED else 0
            if note.leave.tags or note.leave.slot or probe.device_bytes <= stayed:
                return None  # a context, or a part that stayed; whether it runs only who moved it out can tell
        debt = await self._scope.presences.debts.of_one_out(job, targets, probe)
        measured = backend.capabilities().freed_share > 0
        return _evidence(probe, seen(job, probe, backend.name, debt), measured=measured)

    async def _ask(self, job: str) -> _Finding | None:
        try:
            found = await self._scope.presences.find(job, Deadline(LOOK_S))
        except BackendError as error:
            log.warning("group %s: job %s could not be asked for its state: %s", self._scope.name, job, error)
            return await self._observe(job)
        if found is None:
            return None
        measured = found.backend.capabilities().freed_share > 0
        return _evidence(found.probe, found.seen(), measured=measured) or await self._observe(job)

    def _adrift(self, view: GroupView) -> dict[str, _Finding | None]:
        """Jobs whose workload was cut off without a good-bye: suspended if it was, for only an order brings it back;
        else unknown. While one holds, that keeps everybody out as well, and it may come back meanwhile."""
        found: dict[str, _Finding | None] = {}
        registry = self._scope.registry
        strays = set()
        for job in registry.adrift():
            state, last = self._stood(view, job), self._scope.presences.last.get(job)
            if not state and job in self._strays and len(registry.ended) < MAX_ENDED:
                registry.settle(job)  # it never had anything, also by a word that is later than its end
                continue
            found[job] = None
            if not state:
                strays.add(job)
            elif state in {Residency.SUSPENDED, Residency.SUSPENDING}:
                found[job] = _Finding(last, measured=False) if last and last.state == state else None
            elif view.holder != job:
                found[job] = _Finding(Seen(job=job, state=Residency.FAULTED, backend=CHANNEL), measured=False)
        self._strays = strays
        return found

    def _stood(self, view: GroupView, job: str) -> str:
        """Where a job that was cut off is last known to have been; '' if it never had anything."""
        told, last = _member(view, self._scope.node, job), self._scope.presences.last.get(job)
        if told or last:
            return told.state if told else last.state if last else ""
        knows = self._scope.node in view.nodes or view.counter >= self._scope.floor  # else the server has lost data
        return "" if knows else Residency.FAULTED

    async def _welcome(self, view: GroupView, job: str) -> _Finding | None:
        """A workload that was cut off is here again: it alone can tell where its state is, also without any bytes."""
        if not self._stood(view, job):
            self._scope.registry.settle(job)
            return await self._observe(job)
        try:
            found = await self._scope.presences.find(job, Deadline(LOOK_S))
        except BackendError as error:
            log.warning("group %s: job %s is back and could not be asked: %s", self._scope.name, job, error)
            return None
        if found is None:
            return None
        self._scope.registry.settle(job)
        return _Finding(found.seen(), measured=False)

    async def _heard(self, view: GroupView, job: str) -> _Finding | None:
        """Where a job is of which nothing is known, for its workload did not answer an order: once it answers."""
        scope = self._scope
        last = scope.presences.last.get(job) or _member(view, scope.node, job)
        asks = any(target.channel and target.backend != HTTP for target in scope.registry.alive(job))
        if not asks or last is None or last.state != Residency.FAULTED:
            self._silent.pop(job, None)
            return None
        at, pause = self._silent.get(job, (0.0, _FIRST_PAUSE_S))
        if time.monotonic() < at:
            return None
        try:
            found = await scope.presences.find(job, Deadline(ANSWER_S))
        except BackendError:  # said when it began
            found = None
        measured = bool(found and found.backend.capabilities().freed_share > 0)
        if not found or found.probe.state is Residency.FAULTED or (found.probe.state in _LOWER and not measured):
            self._silent[job] = time.monotonic() + pause, min(pause * 2, _LONGEST_PAUSE_S)
            return None
        log.info("group %s: the workload of job %s answers again: %s", scope.name, job, found.probe.state)
        return _Finding(found.seen(), measured=measured)

    def _remembered(self, view: GroupView, job: str) -> _Finding | None:
        """What the last step made of a job, or what the group believed of it before it lost its data: the best there
        is where nothing can be observed from outside."""
        last = self._scope.presences.last.get(job)
        if last is None and job not in view.jobs and self._believed.get(job) == Residency.RESIDENT:
            last = Seen(job=job, state=Residency.RESIDENT)
        return _Finding(last, measured=False) if last else None

    def _remember(self, view: GroupView) -> None:
        jobs = self._scope.registry.jobs()
        known = {job: view.jobs[job].residency for job in jobs if job in view.jobs}
        # A server that knows nothing of our node has forgotten, and is no authority.
        kept = {} if self._scope.node in view.nodes else self._believed
        self._believed = {job: state for job, state in (kept | known).items() if job in jobs}

    def _departed(self) -> frozenset[str]:
        """Jobs that the group or the registry knows here, with no process that is watched."""
        registry = self._scope.registry
        doubts = self._scope.presences.doubts
        known = doubts.presumed | doubts.told.keys() | registry.departed.keys()
        return known - {*registry.jobs(), *registry.hidden} - registry.adrift()

    def _is_unheld(self, view: GroupView, job: Seen) -> bool:
        """C20: bytes on the device, though it was not granted since it was last seen off it."""
        if job.state != Residency.RESIDENT or job.device_bytes == 0 or view.holder == job.job:
            return False
        if view.swap:  # who may be on the device is just changing: what was said before stands
            told = _member(view, self._scope.node, job.job)
            return told is not None and told.unheld
        record = view.jobs.get(job.job)
        return record is None or record.token <= self._scope.out_at.get(job.job, 0)

    def _is_news(self, view: GroupView, finding: _Finding, unheld: bool) -> bool:
        job = finding.seen
        told = _member(view, self._scope.node, job.job)
        if job.state in _LOWER:
            return finding.measured and view.holder != job.job and self._is_known(view, job.job)
        if not finding.measured and told is not None and told.state == job.state:
            return False
        if told is None:
            return True
        now = (job.state, job.host_bytes, job.device_bytes, job.backend, unheld, job.why)
        return now != (told.state, told.host_bytes, told.device_bytes, told.backend, told.unheld, told.why)

    def _is_known(self, view: GroupView, job: str) -> bool:
        """Whether the group still believes that something of the job is here, or somewhere without knowing where."""
        if _member(view, self._scope.node, job) is not None:
            return True
        believed = view.jobs[job].residency if job in view.jobs else ""
        return believed not in OUT and not any(member.job == job for member in view.members)


def _evidence(probe: Probe, seen: Seen, *, measured: bool) -> _Finding | None:
    """What a look proves. A process with nothing on the device is no resident job: F01."""
    if probe.state is Residency.RESIDENT and probe.device_bytes == 0:
        return None
    if seen.state == Residency.ABSENT and not measured:
        return None
    return _Finding(seen, measured=measured)


def _member(view: GroupView, node: str, job: str) -> MemberView | None:
    return next((member for member in view.members if (member.node, member.job) == (node, job)), None)


def _observed(job: Seen, unheld: set[str]) -> Observed:
    return replace(job.observed, unheld=job.job in unheld)
