"""One job's state out of the device and back, through its backend; only what is measured counts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace

from timeslice import metrics
from timeslice.agent.calling import Caller, Deadline
from timeslice.agent.devices import NOTHING, Devices, free_on, freed, shortage, unexplained
from timeslice.agent.owed import devices_tell, standing
from timeslice.agent.presence import FREE_S, Presence, Presences
from timeslice.agent.selection import as_selection, is_part, loses_weights
from timeslice.agent.state import Note, Owed, Seen
from timeslice.backends.base import Outcome, Probe, Selection
from timeslice.backends.steps import together
from timeslice.errors import BackendError, FaultKind
from timeslice.models import Leave, Residency

TRIES = 3  # of a copy that failed for a passing reason; locking is tried until the deadline
_PAUSE_S = 0.05
_OUT = {Residency.SUSPENDED, Residency.ABSENT}


@dataclass
class Beside:
    """One job on its way out and another on its way in at the same time. What became free can only be told when both
    copies have ended, and who comes in stands still until the other one is known to be out."""

    before: Devices  # as measured before either began
    footprint: Mapping[str, int]  # what the one that comes in takes of each device
    copied_in: bool = False
    moved_out: bool = False
    _in_ended: asyncio.Event = field(default_factory=asyncio.Event)
    _out_ended: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def taken(self) -> Mapping[str, int]:
        return self.footprint if self.copied_in else {}

    def end_in(self) -> None:
        self._in_ended.set()

    def end_out(self) -> None:
        self._out_ended.set()

    async def until_in(self) -> None:
        """Ends with the copy in, well or not."""
        await self._in_ended.wait()

    async def until_out(self) -> bool:
        """Whether the other one went. The copy in has ended, or does not begin before."""
        self._in_ended.set()
        await self._out_ended.wait()
        return self.moved_out


Copies = Callable[[], Awaitable[list[Seen]]]


class Mover:
    """``notes`` collects how jobs left (None: they came back) until it is written down."""

    def __init__(self, group: str, presences: Presences, caller: Caller) -> None:
        self._group, self._presences, self._caller = group, presences, caller
        self.notes: dict[str, Note | None] = {}

    def note_of(self, job: Presence) -> Note | None:
        """How these processes left, if they did, and came back in no later step."""
        return self.notes[job.name] if job.name in self.notes else self._presences.note_of(job.name, job.job.targets)

    def left(self, job: Presence, leave: Leave | None = None) -> Selection:
        """What of the job is out. ``leave``: as its swap has written down."""
        note = self.note_of(job)
        known = leave or (note.leave if note else Leave())
        return as_selection(known) if known.mode else job.everything()

    def seen(self, job: Presence, probe: Probe | None = None, leave: Leave | None = None) -> Seen:
        """As it was found, or as ``probe`` shows it now."""
        found = job.seen(probe)
        lost = found.state in {Residency.SUSPENDED, Residency.SUSPENDING} and loses_weights(self.left(job, leave))
        return found.model_copy(update={"discarded": lost})

    async def lock(self, job: Presence, selection: Selection, deadline: Deadline) -> None:
        await self._caller.call(
            f"prepare of job {job.name}",
            lambda left: job.backend.prepare(job.job, selection, deadline_s=left),
            deadline,
        )

    async def beside(self, going: Presence, coming: Presence, deadline: Deadline) -> Beside | None:
        """Room for ``coming`` while ``going`` is still there, by measure: then both copies may run at once."""
        capabilities = [job.backend.capabilities() for job in (going, coming)]
        note = self.note_of(coming)
        if not all(each.overlaps and each.freed_share > 0 for each in capabilities) or note is None:
            return None
        devices = await self._measure(deadline)
        if not note.footprint.keys() & {device.device for device in devices}:
            return None  # nobody could tell afterwards what became free
        own = self._own(coming, self.left(coming))
        why = shortage(devices, note.footprint, coming.probe.host_bytes, own)
        return None if why else Beside(devices, note.footprint)

    async def suspend(
        self,
        job: Presence,
        selection: Selection,
        deadline: Deadline,
        *,
        locked: bool,
        beside: Beside | None = None,
        came: str = "",
    ) -> Seen:
        """Move a job's state, or the selected part of it, off the device. ``came``: who came in meanwhile, where this
        was begun before."""
        leave = selection.as_leave()
        if job.probe.state in _OUT:
            return await self._moved_before(job, leave, deadline, came)
        if not locked:
            await self.lock(job, selection, deadline)
        owed = await self._owe(job, selection, deadline, beside)
        began = time.monotonic()
        outcome = await self._caller.call(
            f"suspend of job {job.name}",
            lambda left: job.backend.suspend(job.job, selection, deadline_s=left),
            deadline,
            tries=TRIES,
        )
        after = await self._probe(job, deadline)
        if after.state not in _OUT:
            raise fault(FaultKind.TRANSIENT, job, f"{job.backend.name} reported it suspended, but it is {after.state}")
        if after.state is Residency.SUSPENDED:
            self._note(job, leave, {})
        if beside:  # until the other copy has ended nobody can tell what became free
            await beside.until_in()
            deadline = Deadline(FREE_S)
        footprint = await self._check_freed(job, owed, deadline, beside.taken if beside else NOTHING) if owed else {}
        if after.state is Residency.SUSPENDED:
            self._note(job, leave, footprint)
        metrics.SUSPEND_SECONDS.labels(self._group, job.backend.name).observe(time.monotonic() - began)
        metrics.SUSPENDED_BYTES.labels(self._group).inc(outcome.moved_bytes)
        return self._saved(self.seen(job, after, leave), outcome)

    async def restore(
        self, job: Presence, deadline: Deadline, leave: Leave | None = None, beside: Beside | None = None
    ) -> Seen:
        """Bring all that is out back and let the job run. Not even tried where it does not fit."""
        if beside and job.probe.state is not Residency.SUSPENDED:
            await beside.until_out()  # as without one: there is nothing to copy meanwhile
        if job.probe.state is Residency.ABSENT:
            return job.seen()
        if job.probe.state is Residency.RESIDENT:
            self.notes[job.name] = None
            return await self.run_on(job, deadline)
        left = self.left(job, leave)
        if job.backend.capabilities().freed_share > 0 and (why := await self._shortage(job, left, deadline)):
            raise fault(FaultKind.TRANSIENT, job, f"not restored, its saved copy is intact: {why}")
        began = time.monotonic()
        outcome = await self._caller.call(
            f"restore of job {job.name}",
            lambda seconds: job.backend.restore(job.job, Selection(mode=left.mode), deadline_s=seconds),
            deadline,
            tries=TRIES,
        )
        metrics.RESTORED_BYTES.labels(self._group).inc(outcome.moved_bytes)
        if beside:
            beside.copied_in = True
            if not await beside.until_out():
                raise fault(FaultKind.TRANSIENT, job, "it is not let run, since who had to leave did not")
        after = await self._release(job, deadline)
        metrics.RESTORE_SECONDS.labels(self._group, job.backend.name).observe(time.monotonic() - began)
        self.notes[job.name] = None
        await self._presences.debts.settle(job.name)
        return self._saved(after.model_copy(update={"discarded": loses_weights(left)}), outcome)

    async def run_on(self, job: Presence, deadline: Deadline, leave: Leave | None = None) -> Seen:
        """Let a job run that is on the device. One that is between two states is brought back whole."""
        if job.probe.state is Residency.FAULTED:
            return await self.restore(job, deadline, leave)
        if job.probe.state is Residency.SUSPENDED and leave and self.note_of(job) is None:
            self._note(job, leave, {})  # a step moved it that was interrupted before its end
        if job.probe.locked:
            await self._caller.call(
                f"abort of job {job.name}", lambda left: job.backend.abort(job.job, deadline_s=left), deadline
            )
        return self.seen(job)

    def _saved(self, seen: Seen, outcome: Outcome) -> Seen:
        metrics.SAVED_BYTES.labels(self._group).inc(outcome.saved_bytes)
        return seen.model_copy(update={"saved_bytes": outcome.saved_bytes})

    def _note(self, job: Presence, leave: Leave, footprint: dict[str, int]) -> None:
        self.notes[job.name] = Note(
            backend=job.backend.name, leave=leave, footprint=footprint, processes=_processes(job)
        )

    async def _release(self, job: Presence, deadline: Deadline) -> Seen:
        await self._caller.call(
            f"release of job {job.name}", lambda left: job.backend.release(job.job, deadline_s=left), deadline
        )
        after = await self._probe(job, deadline)
        if after.state not in {Residency.RESIDENT, Residency.ABSENT}:
            raise fault(FaultKind.TRANSIENT, job, f"{job.backend.name} reported it restored, but it is {after.state}")
        return job.seen(after)

    async def _shortage(self, job: Presence, left: Selection, deadline: Deadline) -> str:
        """Why what is out does not fit now; '' if it does."""
        note, devices = self.note_of(job), await self._measure(deadline)
        return shortage(devices, note.footprint if note else {}, job.probe.host_bytes, self._own(job, left))

    @staticmethod
    def _own(job: Presence, left: Selection) -> set[int]:
        """What is left of a job that went as a whole is in nobody's way. A part that stayed takes its room."""
        return set() if is_part(left) else {target.pid for target in job.job.targets}

    async def _measure(self, deadline: Deadline) -> Devices:
        return await self._caller.look("measuring devices", self._presences.backends.measure, deadline)

    async def _probe(self, job: Presence, deadline: Deadline) -> Probe:
        return await self._caller.look(f"probe of job {job.name}", lambda: job.backend.probe(job.job), deadline)

    async def _owe(self, job: Presence, selection: Selection, deadline: Deadline, beside: Beside | None) -> Owed | None:
        """What the job has to free, on disk before it begins to; None where its backend promises nothing."""
        share = job.backend.capabilities().freed_share
        if share == 0 or job.probe.device_bytes == 0:
            return None
        before = beside.before if beside else await self._measure(deadline)
        had, due = job.probe.device_bytes, _due(job.probe, selection)
        owed = Owed(
            processes=_processes(job),
            had=had,
            due=due,
            share=share,
            there=unexplained(before, {target.pid for target in job.job.targets}),
            free=free_on(before),
            beside=dict(beside.footprint) if beside else {},
        )
        await self._presences.debts.owe(job.name, owed)
        return owed

    async def _moved_before(self, job: Presence, leave: Leave, deadline: Deadline, came: str) -> Seen:
        """One that is out: it was, or a step took it out that was interrupted before its end, or that failed."""
        owed = self._presences.debts.of(job.name, job.job.targets) if job.debt else None
        footprint: dict[str, int] = {}
        if owed:
            footprint = await self._check_freed(job, owed, deadline, owed.beside if came else NOTHING)
        if job.probe.state is Residency.SUSPENDED and (footprint or self.note_of(job) is None):
            self._note(job, leave, footprint)
        return self.seen(replace(job, debt=None))

    async def _check_freed(
        self, job: Presence, owed: Owed, deadline: Deadline, taken: Mapping[str, int]
    ) -> dict[str, int]:
        """Bytes freed on each device. BackendError(transient) when it stays less than the backend promised."""
        wait = deadline.within(FREE_S)
        while True:
            devices = await self._measure(deadline)
            shown = 0 if devices_tell(owed) else (await self._probe(job, deadline)).device_bytes
            now = standing(owed, devices, shown, taken)
            if now.left == 0:
                await self._presences.debts.settle(job.name)
                return freed(owed.free, devices, taken)
            if wait.left() <= 0:
                raise fault(FaultKind.TRANSIENT, job, f"{job.backend.name} reported it suspended, but {now}")
            await asyncio.sleep(_PAUSE_S)


