"""Processes of this machine that show a job, whether they registered or not, by what they were started with.

One whose environment says nothing, for it was overwritten or can't be read, is judged by whom it descends from. Who
that was is remembered for as long as it lives, since those may end before it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace

from timeslice.agent import procfs
from timeslice.agent.procfs import Line
from timeslice.agent.proof import Evidence, Shown, examine
from timeslice.names import is_name

FRESH_S = 1.0  # what was seen so long ago is good enough between swaps
BUDGET_S = 1.0  # for looking into new processes; those that are left wait for the next look
FIRST_BUDGET_S = 30.0  # an agent that starts tells the group who is here, so nobody may be left out
GRACE_S = 4.0  # a look that takes longer than its budget and this hangs, as reading a stuck process's memory does

Process = tuple[int, int]  # number and start time


NOTHING = Shown(frozenset(), frozenset(), frozenset())


@dataclass(frozen=True)
class Sighting:
    """A process that shows a job, or of which can't be told what it shows: then ``veil`` says why. ``heritage`` is what
    the process showed that such a one descends from."""

    pid: int
    start: int
    uid: int
    inner: int  # its number in its own pid namespace
    shown: Shown
    veil: str = ""
    ends: bool = False
    heritage: Shown | None = None

    @property
    def process(self) -> Process:
        return self.pid, self.start

    @property
    def unreadable(self) -> bool:
        return self.shown is NOTHING

    @property
    def shows_any(self) -> bool:
        return bool(self.shown.jobs or self.shown.files)

    @property
    def prefix(self) -> str:
        return self.heritage.prefix if self.veil and self.heritage else self.shown.prefix

    def may_be(self, group: str) -> frozenset[str]:
        """Jobs that it names, or those above a veiled one, where these are too many or name no group: whose it is in
        this one must come from elsewhere."""
        told = self.heritage if self.veil and self.heritage else self.shown
        jobs = _jobs_in(group, told)
        return frozenset(jobs) if jobs or told.groups else told.jobs

    def shows(self, group: str, job: str) -> bool:
        """Whether it may be the job's in this group: by itself, or by whom it descends from."""
        return self.shown.proves(group, job) or (job in self.shown.jobs and not self.shown.groups)


@dataclass(frozen=True)
class Snapshot:
    """Everybody at one moment. Who is in ``looked`` without a sighting shows nothing; who is not in it, nobody looked
    into yet."""

    lines: Mapping[int, Line] = field(default_factory=dict)
    looked: Mapping[Process, Sighting | None] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        """Whether everybody was looked into."""
        return all((pid, line.start) in self.looked for pid, line in self.lines.items())

    def sightings(self, prefix: str) -> list[Sighting]:
        """Oldest first. What belongs to another installation on this machine, with another prefix, is not ours."""
        found = [each for each in self.looked.values() if each and (each.shows_any or each.veil)]
        ours = [each for each in found if each.prefix == prefix or (each.veil and not each.heritage)]
        return sorted(ours, key=lambda each: (each.start, each.pid))

    def shows_no_more(self, process: Process, group: str, job: str, known: Mapping[Process, str]) -> bool:
        """Whether it runs a program now that was not started as the job's. That its environment says nothing any more
        proves nothing; but whoever shows nothing from its start must descend from the job."""
        if process not in self.looked:
            return False
        sighting = self.looked[process]
        if sighting is None:
            return True
        if sighting.shown.bare and not sighting.ends:
            return self.job_of(sighting, group, known) != job
        return not (sighting.veil or sighting.shows(group, job))

    def job_of(self, sighting: Sighting, group: str, known: Mapping[Process, str]) -> str:
        """The one job that it shows in this group; '' if there is none, or more than one: then it must say itself.

        A process that was started with the job's name but without any group's is in the groups of the ``known``
        process of that job that it descends from: whoever started it has shown that. One whose environment says nothing
        is of the job of the nearest process above it that shows or is known to have one.
        """
        shown = sighting.shown
        jobs = _jobs_in(group, shown)
        if not jobs and sighting.veil:
            jobs = self._inherited(sighting, group, known)
        elif not jobs and not shown.groups:
            jobs = {known[each] for each in self._ancestors(sighting) if known.get(each) in shown.jobs}
        job = next(iter(jobs)) if len(jobs) == 1 else ""
        return job if is_name(job) else ""

    def _inherited(self, sighting: Sighting, group: str, known: Mapping[Process, str]) -> set[str]:
        for process in self._ancestors(sighting):
            if process in known:
                return {known[process]}
            above = self.looked.get(process)
            if above is None or not above.veil:
                break
        return _jobs_in(group, sighting.heritage) if sighting.heritage else set()

    def heritage_of(self, sighting: Sighting) -> Shown | None:
        """What the nearest process above a veiled one shows that is not veiled itself; None if that shows nothing."""
        for process in self._ancestors(sighting):
            above = self.looked.get(process)
            if above is None:
                return None
            if above.shows_any:
                return above.shown
            if above.heritage:
                return above.heritage
        return None

    def started_by(self, pid: int, known: Mapping[Process, str]) -> str:
        """The job of the nearest process above this one that is known to have one, or ''."""
        return next((known[each] for each in self._above(pid) if each in known), "")

    def _ancestors(self, sighting: Sighting) -> Iterator[Process]:
        return self._above(sighting.pid)

    def _above(self, pid: int) -> Iterator[Process]:
        line, passed = self.lines.get(pid), {pid}
        while line and line.parent not in passed and (above := self.lines.get(line.parent)):
            passed.add(line.parent)
            yield line.parent, above.start
            line = above


