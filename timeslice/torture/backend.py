"""The arena backend as a torture run uses it: it writes down what it does, and misbehaves when told to.

The run tells it by a file for each node and group, read at every step.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ValidationError

from timeslice.agent.choice import MakeBackend
from timeslice.arena import Device
from timeslice.arena.survey import holders
from timeslice.backends.arena import ArenaBackend
from timeslice.backends.base import Backend, Capabilities, Context, DeviceMemory, Job, Outcome, Probe, Selection
from timeslice.errors import BackendError, FaultKind
from timeslice.torture.history import Moved, OnDevice, Writer

StepName = Literal["prepare", "suspend", "restore", "release", "abort"]

_POLL_S = 0.05
_MID_CALL_S = 0.03  # an agent that dies in mid-call dies so long after the call began


class Knob(BaseModel):
    """How to misbehave now. ``id`` is that of the fault; ``fail`` does harm once for each id; a lie is told of
    ``lies``."""

    id: int
    harm: Literal["slow", "fail", "fail-on", "hang", "die", "lie", "late"]
    seconds: float = 0.0
    lies: tuple[StepName, ...] = ("suspend", "restore")


def knob_file(folder: Path, node: str, group: str) -> Path:
    """Where the knob of a node's backend is; without the file it behaves."""
    return folder / f"{node}.{group}.json"


def met_file(knob: Path) -> Path:
    """Where a backend that misbehaves leaves the id of the knob that told it to."""
    return knob.with_suffix(".met")


def maker(who: str, writer: Writer, knobs: Path) -> MakeBackend:
    """What `run_agent` makes backends with."""

    def make(name: str, context: Context) -> Backend:
        assert name == ArenaBackend.name, name
        return TortureBackend(context, who, writer, knob_file(knobs, context.node, context.group))

    return make


class TortureBackend(Backend):
    """Wraps the arena backend."""

    name = ArenaBackend.name

    def __init__(self, context: Context, who: str, writer: Writer, knob: Path) -> None:
        self._inner = ArenaBackend(context)
        self._context, self._who, self._writer, self._knob = context, who, writer, knob
        self._used: set[int] = set()
        self._late_bytes, self._late_until = 0, 0.0

    def capabilities(self) -> Capabilities:
        return self._inner.capabilities()

    async def probe(self, job: Job) -> Probe:
        return await self._inner.probe(job)

    async def estimate(self, job: Job, selection: Selection) -> int:
        return await self._inner.estimate(job, selection)

    async def health(self) -> Sequence[str]:
        return await self._inner.health()

    async def memory(self) -> Sequence[DeviceMemory]:
        devices = await self._inner.memory()
        if time.monotonic() < self._late_until:
            devices = [replace(each, free_bytes=max(each.free_bytes - self._late_bytes, 0)) for each in devices]
        return devices

    async def prepare(self, job: Job, selection: Selection, *, deadline_s: float) -> Outcome:
        return await self._step("prepare", job, lambda: self._inner.prepare(job, selection, deadline_s=deadline_s))

    async def suspend(self, job: Job, selection: Selection, *, deadline_s: float) -> Outcome:
        return await self._step("suspend", job, lambda: self._inner.suspend(job, selection, deadline_s=deadline_s))

    async def restore(self, job: Job, selection: Selection, *, deadline_s: float) -> Outcome:
        return await self._step("restore", job, lambda: self._inner.restore(job, selection, deadline_s=deadline_s))

    async def release(self, job: Job, *, deadline_s: float) -> Outcome:
        return await self._step("release", job, lambda: self._inner.release(job, deadline_s=deadline_s))

    async def abort(self, job: Job, *, deadline_s: float) -> Outcome:
        return await self._step("abort", job, lambda: self._inner.abort(job, deadline_s=deadline_s))

    async def _step(self, step: StepName, job: Job, call: Callable[[], Awaitable[Outcome]]) -> Outcome:
        self._say(step, job, "begin")
        try:
            outcome = await self._carry_out(step, job, call)
        except BaseException as error:
            self._say(step, job, "failed", f"{type(error).__name__}: {error}")
            raise
        await self._look()
        self._say(step, job, "done")
        return outcome

    async def _carry_out(self, step: StepName, job: Job, call: Callable[[], Awaitable[Outcome]]) -> Outcome:
        knob = self._read()
        if knob is None:
            return await call()
        if self._harms(knob, step):
            met_file(self._knob).write_text(str(knob.id))
        if knob.harm == "slow":
            await asyncio.sleep(knob.seconds)
        elif knob.harm == "fail-on" or (knob.harm == "fail" and self._first(knob)):
            raise BackendError(
                f"group {job.group}, node {job.node}, job {job.job}: {step} was told to fail",
                kind=FaultKind.TRANSIENT,
                group=job.group,
                job=job.job,
                node=job.node,
            )
        elif knob.harm == "hang":
            while self._read() == knob:
                await asyncio.sleep(_POLL_S)
        elif knob.harm == "die":
            running = asyncio.ensure_future(call())
            await asyncio.wait({running}, timeout=_MID_CALL_S)
            os.kill(os.getpid(), signal.SIGKILL)
        elif knob.harm == "lie" and step in knob.lies:
            return Outcome()
        elif knob.harm == "late" and step == "suspend":
            outcome = await call()
            self._late_bytes, self._late_until = outcome.freed_bytes, time.monotonic() + knob.seconds
            return outcome
        return await call()

    def _harms(self, knob: Knob, step: StepName) -> bool:
        """Whether this step is one that the knob is about."""
        match knob.harm:
            case "lie":
                return step in knob.lies
            case "late":
                return step == "suspend"
        return True

    def _first(self, knob: Knob) -> bool:
        fresh = knob.id not in self._used
        self._used.add(knob.id)
        return fresh

    def _read(self) -> Knob | None:
        try:
            return Knob.model_validate_json(self._knob.read_bytes())
        except (FileNotFoundError, ValidationError):
            return None

    async def _look(self) -> None:
        jobs = await asyncio.to_thread(self._measure)
        node, group = self._context.node, self._context.group
        self._writer.write(OnDevice(who=self._who, node=node, group=group, jobs=jobs))

    def _measure(self) -> tuple[str, ...]:
        return tuple(sorted({arena.label for path in self._context.devices for arena in holders(Device.open(path))}))

    def _say(self, step: StepName, job: Job, stage: Literal["begin", "done", "failed"], error: str = "") -> None:
        self._writer.write(
            Moved(who=self._who, node=job.node, group=job.group, job=job.job, step=step, stage=stage, error=error)
        )
