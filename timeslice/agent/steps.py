"""The steps of a swap on one node, as backends carry them out: prepare, commit, rollback, and tidying up.

Each looks before it acts, so that a step that was interrupted anywhere can simply be run again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence

from timeslice import metrics
from timeslice.agent.calling import Caller, Deadline
from timeslice.agent.devices import Devices, freed, may_have, shortage
from timeslice.agent.memory import HostMemory
from timeslice.agent.presence import FREE_S, Presence, Presences
from timeslice.agent.state import ERROR_LENGTH, Answer, Note, Seen, Undo
from timeslice.backends.base import Probe
from timeslice.errors import BackendError, FaultKind
from timeslice.models import Command, GroupConfig, Residency

log = logging.getLogger("timeslice.agent")

Intend = Callable[[Undo], Awaitable[None]]  # writes down what may be done, before it is done
Tell = Callable[[Seen], Awaitable[None]]  # tells the group of one job, in the middle of a step

TRIES = 3  # of a copy that failed for a passing reason; locking is tried until the deadline
_PAUSE_S = 0.05
_OUT = {Residency.SUSPENDED, Residency.ABSENT}


class Steps:
    """``notes`` collects how jobs left (None: they came back) until the caller writes it down."""

    def __init__(self, group: str, presences: Presences, host: HostMemory, caller: Caller) -> None:
        self._group, self._presences, self._host, self._caller = group, presences, host, caller
        self.notes: dict[str, Note | None] = {}

    async def prepare(self, command: Command, config: GroupConfig, deadline: Deadline, intend: Intend) -> Answer:
        """Admission, then drain and lock every job that has to leave. Raises BackendError; see ``fail``."""
        work = deadline.within(deadline.left() * 0.9)  # the answer has to arrive in time, too
        leaving = await self._resident(command, work)
        need = 0
        for job in leaving:
            need += await self._caller.look(f"estimate of job {job.name}", self._estimate(job), work)
        pids = [target.pid for job in leaving for target in job.job.targets]
        self._host.admit(self._group, [job.name for job in leaving], need, config.host_reserve_bytes, pids)
        await intend(Undo(locked=tuple(job.name for job in leaving), force=command.force))

        async def lock(job: Presence) -> Seen:
            if job.probe.state is Residency.RESIDENT and not job.probe.locked:
                await self._lock(job, work)
            return job.seen()

        seen = [await self._presences.act(name, lock, work, force=command.force) for name in command.out]
        return Answer(outcome="prepared", seen=tuple(seen))

    async def commit(self, command: Command, deadline: Deadline, intend: Intend, tell: Tell, undo: Undo) -> Answer:
        """Suspend who has to leave, then bring back who comes in. Raises BackendError; see ``fail``."""
        out = deadline.within(command.suspend_timeout_ms / 1000)
        leaving = await self._resident(command, out)
        coming = await self._presences.find(command.into, out) if command.into else None
        _refuse_unknown(coming)
        saved = command.into if coming and coming.probe.state is Residency.SUSPENDED else None
        await intend(Undo(moved=tuple(job.name for job in leaving), returned=saved, force=command.force))

        async def suspend(job: Presence) -> Seen:
            return await self._suspend(job, out, locked=job.probe.locked or job.name in undo.locked)

        result = []
        for name in command.out:
            result.append(await self._presences.act(name, suspend, out, force=command.force))
            await tell(result[-1])
        self._host.settle(self._group)
        if command.into:
            back = deadline.within(command.restore_timeout_ms / 1000)
            result.append(await self._presences.act(command.into, lambda job: self._restore(job, back), back))
        return Answer(outcome="done", seen=tuple(result))

    async def rollback(self, undo: Undo, seconds: float) -> Answer:
        """Undo what a swap did here: who came in leaves again, who had left comes back, who was locked runs on."""
        self._host.settle(self._group)
        deadline = Deadline(seconds)
        found, faults = await self._undo(undo, deadline)
        if faults:
            return Answer(outcome="failed", kind=faults[0].kind, error=_text(faults), seen=found)
        return Answer(outcome="rolled back", seen=found, undone=True)

    async def fail(self, error: BackendError, undo: Undo, seconds: float) -> Answer:
        """The answer to a step that failed, once the node is as it was before the swap."""
        undone = await self.rollback(undo, seconds)
        text = str(error) if not undone.error else f"{error}; and undoing it: {undone.error}"
        return Answer(
            outcome="failed", kind=error.kind, error=text[:ERROR_LENGTH], seen=undone.seen, undone=undone.undone
        )

    async def tidy(self, undo: Undo, seconds: float) -> tuple[Seen, ...]:
        """After a swap that is over without a word: let everybody run on who is still locked. Nothing moves, for
        who is in and who is out is the group's to decide anew."""
        self._host.settle(self._group)
        deadline = Deadline(seconds)

        async def run_on(job: Presence) -> Seen:
            return await self._run_on(job, deadline)

        return tuple([await self._try(name, run_on, undo, deadline, []) for name in undo.jobs])

    async def truth(self, name: str, deadline: Deadline, *, force: bool = False) -> Seen:
        """What is observed of a job, whatever happened; faulted where it can't be told."""
        try:
            return await self._presences.act(name, _as_seen, deadline, force=force)
        except BackendError as error:
            log.error("group %s: the state of job %s can't be told: %s", self._group, name, error)
            last = self._presences.last.get(name)
            return (last or Seen(job=name, state="")).model_copy(update={"state": Residency.FAULTED})

    async def _undo(self, undo: Undo, deadline: Deadline) -> tuple[tuple[Seen, ...], list[BackendError]]:
        faults: list[BackendError] = []
        result: dict[str, Seen] = {}

        async def leave(job: Presence) -> Seen:
            return await self._suspend(job, deadline, locked=job.probe.locked)

        async def come_back(job: Presence) -> Seen:
            back = await (self._run_on(job, deadline) if job.probe.state is Residency.RESIDENT
                          else self._restore(job, deadline))  # fmt: skip
            return back.model_copy(update={"discarded": job.discards})  # a part of it may have been

        if undo.returned:
            result[undo.returned] = await self._try(undo.returned, leave, undo, deadline, faults)
        for name in undo.moved:
            result[name] = await self._try(name, come_back, undo, deadline, faults)
        for name in undo.locked:
            if name not in result:
                result[name] = await self._try(name, lambda job: self._run_on(job, deadline), undo, deadline, faults)
        return tuple(result.values()), faults

    async def _try(
        self,
        name: str,
        action: Callable[[Presence], Awaitable[Seen]],
        undo: Undo,
        deadline: Deadline,
        faults: list[BackendError],
    ) -> Seen:
        try:
            return await self._presences.act(name, action, deadline, force=undo.force)
        except BackendError as error:
            log.error("group %s: undoing for job %s failed: %s", self._group, name, error)
            faults.append(error)
            return await self.truth(name, deadline, force=undo.force)

    async def _resident(self, command: Command, deadline: Deadline) -> list[Presence]:
        found = [await self._presences.find(name, deadline, force=command.force) for name in command.out]
        for job in found:
            _refuse_unknown(job)
        return [job for job in found if job and job.probe.state is Residency.RESIDENT]

    def _estimate(self, job: Presence) -> Callable[[], Awaitable[int]]:
        return lambda: job.backend.estimate(job.job, job.selection)

    async def _measure(self, deadline: Deadline) -> Devices:
        return await self._caller.look("measuring devices", self._presences.backends.measure, deadline)

    async def _probe(self, job: Presence, deadline: Deadline) -> Probe:
        return await self._caller.look(f"probe of job {job.name}", lambda: job.backend.probe(job.job), deadline)

    async def _lock(self, job: Presence, deadline: Deadline) -> None:
        await self._caller.call(
            f"prepare of job {job.name}",
            lambda left: job.backend.prepare(job.job, job.selection, deadline_s=left),
            deadline,
        )

    async def _suspend(self, job: Presence, deadline: Deadline, *, locked: bool) -> Seen:
        """Move a job's state off the device; only what is measured counts."""
        if job.probe.state in _OUT:
            return job.seen()
        if not locked:
            await self._lock(job, deadline)
        measured = job.backend.capabilities().freed_share > 0 and job.probe.device_bytes > 0
        before = await self._measure(deadline) if measured else ()
        began = time.monotonic()
        outcome = await self._caller.call(
            f"suspend of job {job.name}",
            lambda left: job.backend.suspend(job.job, job.selection, deadline_s=left),
            deadline,
            tries=TRIES,
        )
        after = await self._probe(job, deadline)
        if after.state not in _OUT:
            raise _fault(FaultKind.TRANSIENT, job, f"{job.backend.name} reported it suspended, but it is {after.state}")
        footprint = await self._check_freed(job, before, deadline) if measured else {}
        if after.state is Residency.SUSPENDED:
            processes = tuple((target.pid, target.start) for target in job.job.targets)
            self.notes[job.name] = Note(backend=job.backend.name, footprint=footprint, processes=processes)
        metrics.SUSPEND_SECONDS.labels(self._group, job.backend.name).observe(time.monotonic() - began)
        metrics.SUSPENDED_BYTES.labels(self._group).inc(outcome.moved_bytes)
        return job.seen(after)

    async def _check_freed(self, job: Presence, before: Devices, deadline: Deadline) -> dict[str, int]:
        """Bytes freed on each device. BackendError(transient) when it stays less than the backend promised."""
        had, share = job.probe.device_bytes, job.backend.capabilities().freed_share
        on_devices = may_have(before, {target.pid for target in job.job.targets})
        wait = deadline.within(FREE_S)
        while True:
            got = freed(before, await self._measure(deadline))
            total = sum(got.values())
            if not on_devices:
                # There is no device that could be asked, or its state is known to lie elsewhere, such as tensors of a
                # CPU beside an emulated device: the backend's own measure of the job.
                total = had - (await self._probe(job, deadline)).device_bytes
            if total >= share * had:
                return got
            if wait.left() <= 0:
                raise _fault(
                    FaultKind.TRANSIENT,
                    job,
                    f"{job.backend.name} reported it suspended, but only {total} of its {had} bytes were measured free "
                    f"(at least {share:.0%} are due)",
                )
            await asyncio.sleep(_PAUSE_S)

    async def _restore(self, job: Presence, deadline: Deadline) -> Seen:
        """Bring a job's saved state back and let it run. Not even tried where it does not fit."""
        if job.probe.state is Residency.ABSENT:
            return job.seen()
        if job.probe.state is Residency.RESIDENT:
            return await self._run_on(job, deadline)
        backend, note = job.backend, self.notes.get(job.name) or self._presences.note_of(job.name, job.job.targets)
        if backend.capabilities().freed_share > 0:
            devices = await self._measure(deadline)
            own = {target.pid for target in job.job.targets}
            why = shortage(devices, note.footprint if note else {}, job.probe.host_bytes, own)
            if why:
                raise _fault(FaultKind.TRANSIENT, job, f"not restored, its saved copy is intact: {why}")
        began = time.monotonic()
        outcome = await self._caller.call(
            f"restore of job {job.name}",
            lambda left: backend.restore(job.job, job.selection, deadline_s=left),
            deadline,
            tries=TRIES,
        )
        metrics.RESTORED_BYTES.labels(self._group).inc(outcome.moved_bytes)
        after = await self._release(job, deadline)
        metrics.RESTORE_SECONDS.labels(self._group, backend.name).observe(time.monotonic() - began)
        self.notes[job.name] = None
        return after.model_copy(update={"discarded": job.discards})

    async def _release(self, job: Presence, deadline: Deadline) -> Seen:
        await self._caller.call(
            f"release of job {job.name}", lambda left: job.backend.release(job.job, deadline_s=left), deadline
        )
        after = await self._probe(job, deadline)
        if after.state not in {Residency.RESIDENT, Residency.ABSENT}:
            raise _fault(FaultKind.TRANSIENT, job, f"{job.backend.name} reported it restored, but it is {after.state}")
        return job.seen(after)

    async def _run_on(self, job: Presence, deadline: Deadline) -> Seen:
        """Let a job run that is on the device. One that is between two states is brought back whole."""
        if job.probe.state is Residency.FAULTED:
            return await self._restore(job, deadline)
        if job.probe.locked:
            await self._caller.call(
                f"abort of job {job.name}", lambda left: job.backend.abort(job.job, deadline_s=left), deadline
            )
        return job.seen()


def _fault(kind: FaultKind, job: Presence, message: str) -> BackendError:
    group, node = job.job.group, job.job.node
    return BackendError(
        f"group {group}, node {node}, job {job.name}: {message}", kind=kind, group=group, job=job.name, node=node
    )


def _refuse_unknown(job: Presence | None) -> None:
    if job and job.probe.state is Residency.FAULTED:
        raise _fault(FaultKind.POISONED, job, "its device state is unknown, so nothing was touched; end its processes")


async def _as_seen(job: Presence) -> Seen:
    return job.seen()


def _text(faults: Sequence[BackendError]) -> str:
    return "; ".join(str(fault) for fault in faults)[:ERROR_LENGTH]
