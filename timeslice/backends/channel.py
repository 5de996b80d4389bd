"""The ``channel`` backend: the workload moves its own state when it is told to, over its own stream.

Ids: a command that was not answered is asked again under its own id, so that it is done once; after an answer
(``busy`` too) the next attempt has a new one. Nothing of that is remembered longer than a step: each begins with the
question how things stand, and a workload answers in the order of the questions, so what an earlier step or a dead
agent had asked for is done or refused before.
"""

# ruff: noqa: ARG002 - the interface has these arguments
from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Literal
from uuid import uuid4

from timeslice.backends.base import Backend, Capabilities, Context, DeviceMemory, Job, Outcome, Probe, Selection
from timeslice.backends.checks import fault, is_alive, is_foreign
from timeslice.backends.devices import bytes_of, has_devices, measure_devices, missing_devices, used_bytes
from timeslice.backends.steps import UNDO_S, Step, combine, together
from timeslice.errors import BackendError, FaultKind
from timeslice.models import ChannelAnswer, ChannelCommand, Residency, Target

PROBE_S = 5.0
RESEND_S = 5.0  # an answer that is not there by then may be lost: ask again under the same id
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 0.5

_CONTRADICTS = {"suspend": (Residency.RESIDENT,), "restore": (Residency.SUSPENDED,)}

Answers = dict[Target, ChannelAnswer]


