"""The contract of timeslice/backends/base.py, held against every backend."""

from __future__ import annotations

import os
import signal

import pytest

from tests.backends.conftest import ALL, CUDA, DEADLINE_S, MIB, SIZE, MakeRig, Rig
from tests.support.jobs import process_state, wait_until
from timeslice.backends.base import Selection
from timeslice.errors import BackendError, FaultKind
from timeslice.models import Residency


async def test_a_job_without_processes_is_absent(rig: Rig) -> None:
    """No targets, nothing there; and every step has nothing to do."""
    job = rig.job()
    await rig.out(job)
    await rig.back(job)
    probe = await rig.backend.probe(job)
    assert (probe.state, probe.locked) == (Residency.ABSENT, False)


async def test_a_loaded_job_is_resident_and_a_probe_changes_nothing(rig: Rig) -> None:
    """Looking twice shows the same job, which still runs."""
    worker = rig.start()
    first = await rig.backend.probe(rig.job(worker))
    assert first.state is Residency.RESIDENT
    assert first == await rig.backend.probe(rig.job(worker))
    assert first.device_bytes == (SIZE if rig.moves else 0)
    assert worker.answers()


async def test_state_leaves_the_device_and_comes_back_intact(rig: Rig) -> None:
    """Out: the device is free. Back: the same content, and the process runs. Three times over."""
    worker = rig.start()
    job = rig.job(worker)
    for _ in range(3):
        await rig.out(job)
        probe = await rig.backend.probe(job)
        assert (probe.state, probe.device_bytes) == (Residency.SUSPENDED, 0)
        assert rig.used_bytes() == 0
        await rig.back(job)
        probe = await rig.backend.probe(job)
        assert (probe.state, probe.locked) == (Residency.RESIDENT, False)
        assert worker.content_is_intact()
        assert worker.answers()


async def test_outcomes_tell_what_was_measured(rig: Rig) -> None:
    """Bytes moved and freed are those of the device; a repeat moved none."""
    job = rig.job(rig.start())
    expected = SIZE if rig.moves else 0
    assert await rig.backend.estimate(job, ALL) == expected
    await rig.backend.prepare(job, ALL, deadline_s=DEADLINE_S)
    first = await rig.backend.suspend(job, ALL, deadline_s=DEADLINE_S)
    assert (first.moved_bytes, first.freed_bytes) == (expected, expected)
    assert (await rig.backend.suspend(job, ALL, deadline_s=DEADLINE_S)).moved_bytes == 0
    assert (await rig.backend.probe(job)).host_bytes == expected
    assert await rig.backend.estimate(job, ALL) == 0
    assert (await rig.backend.restore(job, ALL, deadline_s=DEADLINE_S)).moved_bytes == expected
    assert (await rig.backend.restore(job, ALL, deadline_s=DEADLINE_S)).moved_bytes == 0


async def test_every_step_may_be_repeated(rig: Rig) -> None:
    """A message that arrives twice does no more than one that arrives once."""
    worker = rig.start()
    job = rig.job(worker)
    for _ in range(2):
        await rig.backend.prepare(job, ALL, deadline_s=DEADLINE_S)
    for _ in range(2):
        await rig.backend.suspend(job, ALL, deadline_s=DEADLINE_S)
    assert (await rig.backend.probe(job)).state is Residency.SUSPENDED
    for _ in range(2):
        await rig.backend.restore(job, ALL, deadline_s=DEADLINE_S)
    for _ in range(2):
        await rig.backend.release(job, deadline_s=DEADLINE_S)
    for _ in range(2):
        await rig.backend.abort(job, deadline_s=DEADLINE_S)
    assert (await rig.backend.probe(job)).state is Residency.RESIDENT
    assert worker.content_is_intact()


async def test_an_aborted_prepare_leaves_no_trace(rig: Rig) -> None:
    """After abort the job runs as if nothing had been asked."""
    worker = rig.start()
    job = rig.job(worker)
    await rig.backend.prepare(job, ALL, deadline_s=DEADLINE_S)
    await rig.backend.abort(job, deadline_s=DEADLINE_S)
    probe = await rig.backend.probe(job)
    assert (probe.state, probe.locked) == (Residency.RESIDENT, False)
    assert worker.content_is_intact()
    assert worker.answers()


async def test_all_processes_of_a_job_move_together(rig: Rig) -> None:
    """Two ranks: both out, both back."""
    workers = [rig.start(nbytes=4 * MIB, seed=seed) for seed in (1, 2)]
    job = rig.job(*workers)
    await rig.out(job)
    assert (await rig.backend.probe(job)).state is Residency.SUSPENDED
    assert rig.used_bytes() == 0
    await rig.back(job)
    assert all(worker.content_is_intact() and worker.answers() for worker in workers)


