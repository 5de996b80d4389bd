"""The checks that third parties get: they pass what is right, and name what is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.backends.conftest import MIB
from tests.support.jobs import JobProcess, process_state
from timeslice.arena import Device
from timeslice.backends import conformance
from timeslice.backends.arena import ArenaBackend
from timeslice.backends.base import Backend, Context, Job, Outcome, Probe, Selection
from timeslice.backends.conformance import CHECKS, Check
from timeslice.models import Residency, Target


class Arenas:
    """Processes with memory on an emulated device."""

    def __init__(self, device: Device, backend: type[Backend] = ArenaBackend) -> None:
        self.device, self.backend = device, backend
        self._running: dict[int, tuple[JobProcess, str]] = {}

    def make(self) -> Backend:
        return self.backend(Context(group="g", node="n1", devices=(Path(self.device.path),)))

    def start(self, job: str) -> Target:
        process = JobProcess("tests.backends.worker")
        process.call("arena", self.device.path)
        self._running[process.pid] = process, process.call("allocate", MIB, process.pid)
        return process.target(job)

    def end(self, target: Target) -> None:
        self._running.pop(target.pid)[0].end()

    def is_intact(self, target: Target) -> bool:
        process, digest = self._running[target.pid]
        return bool(process.call("digest") == digest)

    def used_bytes(self) -> int:
        return self.device.used_bytes()

    def close(self) -> None:
        for process, _ in self._running.values():
            process.end()


@pytest.fixture
def arenas(device: Device) -> Iterator[Arenas]:
    made = Arenas(device)
    yield made
    made.close()


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_what_is_right_passes(check: Check, arenas: Arenas) -> None:
    """A backend that keeps the contract."""
    await check(arenas)


class Lies(ArenaBackend):
    """Says done, and moves nothing."""

    async def suspend(self, job: Job, selection: Selection, *, deadline_s: float) -> Outcome:
        return Outcome(moved_bytes=MIB)


class Remembers(ArenaBackend):
    """Believes its own memory instead of what it could see."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._out = False

    async def suspend(self, job: Job, selection: Selection, *, deadline_s: float) -> Outcome:
        self._out = True
        return await super().suspend(job, selection, deadline_s=deadline_s)

    async def probe(self, job: Job) -> Probe:
        found = await super().probe(job)
        return found if self._out or found.state is Residency.ABSENT else replace(found, state=Residency.RESIDENT)


class StaysLocked(ArenaBackend):
    """Forgets to undo."""

    async def abort(self, job: Job, *, deadline_s: float) -> Outcome:
        return Outcome()


class CountsTwice(ArenaBackend):
    """A repeat claims the bytes again."""

    async def restore(self, job: Job, selection: Selection, *, deadline_s: float) -> Outcome:
        return replace(await super().restore(job, selection, deadline_s=deadline_s), moved_bytes=MIB)


class TakesAnything(ArenaBackend):
    """Ignores a selection that it can't honour."""

    async def prepare(self, job: Job, selection: Selection, *, deadline_s: float) -> Outcome:
        return await super().prepare(job, Selection(), deadline_s=deadline_s)


class BelievesNumbers(ArenaBackend):
    """Moves whoever has the number now."""

    async def prepare(self, job: Job, selection: Selection, *, deadline_s: float) -> Outcome:
        return await super().prepare(_renumbered(job), selection, deadline_s=deadline_s)


def _renumbered(job: Job) -> Job:
    found = []
    for target in job.targets:
        stat = Path(f"/proc/{target.pid}/stat")
        start = int(stat.read_text().rpartition(")")[2].split()[19]) if stat.exists() else target.start
        found.append(target.model_copy(update={"start": start}))
    return replace(job, targets=tuple(found))


@pytest.mark.parametrize(
    ("backend", "check", "why"),
    [
        (Lies, conformance.state_leaves_and_comes_back_intact, "should be suspended"),
        (Remembers, conformance.a_new_instance_finds_what_the_old_one_left, "should be suspended"),
        (StaysLocked, conformance.an_aborted_prepare_leaves_no_trace, "is locked"),
        (CountsTwice, conformance.every_step_may_be_repeated, "repeated restore"),
        (TakesAnything, conformance.what_it_can_not_do_is_refused_untouched, "not refused"),
        (BelievesNumbers, conformance.a_reused_number_is_another_process, "number"),
    ],
)
async def test_what_is_wrong_is_named(arenas: Arenas, backend: type[Backend], check: Check, why: str) -> None:
    """Each mistake by the check that is about it."""
    arenas.backend = backend
    if backend is BelievesNumbers:
        # Its job is frozen by then and can't be asked: that it does not answer shows the same.
        arenas.is_intact = _runs  # type: ignore[method-assign]
    with pytest.raises(AssertionError, match=why):
        await check(arenas)


def _runs(target: Target) -> bool:
    return process_state(target.pid) != "T"