class ChannelBackend(Backend):
    """For every workload that registered callbacks: arrays of the emulated device, PyTorch, JAX, in-process vLLM."""

    name = "channel"

    def __init__(self, context: Context) -> None:
        if context.channel is None:
            raise BackendError(
                f"group {context.group}, node {context.node}: the channel backend needs an agent with a channel",
                kind=FaultKind.UNSUPPORTED,
                group=context.group,
                node=context.node,
            )
        self._channel = context.channel
        self._context = context

    def capabilities(self) -> Capabilities:
        share = 0.8 if has_devices(self._context) else 0.0
        return Capabilities(modes=frozenset({"offload", "discard"}), freed_share=share, overlaps=True)

    async def probe(self, job: Job) -> Probe:
        """BackendError(transient) when a workload does not answer: then nothing is known that is not known already."""
        found = await self._states(job, time.monotonic() + PROBE_S)
        answers = found.values()
        state = combine(answer.state for answer in answers)
        device_bytes = sum(answer.device_bytes for answer in answers)
        if state is Residency.SUSPENDED:
            device_bytes = max(device_bytes, await self._left_over(found))
        return Probe(
            state=state,
            device_bytes=device_bytes,
            host_bytes=sum(answer.host_bytes for answer in answers),
            parts=_parts(answers),
        )

    async def estimate(self, job: Job, selection: Selection) -> int:
        if selection.mode == "discard":
            return 0
        answers = await self._states(job, time.monotonic() + PROBE_S)
        return sum(_needed(answer, selection) for answer in answers.values())

    async def prepare(self, job: Job, selection: Selection, *, deadline_s: float) -> Outcome:
        """Only a look: a workload can't be locked from here, it drains by itself when it is suspended."""
        self._check(job, selection)
        step = Step(deadline_s)
        await self._states(job, step.until)
        step.note("probe")
        return step.outcome()

    async def suspend(self, job: Job, selection: Selection, *, deadline_s: float) -> Outcome:
        self._check(job, selection)
        step = Step(deadline_s)
        before = await self._states(job, step.until)
        taken = await used_bytes(self._context)
        # Who has parts counts as suspended with one of them out; it is told, and does nothing twice.
        resident = [
            target
            for target, answer in before.items()
            if answer.state is not Residency.SUSPENDED or target.tags or target.slots
        ]
        try:
            answers = await self._tell_all(job, resident, "suspend", selection, step.until)
        except BackendError as error:
            await self._undo(job, list(before), "restore", selection, step, error)
            raise
        step.note("suspend")
        if has_devices(self._context):
            freed = taken - await used_bytes(self._context)
        else:  # what they say of themselves, where nothing can be measured from outside
            freed = sum(before[target].device_bytes - answer.device_bytes for target, answer in answers.items())
        return step.outcome(_moved(answers), max(0, freed), _saved(answers))

    async def restore(self, job: Job, selection: Selection, *, deadline_s: float) -> Outcome:
        self._check(job, selection)
        step = Step(deadline_s)
        before = await self._states(job, step.until)
        suspended = [target for target, answer in before.items() if answer.state is Residency.SUSPENDED]
        try:
            answers = await self._tell_all(job, suspended, "restore", selection, step.until)
        except BackendError as error:
            await self._undo(job, suspended, "suspend", selection, step, error)
            raise
        step.note("restore")
        return step.outcome(_moved(answers), saved_bytes=_saved(answers))

    async def release(self, job: Job, *, deadline_s: float) -> Outcome:
        return Outcome()  # nothing was locked

    async def abort(self, job: Job, *, deadline_s: float) -> Outcome:
        return Outcome()  # nothing was asked of it

    async def health(self) -> Sequence[str]:
        return await missing_devices(self._context)

    async def memory(self) -> Sequence[DeviceMemory]:
        return await measure_devices(self._context)

    def _check(self, job: Job, selection: Selection) -> None:
        """Refuse what a workload did not say that it can, before anything is sent."""
        for target in _listening(job):
            if why := target.unable(selection.as_leave()):
                raise fault(FaultKind.UNSUPPORTED, job, f"process {target.pid} {why}")

    async def _left_over(self, targets: Iterable[Target]) -> int:
        """What suspended processes still have on real devices: their contexts, above all."""
        with suppress(BackendError):  # only a figure for people; that NVML fails is seen where it is measured
            return await bytes_of(self._context, {target.pid for target in targets if not is_foreign(target)})
        return 0

    async def _states(self, job: Job, until: float) -> Answers:
        return await self._tell_all(job, _listening(job), "probe", Selection(), until)

    async def _tell_all(
        self,
        job: Job,
        targets: Sequence[Target],
        action: Literal["suspend", "restore", "probe"],
        selection: Selection,
        until: float,
    ) -> Answers:
        """All at once; those that ended meanwhile are left out."""
        answers = await together(self._tell(job, target, action, selection, until) for target in targets)
        return {target: answer for target, answer in zip(targets, answers, strict=True) if answer}

    async def _tell(
        self,
        job: Job,
        target: Target,
        action: Literal["suspend", "restore", "probe"],
        selection: Selection,
        until: float,
    ) -> ChannelAnswer | None:
        """Ask until it is done; None when the process is gone."""
        pause = _FIRST_PAUSE_S
        while True:
            command = ChannelCommand(
                id=f"{job.node}/{job.group}/{uuid4().hex}",
                action=action,
                mode=selection.mode,
                tags=selection.tags,
                slot=selection.slot,
            )
            answer = await self._ask(job, target, command, until)
            if answer is None:
                return None
            if answer.ok:
                if not (selection.tags or selection.slot) and answer.state in _CONTRADICTS.get(action, ()):
                    message = f"{action} of process {target.pid} claimed success, and it is still {answer.state}"
                    raise fault(FaultKind.TRANSIENT, job, message)
                return answer
            if not answer.busy:
                message = f"{action} failed in process {target.pid}: {answer.error or 'it gave no reason'}"
                raise fault(FaultKind.TRANSIENT, job, message)
            if time.monotonic() + pause > until:
                message = f"process {target.pid} stayed busy: {answer.error or 'it has work in flight'}"
                raise fault(FaultKind.BUSY, job, message)
            await asyncio.sleep(pause)
            pause = min(pause * 2, _LONGEST_PAUSE_S)

    async def _ask(self, job: Job, target: Target, command: ChannelCommand, until: float) -> ChannelAnswer | None:
        began = time.monotonic()
        while is_foreign(target) or is_alive(target):
            deadline_s = min(RESEND_S, until - time.monotonic())
            if deadline_s <= 0:
                # A question may be asked again by anybody. What became of an order is open as long as it is unanswered.
                kind = FaultKind.TRANSIENT if command.action == "probe" else FaultKind.POISONED
                raise fault(
                    kind,
                    job,
                    f"process {target.pid} has not answered {command.action} within {time.monotonic() - began:.1f} s; "
                    "see whether it hangs or is stopped",
                )
            try:
                return await self._channel.ask(job.job, target.channel, command, deadline_s=deadline_s)
            except TimeoutError:
                continue
            except BackendError as error:
                if error.kind is not FaultKind.GONE:
                    raise
                break
        return None

    async def _undo(
        self,
        job: Job,
        targets: Sequence[Target],
        action: Literal["suspend", "restore"],
        selection: Selection,
        step: Step,
        cause: BackendError,
    ) -> None:
        """All or none: what was done to a part of the job is taken back. A workload does nothing twice."""
        # Who did not answer has the order to take it back next in its stream, so it ends well whenever it wakes up.
        until = time.monotonic() + UNDO_S if cause.kind is FaultKind.POISONED else step.undo_until()
        try:
            await self._tell_all(job, targets, action, selection, until)
        except BackendError as error:
            raise fault(FaultKind.POISONED, job, f"{cause}; and taking it back failed: {error}") from cause


def _listening(job: Job) -> list[Target]:
    # A process without a channel has nothing that this backend could see or move. One in another PID namespace can't
    # be watched from here, but its channel works all the same.
    return [target for target in job.targets if target.channel and (is_foreign(target) or is_alive(target))]


def _parts(answers: Iterable[ChannelAnswer]) -> dict[str, int]:
    parts: Counter[str] = Counter()
    for answer in answers:
        parts.update(answer.parts)
    return dict(parts)


def _needed(answer: ChannelAnswer, selection: Selection) -> int:
    """Host bytes. A part needs no more than the whole, of which host memory may have a valid copy in part."""
    whole = max(0, answer.device_bytes - answer.host_bytes)
    if not selection.tags or not set(selection.tags) <= answer.parts.keys():
        return whole
    return min(whole, sum(answer.parts[tag] for tag in set(selection.tags)))


def _moved(answers: Answers) -> int:
    return sum(answer.moved_bytes for answer in answers.values())


def _saved(answers: Answers) -> int:
    return sum(answer.saved_bytes for answer in answers.values())
