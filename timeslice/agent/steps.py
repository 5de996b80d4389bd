"""The steps of a swap on one node, as backends carry them out: prepare, commit, rollback, and tidying up.

Each looks before it acts, so that a step that was interrupted anywhere can simply be run again.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence

from timeslice.agent.calling import Caller, Deadline
from timeslice.agent.memory import HostMemory
from timeslice.agent.moving import Mover, at_once, fault
from timeslice.agent.presence import Presence, Presences, naming
from timeslice.agent.selection import as_selection, loses_weights, refusal
from timeslice.agent.state import ERROR_LENGTH, Answer, Note, Seen, Undo
from timeslice.backends.base import Selection
from timeslice.errors import BackendError, FaultKind
from timeslice.models import Command, GroupConfig, Leave, Residency

log = logging.getLogger("timeslice.agent")

Intend = Callable[[Undo], Awaitable[None]]  # writes down what may be done, before it is done
Tell = Callable[[Seen], Awaitable[None]]  # tells the group of one job, in the middle of a step


class Steps:
    """``notes`` collects how jobs left (None: they came back) until the caller writes it down."""

    def __init__(
        self,
        group: str,
        presences: Presences,
        host: HostMemory,
        caller: Caller,
        config: Callable[[], GroupConfig],
    ) -> None:
        self._group, self._presences, self._host, self._caller = group, presences, host, caller
        self._config = config
        self._mover = Mover(group, presences, caller)

    @property
    def notes(self) -> dict[str, Note | None]:
        return self._mover.notes

    async def prepare(self, command: Command, deadline: Deadline, intend: Intend) -> Answer:
        """Admission, then drain and lock every job that has to leave. Raises BackendError; see ``fail``."""
        work = deadline.within(deadline.left() * 0.9)  # the answer has to arrive in time, too
        leaving = await self._resident(command, work)
        leave = {job.name: self._leave(job, command) for job in leaving}
        need = 0
        for job in leaving:
            estimate = self._estimate(job, as_selection(leave[job.name]))
            with naming(job.name):
                need += await self._caller.look(f"estimate of job {job.name}", estimate, work)
        pids = [target.pid for job in leaving for target in job.job.targets]
        reserve = self._config().host_reserve_bytes
        self._host.admit(self._group, [job.name for job in leaving], need, reserve, pids)
        await intend(Undo(locked=tuple(leave), force=command.force, leave=leave))

        async def lock(job: Presence) -> Seen:
            if job.debt:
                raise fault(FaultKind.TRANSIENT, job, job.debt.told)
            if job.probe.state is Residency.RESIDENT and not job.probe.locked:
                selection = as_selection(leave.get(job.name) or self._leave(job, command))
                await self._mover.lock(job, selection, work)
            return self._mover.seen(job)

        seen = [await self._presences.act(name, lock, work, force=command.force) for name in command.out]
        return Answer(outcome="prepared", seen=tuple(seen))

    async def commit(self, command: Command, deadline: Deadline, intend: Intend, tell: Tell, undo: Undo) -> Answer:
        """Suspend who has to leave, then bring back who comes in. Raises BackendError; see ``fail``."""
        out = deadline.within(command.suspend_timeout_ms / 1000)
        leaving = await self._resident(command, out)
        coming = await self._presences.find(command.into, out) if command.into else None
        _refuse_unknown(coming)
        saved = coming if coming and coming.probe.state is Residency.SUSPENDED else None
        leave = undo.leave | {job.name: undo.leave.get(job.name) or self._leave(job, command) for job in leaving}
        if saved:
            leave[saved.name] = self._mover.left(saved).as_leave()
        moved, returned = tuple(job.name for job in leaving), saved.name if saved else None
        await intend(Undo(moved=moved, returned=returned, force=command.force, leave=leave))

        single = saved is not None and len(leaving) == 1 and not command.force
        beside = await self._mover.beside(leaving[0], saved, out) if single and saved else None
        came = coming.name if coming and coming.probe.state is Residency.RESIDENT and undo.returned else ""

        async def suspend(job: Presence) -> Seen:
            known = leave.get(job.name)
            if known is None and job.probe.state is Residency.RESIDENT:
                known = self._leave(job, command)
            selection = self._mover.left(job, known)
            locked = job.probe.locked or job.name in undo.locked
            return await self._mover.suspend(job, selection, out, locked=locked, beside=beside, came=came)

        async def move_out() -> list[Seen]:
            seen = []
            for name in command.out:
                seen.append(await self._presences.act(name, suspend, out, force=command.force))
                await tell(seen[-1])
            self._host.settle(self._group)
            return seen

        async def bring_in() -> list[Seen]:
            if not command.into:
                return []
            back = deadline.within(command.restore_timeout_ms / 1000)
            return [
                await self._presences.act(command.into, lambda job: self._mover.restore(job, back, beside=beside), back)
            ]

        if beside:
            return Answer(outcome="done", seen=tuple(await at_once(beside, move_out, bring_in)))
        return Answer(outcome="done", seen=(*await move_out(), *await bring_in()))

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
            return await self._mover.run_on(job, deadline, undo.leave.get(job.name))

        return tuple([await self._try(name, run_on, undo, deadline, []) for name in undo.jobs])

    async def truth(self, name: str, deadline: Deadline, *, force: bool = False) -> Seen:
        """What is observed of a job, whatever happened; faulted where it can't be told."""
        try:
            return await self._presences.act(name, self._as_seen, deadline, force=force)
        except BackendError as error:
            presences = self._presences
            if not presences.registry.alive(name) and (why := await presences.doubts.about(name)):
                return presences.unknown(name, why)
            log.error("group %s: the state of job %s can't be told: %s", self._group, name, error)
            last = self._presences.last.get(name)
            return (last or Seen(job=name, state="")).model_copy(update={"state": Residency.FAULTED})

    async def _undo(self, undo: Undo, deadline: Deadline) -> tuple[tuple[Seen, ...], list[BackendError]]:
        faults: list[BackendError] = []
        result: dict[str, Seen] = {}

        async def leave(job: Presence) -> Seen:
            selection = self._mover.left(job, undo.leave.get(job.name))
            return await self._mover.suspend(job, selection, deadline, locked=job.probe.locked)

        async def come_back(job: Presence) -> Seen:
            left = undo.leave.get(job.name)
            back = await (self._mover.run_on(job, deadline) if job.probe.state is Residency.RESIDENT
                          else self._mover.restore(job, deadline, left))  # fmt: skip
            lost = loses_weights(self._mover.left(job, left))  # some of its processes may have dropped it
            return back.model_copy(update={"discarded": lost})

        async def run_on(job: Presence) -> Seen:
            return await self._mover.run_on(job, deadline, undo.leave.get(job.name))

        if undo.returned:
            result[undo.returned] = await self._try(undo.returned, leave, undo, deadline, faults)
        for name in undo.moved:
            result[name] = await self._try(name, come_back, undo, deadline, faults)
        for name in undo.locked:
            if name not in result:
                result[name] = await self._try(name, run_on, undo, deadline, faults)
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

    def _leave(self, job: Presence, command: Command) -> Leave:
        """What of a job leaves. BackendError(unsupported), before anything is sent, for what it can't do: G21.

        All of it if that is by force, which takes a backend that may know no parts, and if nobody comes in: then an
        operator wants the device empty, or a holder's state is to be proved out.
        """
        asked = job.asked(self._config())
        selection = job.everything(asked) if command.force or command.into is None else asked
        if not command.force and (why := refusal(job.job.targets, selection)):
            raise fault(FaultKind.UNSUPPORTED, job, f"it can't leave as it was asked to: {why}")
        return selection.as_leave()

    @staticmethod
    def _estimate(job: Presence, selection: Selection) -> Callable[[], Awaitable[int]]:
        return lambda: job.backend.estimate(job.job, selection)

    async def _as_seen(self, job: Presence) -> Seen:
        return self._mover.seen(job)


def _refuse_unknown(job: Presence | None) -> None:
    if job and job.probe.state is Residency.FAULTED:
        raise fault(FaultKind.POISONED, job, "its device state is unknown, so nothing was touched; end its processes")


def _text(faults: Sequence[BackendError]) -> str:
    return "; ".join(str(fault) for fault in faults)[:ERROR_LENGTH]
