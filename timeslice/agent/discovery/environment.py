"""Processes of this machine that show a job, whether they registered or not, by what they were started with."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from timeslice.agent import procfs
from timeslice.agent.procfs import Line
from timeslice.agent.proof import Shown, examine
from timeslice.names import is_name

FRESH_S = 1.0  # what was seen so long ago is good enough between swaps
BUDGET_S = 1.0  # for looking into new processes; those that are left wait for the next look
FIRST_BUDGET_S = 30.0  # an agent that starts tells the group who is here, so nobody may be left out
GRACE_S = 4.0  # a look that takes longer than its budget and this hangs, as reading a stuck process's memory does

Process = tuple[int, int]  # number and start time


@dataclass(frozen=True)
class Sighting:
    """A process that shows a job."""

    pid: int
    start: int
    uid: int
    inner: int  # its number in its own pid namespace
    shown: Shown

    @property
    def process(self) -> Process:
        return self.pid, self.start

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
        found = [each for each in self.looked.values() if each and each.shown.prefix == prefix]
        return sorted(found, key=lambda each: (each.start, each.pid))

    def shows_no_more(self, process: Process, group: str, job: str) -> bool:
        """Whether it runs a program now that was not started as the job's."""
        if process not in self.looked:
            return False
        sighting = self.looked[process]
        return sighting is None or not sighting.shows(group, job)

    def job_of(self, sighting: Sighting, group: str, known: Mapping[Process, str]) -> str:
        """The one job that it shows in this group; '' if there is none, or more than one: then it must say itself.

        A process that was started with the job's name but without any group's is in the groups of the ``known``
        process of that job that it descends from: whoever started it has shown that.
        """
        shown = sighting.shown
        jobs = {job for where, job in shown.files if where == group} | (shown.jobs if group in shown.groups else set())
        if not jobs and not shown.groups:
            jobs = {known[each] for each in self._ancestors(sighting) if known.get(each) in shown.jobs}
        job = next(iter(jobs)) if len(jobs) == 1 else ""
        return job if is_name(job) else ""

    def _ancestors(self, sighting: Sighting) -> list[Process]:
        found: list[Process] = []
        line = self.lines.get(sighting.pid)
        while line and (above := self.lines.get(line.parent)) and (line.parent, above.start) not in found:
            found.append((line.parent, above.start))
            line = above
        return found


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

    def _scan(self) -> Snapshot:
        lines, ours = procfs.everybody(), procfs.ancestors()
        known = {(pid, line): self._known[pid, line] for pid, line in lines.items() if (pid, line) in self._known}
        until = time.monotonic() + self._budget_s
        for pid, line in lines.items():
            if (pid, line) not in known and time.monotonic() < until:
                self._into = pid
                known[pid, line] = _sighting(pid, line.start, ours)
        self._known = known
        return Snapshot(lines, {(pid, line.start): sighting for (pid, line), sighting in known.items()})


def _sighting(pid: int, start: int, ours: frozenset[int]) -> Sighting | None:
    try:
        evidence = examine(pid, start, ours)
    except ProcessLookupError:
        return None
    shown, status = evidence.shown, procfs.look_at(pid)
    if status is None or not evidence.one_user or shown is None or not (shown.jobs or shown.files):
        return None
    return Sighting(pid, start, evidence.uid, status.inner, shown)
