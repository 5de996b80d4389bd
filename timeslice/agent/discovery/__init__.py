"""Finds the processes of jobs that did not register: workers of launchers, engine cores, helpers that were forked.

A process counts if it shows by itself that it is the job's in the group (`agent.proof`), and has memory on the group's
devices. Nothing that stands in Redis makes a process one of a job's here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from timeslice.agent.choice import BackendSet
from timeslice.agent.discovery import nvml
from timeslice.agent.discovery.environment import FRESH_S, Scanner, Sighting, Snapshot
from timeslice.agent.targets import TargetRegistry
from timeslice.arena.errors import EmulatedDeviceError
from timeslice.arena.process import Target as ArenaTarget
from timeslice.arena.survey import arenas_of
from timeslice.backends.base import Context
from timeslice.errors import BackendError
from timeslice.locks.view import GroupView
from timeslice.models import Residency

__all__ = ["Finder", "Scanner"]

log = logging.getLogger("timeslice.agent")

Found = list[tuple[Sighting, str]]  # a process, and its job


class Finder:
    """Finds for one group. ``prefix`` is the agent's: processes of another installation are not its business."""

    def __init__(
        self, context: Context, prefix: str, scanner: Scanner, registry: TargetRegistry, backends: BackendSet
    ) -> None:
        self._context, self._prefix, self._scanner, self._registry = context, prefix, scanner, registry
        self._backends = backends
        self._devices = {str(path.resolve()) for path in context.devices}
        # Where only workloads move their own state, a process that says nothing of itself can't be moved anyway.
        self._useful = any(backends[name].capabilities().forced for name in backends.names())
        self.doubtful: dict[int, str] = {}
        self.strangers: dict[int, int] = {}
        self._trouble = ""
        self._looked = False  # at everybody, with devices that could be looked at

    async def find(self, view: GroupView, *, fresh_s: float = FRESH_S) -> None:
        """Watch who is the job's now, and let go who is not any more. Known ones stay: a suspended process shows
        nothing on the device."""
        registry, group = self._registry, self._context.group
        strange = {} if self._useful else self._moved_by_others(view)
        if not (self._useful or strange):
            registry.hidden = {}
            return
        try:
            snapshot = await self._scanner.look(fresh_s=fresh_s)
        except OSError as error:  # such as no descriptor left
            self._complain(f"/proc can't be read: {error}")
            registry.hidden = dict.fromkeys(self._unknown(view), self._trouble)
            return
        if not self._useful:
            shown_jobs = {job for each in snapshot.sightings(self._prefix) for job in strange if each.shows(group, job)}
            registry.hidden = {job: strange[job] for job in strange if job in shown_jobs or not snapshot.complete}
            return
        for target in registry.found():
            if snapshot.shows_no_more((target.pid, target.start), group, target.job):
                registry.let_go(target)
        known = registry.known()
        shown = [(each, snapshot.job_of(each, group, known)) for each in snapshot.sightings(self._prefix)]
        candidates = [(each, job) for each, job in shown if job and each.process not in known]
        there = await self._on_device(candidates, snapshot)
        lost = self._lost(view)
        await self._take([pair for pair in candidates if pair in (there or ()) or pair[1] in lost])
        self._looked = self._looked or (there is not None and snapshot.complete)
        doubtful = self._unknown(view)
        if snapshot.complete:
            doubtful &= {job for _, job in candidates} if there is None else set()
        registry.hidden = dict.fromkeys(doubtful, self._trouble or "not all processes could be looked at yet")
        await registry.keep()

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

    async def _on_device(self, candidates: Found, snapshot: Snapshot) -> Found | None:
        """Those with memory on the group's devices; where there are none to look at, those that show the group
        themselves. None if that can't be told."""
        context = self._context
        if not candidates:
            return []
        if context.accelerators:
            try:
                numbers = await nvml.numbers_on(context.accelerators)
            except BackendError as error:
                self._complain(str(error))
                return None
            self._trouble = ""
            return [pair for pair in candidates if nvml.is_among(pair[0], numbers, snapshot.lines)]
        if self._devices:
            there = await asyncio.to_thread(self._with_arena, [each for each, _ in candidates])
            return [pair for pair in candidates if pair[0].process in there]
        return [(each, job) for each, job in candidates if each.shown.proves(context.group, job)]

    def _with_arena(self, candidates: Iterable[Sighting]) -> set[tuple[int, int]]:
        found = set()
        for each in candidates:
            try:
                arenas = arenas_of(ArenaTarget(each.pid, each.start))
            except (EmulatedDeviceError, OSError):
                continue  # it ended meanwhile, or may not be looked into
            if any(arena.device in self._devices and arena.bytes_allocated for arena in arenas):
                found.add(each.process)
        return found

    async def _take(self, found: Found) -> None:
        """A job's processes here run as one user: that of those that registered, else that of the first."""
        registry = self._registry
        users: dict[str, set[int]] = {}
        for target in registry.registered().values():
            users.setdefault(target.job, set()).add(target.uid)
        for target in sorted(registry.found(), key=lambda each: (each.start, each.pid)):
            if target.uid not in users.setdefault(target.job, {target.uid}):
                registry.let_go(target)
        known, refused = registry.known(), {}
        for sighting, job in found:
            if sighting.process in known:  # it has registered meanwhile
                continue
            if sighting.uid not in (own := users.setdefault(job, {sighting.uid})):
                others = ", ".join(map(str, sorted(own)))
                why: str | None = f"it runs as user id {sighting.uid}, other processes of the job as {others}"
            else:
                why = registry.take_found(job, sighting.pid, sighting.start, sighting.uid)
            if why:
                refused[sighting.process] = f"process {sighting.pid} shows job {job} and is left alone: {why}"
        for process in refused.keys() - registry.passed_over.keys():
            log.warning("group %s: %s", self._context.group, refused[process])
        registry.passed_over = refused

    def _complain(self, trouble: str) -> None:
        if trouble != self._trouble:
            log.warning("group %s: processes that did not register are not found: %s", self._context.group, trouble)
        self._trouble = trouble
