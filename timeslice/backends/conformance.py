"""The contract of `timeslice.backends.base` as checks that a third party's backend can be held against.

They need no test framework. Bring a ``Subject``, which makes instances of the backend and processes with state, and run
each of ``CHECKS`` on a fresh one; with pytest::

    @pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
    async def test_conformance(check: Check, subject: Subject) -> None:
        await check(subject)

A check that finds something wrong raises `AssertionError` with a sentence that says what.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

from timeslice.backends.base import Backend, Job, Probe, Selection
from timeslice.errors import BackendError, FaultKind
from timeslice.models import Residency, Target

DEADLINE_S = 20.0
ALL = Selection()


class Subject(Protocol):
    """A backend with processes for it. What it started it ends by itself after the check."""

    def make(self) -> Backend:
        """A new instance, as in an agent that was killed and started again."""

    def start(self, job: str) -> Target:
        """Start a process of this job, with state on the device."""

    def end(self, target: Target) -> None:
        """Kill it, and wait until its state is gone with it."""

    def is_intact(self, target: Target) -> bool:
        """Whether it runs, and its state has the content that it had at the start."""

    def used_bytes(self) -> int:
        """What all processes have on the device now, measured past the backend."""


Check = Callable[[Subject], Awaitable[None]]


async def a_job_without_processes_is_absent(subject: Subject) -> None:
    """And every step has nothing to do."""
    backend, job = subject.make(), _job()
    await _out(backend, job)
    await _back(backend, job)
    _is(await backend.probe(job), Residency.ABSENT, locked=False)


async def a_probe_changes_nothing(subject: Subject) -> None:
    """Two looks show the same resident job, which runs."""
    target, backend = subject.start("a"), subject.make()
    first = await backend.probe(_job(target))
    _is(first, Residency.RESIDENT, locked=False)
    _must(first == await backend.probe(_job(target)), "a second probe shows something else than the first")
    _must(subject.is_intact(target), "a probe changed the job")


async def state_leaves_and_comes_back_intact(subject: Subject) -> None:
    """Three times over: the device is free, then the same content is there and the process runs."""
    target, backend = subject.start("a"), subject.make()
    for _ in range(3):
        await _out(backend, _job(target))
        _is(await backend.probe(_job(target)), Residency.SUSPENDED)
        _must(subject.used_bytes() == 0, "a suspended job still has something on the device")
        await _back(backend, _job(target))
        _is(await backend.probe(_job(target)), Residency.RESIDENT, locked=False)
        _must(subject.is_intact(target), "the content changed on its way out and back")


async def every_step_may_be_repeated(subject: Subject) -> None:
    """A message that arrives twice does no more than one that arrives once, and moves nothing."""
    target, backend = subject.start("a"), subject.make()
    job = _job(target)
    for _ in range(2):
        await backend.prepare(job, ALL, deadline_s=DEADLINE_S)
    await backend.suspend(job, ALL, deadline_s=DEADLINE_S)
    again = await backend.suspend(job, ALL, deadline_s=DEADLINE_S)
    _must(again.moved_bytes == 0, "a repeated suspend claims to have moved something")
    _is(await backend.probe(job), Residency.SUSPENDED)
    await backend.restore(job, ALL, deadline_s=DEADLINE_S)
    again = await backend.restore(job, ALL, deadline_s=DEADLINE_S)
    _must(again.moved_bytes == 0, "a repeated restore claims to have moved something")
    for step in (backend.release, backend.release, backend.abort, backend.abort):
        await step(job, deadline_s=DEADLINE_S)
    _is(await backend.probe(job), Residency.RESIDENT, locked=False)
    _must(subject.is_intact(target), "repeated steps changed the content")


async def an_aborted_prepare_leaves_no_trace(subject: Subject) -> None:
    """The job runs as if nothing had been asked."""
    target, backend = subject.start("a"), subject.make()
    await backend.prepare(_job(target), ALL, deadline_s=DEADLINE_S)
    await backend.abort(_job(target), deadline_s=DEADLINE_S)
    _is(await backend.probe(_job(target)), Residency.RESIDENT, locked=False)
    _must(subject.is_intact(target), "after abort the job is not as it was")


async def a_new_instance_finds_what_the_old_one_left(subject: Subject) -> None:
    """Observed state, not memory: after each step another instance goes on."""
    target = subject.start("a")
    job = _job(target)
    await subject.make().prepare(job, ALL, deadline_s=DEADLINE_S)
    await subject.make().suspend(job, ALL, deadline_s=DEADLINE_S)
    _is(await subject.make().probe(job), Residency.SUSPENDED)
    await subject.make().restore(job, ALL, deadline_s=DEADLINE_S)
    _is(await subject.make().probe(job), Residency.RESIDENT)
    await subject.make().release(job, deadline_s=DEADLINE_S)
    _is(await subject.make().probe(job), Residency.RESIDENT, locked=False)
    _must(subject.is_intact(target), "the content changed on its way through several instances")


async def a_process_that_ended_counts_as_out(subject: Subject) -> None:
    """Whenever it ends, every step that follows has nothing to do, and is no fault."""
    for when in ("before", "prepared", "suspended"):
        target, backend = subject.start("a"), subject.make()
        job = _job(target)
        if when != "before":
            await backend.prepare(job, ALL, deadline_s=DEADLINE_S)
        if when == "suspended":
            await backend.suspend(job, ALL, deadline_s=DEADLINE_S)
        subject.end(target)
        await _out(backend, job)
        await _back(backend, job)
        _is(await backend.probe(job), Residency.ABSENT)


async def a_reused_number_is_another_process(subject: Subject) -> None:
    """Number and start time make a process; one that has only the number is left alone."""
    target, backend = subject.start("a"), subject.make()
    other = target.model_copy(update={"start": target.start - 1})
    await _out(backend, _job(other))
    _is(await backend.probe(_job(other)), Residency.ABSENT)
    _must(subject.is_intact(target), "a process was touched that only has the number of the one that was meant")


async def all_processes_of_a_job_move_and_no_others(subject: Subject) -> None:
    """Two ranks leave together; a process that is not in the job's targets stays as it is."""
    ranks, other, backend = [subject.start("a"), subject.start("a")], subject.start("a"), subject.make()
    job = _job(*ranks)
    await _out(backend, job)
    _is(await backend.probe(job), Residency.SUSPENDED)
    _must(subject.is_intact(other), "a process was touched that is none of the job's targets")
    await _back(backend, job)
    _must(all(map(subject.is_intact, ranks)), "not all processes of the job came back as they were")