async def test_two_jobs_take_turns_on_a_device_that_fits_one(rig: Rig) -> None:
    """What a swap is: one out, the other in, and back again."""
    first = rig.start("a", seed=1)
    await rig.out(rig.job(first))
    second = rig.start("b", seed=2)
    for _ in range(2):
        await rig.out(rig.job(second, name="b"))
        await rig.back(rig.job(first))
        assert first.content_is_intact()
        await rig.out(rig.job(first))
        await rig.back(rig.job(second, name="b"))
        assert second.content_is_intact()


@pytest.mark.parametrize("when", ["before", "prepared", "suspended"])
async def test_a_process_that_ended_counts_as_out(rig: Rig, when: str) -> None:
    """F02: the job ends in the middle of its own suspend: no fault, nothing left, whatever comes next."""
    worker = rig.start()
    job = rig.job(worker)
    if when != "before":
        await rig.backend.prepare(job, ALL, deadline_s=DEADLINE_S)
    if when == "suspended":
        await rig.backend.suspend(job, ALL, deadline_s=DEADLINE_S)
    worker.process.end()
    await rig.out(job)
    await rig.back(job)
    await rig.backend.abort(job, deadline_s=DEADLINE_S)
    assert (await rig.backend.probe(job)).state is Residency.ABSENT
    assert rig.used_bytes() == 0


async def test_the_rest_of_a_job_moves_when_one_process_is_gone(rig: Rig) -> None:
    """One rank dead, the other leaves the device and comes back."""
    dead, alive = rig.start(nbytes=2 * MIB), rig.start(nbytes=2 * MIB, seed=2)
    job = rig.job(dead, alive)
    dead.process.end()
    await rig.out(job)
    assert (await rig.backend.probe(job)).state is Residency.SUSPENDED
    await rig.back(job)
    assert alive.content_is_intact()


async def test_a_number_that_was_reused_is_another_process(rig: Rig) -> None:
    """A target with the same pid and another start time is gone, and the process that has the number is left alone."""
    worker = rig.start()
    worker.target = worker.target.model_copy(update={"start": worker.target.start - 1})
    job = rig.job(worker)
    await rig.out(job)
    assert (await rig.backend.probe(job)).state is Residency.ABSENT
    assert process_state(worker.process.pid) != "T"
    assert worker.content_is_intact()


async def test_what_a_backend_can_not_do_is_refused_before_anything_is_touched(rig: Rig) -> None:
    """An unknown tag or mode is an unsupported fault, and the job runs on unlocked."""
    worker = rig.start()
    job = rig.job(worker)
    for selection in (Selection(tags=("lora",)), Selection(mode="discard")):
        for step in (rig.backend.prepare, rig.backend.suspend):
            with pytest.raises(BackendError) as caught:
                await step(job, selection, deadline_s=DEADLINE_S)
            assert caught.value.kind is FaultKind.UNSUPPORTED
            assert "trainers" in str(caught.value)
    probe = await rig.backend.probe(job)
    assert (probe.state, probe.locked) == (Residency.RESIDENT, False)
    assert worker.answers()


async def test_a_new_agent_finds_what_the_old_one_left(rig: Rig) -> None:
    """Observed state, not memory: a fresh instance sees each state and goes on from it. One that moves nothing sees the
    job where it has been all the time."""
    worker = rig.start()
    job = rig.job(worker)
    if rig.kind == "noop":
        await rig.out(job)
        rig.restart()
        assert (await rig.backend.probe(job)).state is Residency.RESIDENT
        return
    await rig.backend.prepare(job, ALL, deadline_s=DEADLINE_S)
    locked = (await rig.backend.probe(job)).locked
    rig.restart()
    assert (await rig.backend.probe(job)).locked is locked
    await rig.backend.suspend(job, ALL, deadline_s=DEADLINE_S)
    rig.restart()
    assert (await rig.backend.probe(job)).state is Residency.SUSPENDED
    await rig.backend.restore(job, ALL, deadline_s=DEADLINE_S)
    rig.restart()
    probe = await rig.backend.probe(job)
    assert (probe.state, probe.locked) == (Residency.RESIDENT, locked)
    await rig.backend.release(job, deadline_s=DEADLINE_S)
    assert worker.content_is_intact()
    assert worker.answers()


async def test_jobs_are_told_apart(rig: Rig) -> None:
    """F04: only the targets of the job that is meant are touched, and a job's name alone means nothing."""
    meant, other = rig.start("a", nbytes=4 * MIB), rig.start("a", nbytes=4 * MIB, seed=2)
    await rig.out(rig.job(meant))
    assert other.content_is_intact()
    assert other.answers()


async def test_health_is_good_here(rig: Rig) -> None:
    """Nothing to complain of on a machine where the tests of it pass."""
    assert list(await rig.backend.health()) == []


