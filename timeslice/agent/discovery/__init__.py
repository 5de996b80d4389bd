"""Finds the processes of jobs that did not register: workers of launchers, engine cores, helpers that were forked.

A process counts if it shows by itself that it is the job's in the group (`agent.proof`), and has memory on the group's
devices. Nothing that stands in Redis makes a process one of a job's here.

Who else is on these devices is told: strangers, who show no job of the group, and those of whom nobody can tell it.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping

from timeslice import metrics
from timeslice.agent import procfs
from timeslice.agent.choice import BackendSet
from timeslice.agent.discovery.environment import FRESH_S, NOTHING, Process, Scanner, Sighting, Snapshot
from timeslice.agent.discovery.occupants import UNEXPLAINED, Occupants, occupants_of, with_arenas
from timeslice.agent.targets import TargetRegistry
from timeslice.arena.errors import EmulatedDeviceError
from timeslice.backends.base import Context
from timeslice.errors import BackendError
from timeslice.locks.view import GroupView
from timeslice.models import Residency

__all__ = ["Finder", "Scanner"]

log = logging.getLogger("timeslice.agent")

Found = list[tuple[Sighting, str]]  # a process, and its job
_SAID = 5  # of those on the devices, in one line of the log
NOBODY = 0  # as a process: bytes that no process has which can be looked into


class Finder:
    """Finds for one group. ``prefix`` is the agent's: processes of another installation are not its business.

    Of those on the group's devices that are no job's here, ``strangers`` (number -> bytes) show that they are not, and
    of the ``doubtful`` (number -> why) nobody can tell. ``blind`` says why the devices can't be listed, if they can't;
    then both are empty.
    """

    def __init__(
        self, context: Context, prefix: str, scanner: Scanner, registry: TargetRegistry, backends: BackendSet
    ) -> None:
        self._context, self._prefix, self._scanner, self._registry = context, prefix, scanner, registry
        self._backends = backends
        # Where only workloads move their own state, a process that says nothing of itself can't be moved anyway.
        self._useful = any(backends[name].capabilities().forced for name in backends.names())
        self._trouble = ""
        self._looked = False  # at everybody, with devices that could be looked at
        self._children: dict[Process, int] = {}  # taken for whom they descend from -> their image then
        self.strangers: dict[int, int] = {}
        self.doubtful: dict[int, str] = {}
        self.blind = ""

    async def find(self, view: GroupView, *, fresh_s: float = FRESH_S) -> None:
        """Watch who is the job's now, and let go who is not any more. Known ones stay: a suspended process shows
        nothing on the device."""
        registry, group = self._registry, self._context.group
        strange = {} if self._useful else self._moved_by_others(view)
        has_devices = bool(self._context.accelerators or self._context.devices)
        if not (self._useful or strange or has_devices):
            registry.hidden = {}
            self._judge({}, "it is not known what devices the group has on this node")
            return
        try:
            snapshot = await self._scanner.look(fresh_s=fresh_s)
        except OSError as error:  # such as no descriptor left
            self._complain(f"/proc can't be read: {error}")
            registry.hidden = dict.fromkeys(self._unknown(view), self._trouble)
            self._judge({}, self._trouble)
            return
        if self._useful:
            self._let_go(snapshot)
        occupants, snapshot = await self._occupants(snapshot)
        named = _named_by_others(view)
        snapshot = await self._scanner.again(self._to_look_again(snapshot, occupants, named))
        known = registry.known()
        shown = [(each, snapshot.job_of(each, group, known)) for each in snapshot.sightings(self._prefix)]
        shown += self._children_of(snapshot, occupants, known) if self._useful else []
        candidates = [(each, job) for each, job in shown if job and each.process not in known]
        if not self._useful:
            shown_jobs = {job for each in snapshot.sightings(self._prefix) for job in strange if each.shows(group, job)}
            registry.hidden = {job: strange[job] for job in strange if job in shown_jobs or not snapshot.complete}
        else:
            there = await self._on_device(candidates, occupants)
            lost = self._lost(view)
            wanted = [pair for pair in candidates if pair in (there or ()) or pair[1] in lost or _is_named(pair, named)]
            self._take(wanted)
            self._looked = self._looked or (there is not None and snapshot.complete)
            doubtful = self._unknown(view)
            if snapshot.complete:
                doubtful &= {job for _, job in candidates} if there is None else set()
            registry.hidden = dict.fromkeys(doubtful, self._trouble or "not all processes could be looked at yet")
        if occupants is None:
            self._judge({}, self._trouble or "it is not known what devices the group has on this node")
        else:
            self._judge(self._others(snapshot, occupants, {each.process for each, job in shown if job}))
        await registry.keep()

    def _children_of(self, snapshot: Snapshot, occupants: Occupants | None, known: Mapping[Process, str]) -> Found:
        """Processes on the devices that show nothing of any job, and that one of a job started: its workers, of which
        nobody has told them. They stay the job's also when that one ends, until they run another program."""
        found: Found = []
        for pid in occupants.sizes if occupants else ():
            line = snapshot.lines.get(pid)
            process = (pid, line.start) if line else (pid, 0)
            if line is None or process in known or snapshot.looked.get(process, self) is not None:
                continue
            job, status = snapshot.started_by(pid, known), procfs.look_at(pid)
            if job and status and status.one_user and status.start == line.start:
                self._children[process] = line.image
                found.append((Sighting(pid, line.start, status.uid, status.inner, NOTHING), job))
        return found

    def _let_go(self, snapshot: Snapshot) -> None:
        known = self._registry.known()
        self._children = {process: image for process, image in self._children.items() if process in known}
        for target in self._registry.found():
            line = snapshot.lines.get(target.pid)
            if line and self._children.get((target.pid, target.start)) == line.image:
                continue
            if snapshot.shows_no_more((target.pid, target.start), self._context.group, target.job, known):
                self._registry.let_go(target)

    def _moved_by_others(self, view: GroupView) -> dict[str, str]:
        """Jobs that left the device by a backend that an agent had here before, and why nothing is known of them."""
        unknown, names = self._unknown(view), self._backends.names()
        return {
            member.job: f"the backend {member.backend} has moved it out, and this agent has not got that; see the "
            "agent's log for what is missing"
            for member in view.members
            if member.node == self._context.node and member.job in unknown
            if member.state == Residency.SUSPENDED and member.backend and member.backend not in names
        }

    def _unknown(self, view: GroupView) -> set[str]:
        """Jobs of which the group says that they are here, and nobody else does."""
        here = {member.job for member in view.members if member.node == self._context.node}
        return here - {*self._registry.jobs(), *self._registry.departed}

    def _lost(self, view: GroupView) -> set[str]:
        """Jobs that are suspended on this node, and of which no process is known, or of which there may be more: their
        processes have nothing on the device by which to find them."""
        here = (member for member in view.members if member.node == self._context.node)
        suspended = {member.job for member in here if member.state == Residency.SUSPENDED}
        all_known = self._looked or self._registry.remembers
        return suspended - set(self._registry.jobs()) if all_known else suspended

    async def _occupants(self, snapshot: Snapshot) -> tuple[Occupants | None, Snapshot]:
        """Who is on the devices, None if that can't be told; and everybody, with those who have come meanwhile."""
        known = self._registry.known()
        try:
            found = await occupants_of(self._context, snapshot, known.keys())
            if found and (found.unseen or found.sizes.keys() - snapshot.lines.keys()):
                snapshot = await self._scanner.look(fresh_s=0)
                found = await occupants_of(self._context, snapshot, known.keys())
        except (BackendError, EmulatedDeviceError, OSError) as error:
            self._complain(str(error))
            return None, snapshot
        self._trouble = ""
        return found, snapshot

    def _to_look_again(
        self, snapshot: Snapshot, occupants: Occupants | None, named: Collection[tuple[str, int, int]]
    ) -> set[int]:
        """Processes that matter, and that have shown nothing of this group yet: they may by now."""
        known, starts = self._registry.known(), {start for _, _, start in named}
        on_device = occupants.sizes.keys() if occupants else set[int]()
        found = set()
        for pid, line in snapshot.lines.items():
            sighting = snapshot.looked.get((pid, line.start))
            if (pid, line.start) in known or (sighting and self._job_of(snapshot, sighting, known)):
                continue
            if pid in on_device or line.start in starts:
                found.add(pid)
        return found

    def _job_of(self, snapshot: Snapshot, sighting: Sighting, known: dict[Process, str]) -> str:
        return snapshot.job_of(sighting, self._context.group, known)

    async def _on_device(self, candidates: Found, occupants: Occupants | None) -> Found | None:
        """Those with memory on the group's devices; where there are none to look at, those that show the group
        themselves, or would if they had not overwritten it. None if that can't be told."""
        if occupants:
            asleep = await with_arenas(self._context, [each.process for each, _ in candidates])
            return [pair for pair in candidates if pair[0].pid in occupants.sizes or pair[0].process in asleep]
        if self._context.accelerators or self._context.devices:
            return None if candidates else []
        group = self._context.group
        return [(each, job) for each, job in candidates if each.shown.proves(group, job) or each.shown.wiped]

    def _others(self, snapshot: Snapshot, occupants: Occupants, ours: Collection[Process]) -> dict[int, int | str]:
        """Who is on the devices, and no job's of the group as far as can be seen: bytes, or why that can't be seen."""
        known, above = self._registry.known(), procfs.ancestors()
        found: dict[int, int | str] = {
            number: f"the driver names process {number}, which can't be seen from here; run the agent with the host's "
            "pid namespace (hostPID), as root"
            for number in occupants.unseen
        }
        for pid, size in occupants.sizes.items():
            line = snapshot.lines.get(pid)
            process = (pid, line.start) if line else (pid, 0)
            if line is None or process in known or process in ours or pid in above:
                continue
            sighting = snapshot.looked.get(process)
            if process not in snapshot.looked:
                found[pid] = f"process {pid} could not be looked into yet"
            elif sighting and sighting.prefix == self._prefix and (jobs := sighting.may_be(self._context.group)):
                found[pid] = (
                    f"process {pid} on the device names job {' and '.join(sorted(jobs))}, and does not show that it is "
                    "that one's in this group; start it with TIMESLICE_GROUPS too, or let it register"
                )
            elif sighting is None or not sighting.veil or (sighting.heritage or sighting.shows_any):
                found[pid] = size
            elif not sighting.ends:
                whose = "may be any job's"
                found[pid] = f"process {pid} on the device {whose}: {sighting.veil}; let it register, or end it"
        mute = any(each.unreadable for each in snapshot.looked.values() if each)
        if occupants.unexplained >= UNEXPLAINED and mute:
            found[NOBODY] = (
                f"{occupants.unexplained} bytes on the device are of processes that can't be looked into; run the "
                "agent as root"
            )
        return found

    def _judge(self, others: dict[int, int | str], blind: str = "") -> None:
        group, before = self._context.group, {*self.strangers, *self.doubtful}
        self.blind = blind
        self.strangers = {pid: each for pid, each in others.items() if isinstance(each, int)}
        self.doubtful = {pid: each for pid, each in others.items() if isinstance(each, str)}
        remarks = [*self.doubtful.values()]
        remarks += [
            f"process {pid} has {size or 'some'} bytes on the group's devices and belongs to no job of the group; end "
            "it, or start it as a job's: TIMESLICE_JOB and TIMESLICE_GROUPS"
            for pid, size in self.strangers.items()
        ]
        if others.keys() - before:
            log.warning("group %s: %s", group, "; ".join(remarks[:_SAID]))
        self._registry.remarks = remarks
        metrics.STRANGERS.labels(group).set(len(self.strangers))
        metrics.STRANGER_BYTES.labels(group).set(sum(self.strangers.values()))
        metrics.DOUBTFUL.labels(group).set(len(self.doubtful))

    def _take(self, found: Found) -> None:
        """A job's processes here run as one user: that of those that registered, else that of the first."""
        registry = self._registry
        users: dict[str, set[int]] = {}
        for target in registry.registered().values():
            users.setdefault(target.job, set()).add(target.uid)
        for target in sorted(registry.found(), key=lambda each: (each.start, each.pid)):
            if target.uid not in users.setdefault(target.job, {target.uid}):
                registry.let_go(target)
        known = registry.known()
        refused: dict[Process, tuple[str, str]] = {}
        for sighting, job in found:
            if sighting.process in known:  # it has registered meanwhile
                continue
            if sighting.uid not in (own := users.setdefault(job, {sighting.uid})):
                others = ", ".join(map(str, sorted(own)))
                why: str | None = f"it runs as user id {sighting.uid}, other processes of the job as {others}"
            else:
                why = registry.take_found(job, sighting.pid, sighting.start, sighting.uid, sighting.inner)
            if why:
                refused[sighting.process] = job, f"process {sighting.pid} shows job {job} and is left alone: {why}"
        for process in refused.keys() - registry.passed_over.keys():
            log.warning("group %s: %s", self._context.group, refused[process][1])
        registry.passed_over = refused

    def _complain(self, trouble: str) -> None:
        if trouble != self._trouble:
            log.warning("group %s: processes that did not register are not found: %s", self._context.group, trouble)
        self._trouble = trouble


def _named_by_others(view: GroupView) -> set[tuple[str, int, int]]:
    """Who holds or waits and calls its host by a name that no node has, as in a container: job, number and start time
    as the process sees them itself."""
    state = view.state
    named = [(state.get("job", ""), state.get("host", ""), state.get("pid", ""), state.get("start", ""))]
    named += [(state.get("job", ""), each.host, each.pid, each.start) for each in view.parties]
    return {
        (job, int(pid), int(start))
        for job, host, pid, start in named
        if job and host not in view.nodes and pid.isdecimal() and start.isdecimal()
    }


def _is_named(pair: tuple[Sighting, str], named: Collection[tuple[str, int, int]]) -> bool:
    sighting, job = pair
    return any(
        (job, sighting.inner) == (whose, pid) and procfs.is_start(sighting.pid, sighting.start, start)
        for whose, pid, start in named
    )
