"""The stages of a composite: how they are written down, what they show together, what they did."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from timeslice.arena.errors import EmulatedDeviceError
from timeslice.arena.process import HeldProcess
from timeslice.arena.process import Target as HeldTarget
from timeslice.backends.base import Backend, Context, Job, Outcome, Probe
from timeslice.backends.steps import Step
from timeslice.errors import BackendError, FaultKind
from timeslice.models import Residency

NAME = "composite"
_EXAMPLE = "write for example composite:stages=channel+cuda"

MakeStage = Callable[[str, Context], Backend]


def moves(stage: Backend) -> bool:
    return bool(stage.capabilities().modes)


def asks(stage: Backend) -> bool:
    """Whether the job has to run and answer for it."""
    return moves(stage) and not stage.capabilities().forced


def make_stages(context: Context, make: MakeStage) -> tuple[Backend, ...]:
    """From the options ``stages`` and ``STAGE.KEY``. BackendError(unsupported) for stages that make no sense."""

    def refuse(why: str) -> NoReturn:
        raise BackendError(
            f"group {context.group}, node {context.node}: {NAME}: {why}",
            kind=FaultKind.UNSUPPORTED,
            group=context.group,
            node=context.node,
        )

    names = context.options.get("stages", "").split("+")
    if len(names) < 2 or not all(names):
        refuse(f"it needs two stages or more; {_EXAMPLE}")
    if len(set(names)) < len(names) or NAME in names:
        refuse(f"stages={'+'.join(names)}: each stage is another backend, and none is {NAME}")
    options: dict[str, dict[str, str]] = {name: {} for name in names}
    for key, value in context.options.items():
        owner, _, rest = key.partition(".")
        if rest and owner in options:
            options[owner][rest] = value
        elif key != "stages":
            refuse(f"option {key} is none of a stage; write STAGE.KEY=VALUE, with a STAGE of {', '.join(names)}")
    stages = tuple(make(name, replace(context, options=options[name])) for name in names)
    if not moves(stages[-1]) or asks(stages[-1]):
        refuse(
            f"the last stage has to move what is left without asking, as arena, cuda and process do; {names[-1]} can't"
        )
    freezer = ""
    for name, stage in zip(names, stages, strict=True):
        if freezer and asks(stage):
            refuse(f"stage {name} has to ask the job, which {freezer} has frozen by then; put {name} first")
        freezer = freezer or ("" if asks(stage) or not moves(stage) else name)
    return stages


@dataclass(frozen=True)
class Look:
    """One stage as it was found. ``probe`` None: it has to ask, and the job can't answer or is not to be asked."""

    stage: Backend
    probe: Probe | None

    @property
    def has_any(self) -> bool:
        """Whether it has something of this job to move."""
        return self.probe is not None and self.probe.state is not Residency.ABSENT

    @property
    def freezes(self) -> bool:
        stopped = {Residency.SUSPENDED, Residency.FAULTED}
        return self.probe is not None and moves(self.stage) and (self.probe.locked or self.probe.state in stopped)


def combined(looks: Sequence[Look]) -> Probe:
    """A job from what its stages show. Out is what has nothing inside any more. The stage that freezes sees all that is
    on the device, so that is not added up."""
    shown = [look.probe for look in looks if look.probe and look.has_any]
    states = {probe.state for probe in shown}
    if Residency.FAULTED in states:
        state = Residency.FAULTED
    elif Residency.RESIDENT in states:
        state = Residency.RESIDENT
    else:
        state = Residency.SUSPENDED if states else Residency.ABSENT
    half_way = state is Residency.RESIDENT and Residency.SUSPENDED in states
    return Probe(
        state=state,
        device_bytes=max((probe.device_bytes for probe in shown), default=0),
        host_bytes=sum(probe.host_bytes for probe in shown),
        locked=half_way
        or (state is not Residency.SUSPENDED and any(look.probe.locked for look in looks if look.probe)),
        parts={tag: size for probe in shown for tag, size in probe.parts.items()},
    )


class Tally:
    """What the stages of one step did, added up."""

    def __init__(self) -> None:
        self._moved = self._freed = self._saved = 0
        self._steps: dict[str, float] = {}

    async def run(
        self, stage: Backend, name: str, step: Step, operation: Callable[..., Awaitable[Outcome]], *arguments: Any
    ) -> None:
        """One operation of a stage, with the time that the step has left."""
        began = time.monotonic()
        try:
            outcome = await operation(*arguments, deadline_s=max(step.until - began, 0.0))
        finally:
            at = f"{stage.name}.{name}"
            self._steps[at] = self._steps.get(at, 0.0) + time.monotonic() - began
        self._moved += outcome.moved_bytes
        self._freed += outcome.freed_bytes
        self._saved += outcome.saved_bytes

    def outcome(self, step: Step) -> Outcome:
        return replace(step.outcome(self._moved, self._freed), saved_bytes=self._saved, steps=self._steps)


def all_run(job: Job) -> bool:
    """Whether no living process of the job is stopped, so that it can be asked."""
    for target in job.targets:
        with suppress(EmulatedDeviceError), HeldProcess(HeldTarget(target.pid, target.start)) as process:
            if process.is_stopped():
                return False
    return True