@pytest.mark.parametrize(
    "kind",
    ["arena", "arena by tool", "cuda by tool", "cuda by driver", "cuda by toggle", "channel", "composite", "http"],
)
async def test_a_failed_restore_leaves_the_copy_intact(make_rig: MakeRig, kind: str) -> None:
    """Without room: a fault, the job still suspended; with room again it comes back as it was."""
    rig = make_rig(kind)
    worker = rig.start()
    job = rig.job(worker)
    await rig.out(job)
    squatter = rig.start("b", seed=2)
    with pytest.raises(BackendError) as caught:
        await rig.backend.restore(job, ALL, deadline_s=DEADLINE_S)
    assert caught.value.kind is FaultKind.TRANSIENT
    assert "free" in str(caught.value)
    assert (await rig.backend.probe(job)).state is Residency.SUSPENDED
    assert squatter.content_is_intact()
    squatter.process.end()
    await rig.back(job)
    assert worker.content_is_intact()


@pytest.mark.parametrize("kind", ["arena", *CUDA, "channel", "composite", "http"])
async def test_a_restore_is_all_or_nothing(make_rig: MakeRig, kind: str) -> None:
    """Of two ranks only one fits: after the fault none is on the device."""
    rig = make_rig(kind)
    workers = [rig.start(nbytes=6 * MIB, seed=seed) for seed in (1, 2)]
    job = rig.job(*workers)
    await rig.out(job)
    squatter = rig.start("b", nbytes=8 * MIB, seed=3)
    with pytest.raises(BackendError):
        await rig.backend.restore(job, ALL, deadline_s=DEADLINE_S)
    probe = await rig.backend.probe(job)
    assert (probe.state, probe.device_bytes) == (Residency.SUSPENDED, 0)
    squatter.process.end()
    await rig.back(job)
    assert all(worker.content_is_intact() for worker in workers)


@pytest.mark.parametrize("kind", ["arena", *CUDA, "channel", "http"])
async def test_memory_is_measured_and_its_holders_named(make_rig: MakeRig, kind: str) -> None:
    """The device says how much is free and who has the rest."""
    rig = make_rig(kind)
    worker = rig.start()
    (seen,) = await rig.backend.memory()
    assert (seen.total_bytes - seen.free_bytes, seen.holders) == (SIZE, ((worker.process.pid, SIZE),))


@pytest.mark.parametrize("kind", ["arena", *CUDA, "channel", "composite"])
async def test_a_process_that_allocated_nothing_is_absent(make_rig: MakeRig, kind: str) -> None:
    """F01: a context alone is no resident job, and moving it is no fault."""
    rig = make_rig(kind)
    worker = rig.start(nbytes=0)
    job = rig.job(worker)
    assert (await rig.backend.probe(job)).state is Residency.ABSENT
    await rig.out(job)
    await rig.back(job)
    assert worker.answers()


@pytest.mark.parametrize("kind", ["arena", *CUDA, "process"])
async def test_a_process_stopped_by_its_user_is_moved_and_stays_stopped(make_rig: MakeRig, kind: str) -> None:
    """Forced: it need not run for it, and nobody but the user continues it."""
    rig = make_rig(kind)
    worker = rig.start()
    job = rig.job(worker)
    assert rig.backend.capabilities().forced
    os.kill(worker.process.pid, signal.SIGSTOP)
    wait_until(lambda: process_state(worker.process.pid) == "T", "stopped")
    await rig.out(job)
    assert (await rig.backend.probe(job)).state is Residency.SUSPENDED
    await rig.back(job)
    assert process_state(worker.process.pid) == "T"
    os.kill(worker.process.pid, signal.SIGCONT)
    assert worker.content_is_intact()


@pytest.mark.parametrize("kind", ["arena", *CUDA, "process"])
async def test_a_suspended_job_is_not_let_run_by_mistake(make_rig: MakeRig, kind: str) -> None:
    """Release and abort of a job that is out are refused: it would run without its state."""
    rig = make_rig(kind)
    job = rig.job(rig.start())
    await rig.out(job)
    for step in (rig.backend.release, rig.backend.abort):
        with pytest.raises(BackendError, match="suspended") as caught:
            await step(job, deadline_s=DEADLINE_S)
        assert caught.value.kind is FaultKind.UNSUPPORTED
    assert (await rig.backend.probe(job)).state is Residency.SUSPENDED


@pytest.mark.parametrize("kind", ["arena", *CUDA, "process"])
async def test_a_process_of_another_pid_namespace_is_never_touched(make_rig: MakeRig, kind: str) -> None:
    """Its number means another process here, so the whole job is refused."""
    rig = make_rig(kind)
    worker = rig.start()
    worker.target = worker.target.model_copy(update={"pid_namespace": "pid:[1]"})
    with pytest.raises(BackendError, match="namespace") as caught:
        await rig.backend.prepare(rig.job(worker), ALL, deadline_s=DEADLINE_S)
    assert caught.value.kind is FaultKind.UNSUPPORTED
    assert worker.answers()