async def what_it_can_not_do_is_refused_untouched(subject: Subject) -> None:
    """Unknown tags are a fault of the kind unsupported, before anything is locked."""
    target, backend = subject.start("a"), subject.make()
    unknown = Selection(tags=("no-backend-knows-this-tag",))
    for step in (backend.prepare, backend.suspend):
        try:
            await step(_job(target), unknown, deadline_s=DEADLINE_S)
        except BackendError as error:
            _must(error.kind is FaultKind.UNSUPPORTED, f"an unknown tag is a fault of the kind {error.kind}")
        else:
            raise AssertionError("an unknown tag is not refused")
    _is(await backend.probe(_job(target)), Residency.RESIDENT, locked=False)
    _must(subject.is_intact(target), "a refused step changed the job")


CHECKS: tuple[Check, ...] = (
    a_job_without_processes_is_absent,
    a_probe_changes_nothing,
    state_leaves_and_comes_back_intact,
    every_step_may_be_repeated,
    an_aborted_prepare_leaves_no_trace,
    a_new_instance_finds_what_the_old_one_left,
    a_process_that_ended_counts_as_out,
    a_reused_number_is_another_process,
    all_processes_of_a_job_move_and_no_others,
    what_it_can_not_do_is_refused_untouched,
)


def _job(*targets: Target) -> Job:
    return Job(group="conformance", job="a", node="n1", targets=targets)


async def _out(backend: Backend, job: Job) -> None:
    await backend.prepare(job, ALL, deadline_s=DEADLINE_S)
    await backend.suspend(job, ALL, deadline_s=DEADLINE_S)


async def _back(backend: Backend, job: Job) -> None:
    await backend.restore(job, ALL, deadline_s=DEADLINE_S)
    await backend.release(job, deadline_s=DEADLINE_S)


def _is(probe: Probe, state: Residency, *, locked: bool | None = None) -> None:
    _must(probe.state is state, f"the job is {probe.state}, and should be {state}")
    _must(locked in {None, probe.locked}, f"the job is {'' if probe.locked else 'not '}locked")


def _must(holds: bool, why: str) -> None:
    if not holds:
        raise AssertionError(why)