def _jobs_in(group: str, shown: Shown) -> set[str]:
    return {job for where, job in shown.files if where == group} | (set(shown.jobs) if group in shown.groups else set())


class Scanner:
    """Looks at the processes of this machine, for all groups of an agent together. A process is looked into once, and
    once more when it starts another program."""

    def __init__(self) -> None:
        self._at = self._began = float("-inf")
        self._under_way: asyncio.Task[None] | None = None
        self._into = 0  # the process that is looked into now
        self._known: dict[tuple[int, Line], Sighting | None] = {}
        self._snapshot = Snapshot()

    async def look(self, *, fresh_s: float = FRESH_S) -> Snapshot:
        """As of at most ``fresh_s`` ago; 0 looks now. TimeoutError when that hangs: it goes on by itself, and no second
        one begins meanwhile."""
        asked = time.monotonic()
        while self._at < asked - fresh_s:
            if self._under_way is None:
                self._under_way = asyncio.create_task(self._look(), name="processes")
                self._began = time.monotonic()
            under_way = self._under_way
            left = self._began + self._budget_s + GRACE_S - time.monotonic()
            await asyncio.wait([under_way], timeout=max(left, 0.0))
            if not under_way.done():
                raise TimeoutError(
                    f"looking into process {self._into} has taken {time.monotonic() - self._began:.0f} s; it is stuck "
                    "in the kernel (state D in ps): end it, or see the kernel log"
                )
            if self._under_way is under_way:
                self._under_way = None
            under_way.result()
        return self._snapshot

    async def _look(self) -> None:
        at = time.monotonic()
        self._snapshot = await asyncio.to_thread(self._scan)
        self._at = at

    @property
    def _budget_s(self) -> float:
        return BUDGET_S if self._known else FIRST_BUDGET_S

    async def again(self, pids: Collection[int]) -> Snapshot:
        """The last look, with another one into these processes: one that registers shows more than it did before."""
        if pids and self._under_way is None:
            self._snapshot = await asyncio.to_thread(self._look_again, frozenset(pids))
        return self._snapshot

    def _look_again(self, pids: frozenset[int]) -> Snapshot:
        lines, ours = self._snapshot.lines, procfs.ancestors()
        for pid in pids & lines.keys():
            self._known[pid, lines[pid]] = _sighting(pid, lines[pid].start, ours)
        return self._told(lines)

    def _scan(self) -> Snapshot:
        lines, ours = procfs.everybody(), procfs.ancestors()
        known = {(pid, line): self._known[pid, line] for pid, line in lines.items() if (pid, line) in self._known}
        until = time.monotonic() + self._budget_s
        for pid, line in lines.items():
            if (pid, line) not in known and time.monotonic() < until:
                self._into = pid
                known[pid, line] = _sighting(pid, line.start, ours)
        self._known = known
        return self._told(lines)

    def _told(self, lines: Mapping[int, Line]) -> Snapshot:
        """With what veiled processes have from those above them, for as long as these are there to say it."""
        looked = {(pid, line.start): sighting for (pid, line), sighting in self._known.items()}
        snapshot = Snapshot(lines, looked)
        veiled = [(key, each) for key, each in self._known.items() if each and each.veil]
        for key, sighting in sorted(veiled, key=lambda pair: (pair[1].start, pair[1].pid)):  # who is above comes first
            heritage = snapshot.heritage_of(sighting) or sighting.heritage
            if heritage != sighting.heritage:
                self._known[key] = looked[sighting.process] = replace(sighting, heritage=heritage)
        return snapshot


def _sighting(pid: int, start: int, ours: frozenset[int]) -> Sighting | None:
    try:
        evidence = examine(pid, start, ours)
    except ProcessLookupError:
        return None
    if evidence.reserved:
        return None
    shown, veil = evidence.shown or NOTHING, _veil(evidence)
    if not evidence.one_user and not veil:
        return None  # its environment is its caller's, its rights are not
    if not veil and not (shown.jobs or shown.files):
        return None
    return Sighting(pid, start, evidence.uid, evidence.inner, shown, veil, evidence.ends)


def _veil(evidence: Evidence) -> str:
    if evidence.ends:
        return "it is on its way out"
    if evidence.shown is None:
        return "what it shows can't be read (run the agent as root, in a container with the capability SYS_PTRACE)"
    if evidence.shown.wiped:
        return "it has overwritten its environment, as programs do that give themselves a title"
    if evidence.shown.bare:
        return "it was started without an environment"
    return ""