async def at_once(beside: Beside, out: Copies, into: Copies) -> list[Seen]:
    """Both to their end, whatever happens to one of them; then the gravest fault, if there is one."""

    async def move_out() -> list[Seen]:
        try:
            seen = await out()
            beside.moved_out = True
            return seen
        finally:
            beside.end_out()

    async def bring_in() -> list[Seen]:
        try:
            return await into()
        finally:
            beside.end_in()

    gone, come = await together([move_out(), bring_in()])
    return [*gone, *come]


def _due(before: Probe, selection: Selection) -> int | None:
    """Bytes that a suspend has to free. None where nobody can tell how large the selected part is: then at least what
    the backend itself shows to be gone has to be free by the device's word, too."""
    if not is_part(selection):
        return before.device_bytes
    if before.parts and not selection.slot:
        return sum(before.parts.get(tag, 0) for tag in selection.tags)
    return None


def _processes(job: Presence) -> tuple[tuple[int, int], ...]:
    return tuple((target.pid, target.start) for target in job.job.targets)


def fault(kind: FaultKind, job: Presence, message: str) -> BackendError:
    group, node = job.job.group, job.job.node
    return BackendError(
        f"group {group}, node {node}, job {job.name}: {message}", kind=kind, group=group, job=job.name, node=node
    )
