"""The composite backend where its stages fail, where the agent dies between two of them, and how it is written down."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from tests.backends.conftest import ALL, DEADLINE_S, MIB, SIZE, MakeRig, Rig, Worker
from tests.support.jobs import process_state, wait_until
from timeslice.arena import Device
from timeslice.backends.base import Backend, Context, Selection
from timeslice.backends.registry import get_backend
from timeslice.errors import BackendError, FaultKind
from timeslice.models import Residency

HALF = SIZE // 2
LOOK = "cuda-checkpoint --get-state --pid"  # the stand-in's


@pytest.fixture
def rig(make_rig: MakeRig) -> Rig:
    """channel+arena: half of a worker's memory is moved by the worker, the rest from outside."""
    return make_rig("composite")


def stage(rig: Rig, name: str) -> Backend:
    """One stage alone, as if an agent had died behind it."""
    context = Context(group=rig.context.group, node="n1", devices=rig.context.devices, channel=rig.context.channel)
    return get_backend(name, context)


def without_channel(worker: Worker) -> Worker:
    worker.target = worker.target.model_copy(update={"channel": "", "modes": (), "tags": ()})
    return worker


async def test_the_application_goes_first_and_comes_back_last(rig: Rig) -> None:
    """Each stage's time is told, its bytes are added up, and each moved its own half."""
    job = rig.job(rig.start())
    await rig.backend.prepare(job, ALL, deadline_s=DEADLINE_S)
    out = await rig.backend.suspend(job, ALL, deadline_s=DEADLINE_S)
    assert list(out.steps) == ["channel.prepare", "channel.suspend", "arena.prepare", "arena.suspend"]
    assert (out.moved_bytes, out.freed_bytes) == (SIZE, SIZE)
    assert (await stage(rig, "arena").probe(job)).host_bytes == HALF
    back = await rig.backend.restore(job, ALL, deadline_s=DEADLINE_S)
    assert list(back.steps) == ["arena.restore", "arena.release", "channel.restore"]
    assert back.moved_bytes == SIZE


async def test_a_job_without_a_workload_is_moved_by_the_rest(rig: Rig) -> None:
    """Nothing to do for a stage: it is passed over."""
    worker = without_channel(rig.start())
    job = rig.job(worker)
    await rig.backend.prepare(job, ALL, deadline_s=DEADLINE_S)
    out = await rig.backend.suspend(job, ALL, deadline_s=DEADLINE_S)
    assert not [name for name in out.steps if name.startswith("channel")]
    assert rig.device.used_bytes() == 0
    await rig.back(job)
    assert worker.content_is_intact()


async def test_a_job_that_moves_all_by_itself_is_not_frozen(rig: Rig) -> None:
    """The last stage finds nothing left."""
    worker = rig.start(nbytes=0)
    worker.process.call("keep", SIZE, 3)
    job = rig.job(worker)
    await rig.out(job)
    assert (await rig.backend.probe(job)).state is Residency.SUSPENDED
    assert process_state(worker.process.pid) != "T"
    await rig.back(job)
    assert (await rig.backend.probe(job)).state is Residency.RESIDENT


@pytest.mark.parametrize("way", ["suspend", "restore", "abort", "release"])
async def test_half_way_is_recoverable_from_what_is_observed(rig: Rig, way: str) -> None:
    """P6: the agent died behind the first stage. The job is on the device and locked, never unknown; a new agent can go
    on, or back."""
    worker = rig.start()
    job = rig.job(worker)
    await stage(rig, "channel").suspend(job, ALL, deadline_s=DEADLINE_S)
    rig.restart()
    probe = await rig.backend.probe(job)
    assert (probe.state, probe.locked) == (Residency.RESIDENT, True)
    if way == "suspend":
        await rig.out(job)
        assert rig.device.used_bytes() == 0
        assert (await rig.backend.probe(job)).state is Residency.SUSPENDED
        await rig.back(job)
    elif way == "restore":
        await rig.back(job)
    else:
        await getattr(rig.backend, way)(job, deadline_s=DEADLINE_S)
    probe = await rig.backend.probe(job)
    assert (probe.state, probe.locked) == (Residency.RESIDENT, False)
    assert worker.content_is_intact()


async def test_half_way_with_the_next_stage_locked_is_recoverable_too(rig: Rig) -> None:
    """A frozen workload is not asked: it could not answer."""
    worker = rig.start()
    job = rig.job(worker)
    await stage(rig, "channel").suspend(job, ALL, deadline_s=DEADLINE_S)
    await stage(rig, "arena").prepare(job, ALL, deadline_s=DEADLINE_S)
    for _ in range(2):
        rig.restart()
        probe = await rig.backend.probe(job)
        assert (probe.state, probe.locked) == (Residency.RESIDENT, True)
        await rig.backend.prepare(job, ALL, deadline_s=DEADLINE_S)
    await rig.backend.abort(job, deadline_s=DEADLINE_S)
    assert worker.content_is_intact()
    assert worker.answers()


async def test_a_later_stage_that_fails_brings_the_earlier_one_back(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """P5, G04: undone in reverse, so the job runs where it was, with its content."""
    worker = rig.start()
    job = rig.job(worker)
    await rig.backend.prepare(job, ALL, deadline_s=DEADLINE_S)
    monkeypatch.setenv("TIMESLICE_ARENA_FAULTS", "checkpoint:fail")
    with pytest.raises(BackendError, match="checkpoint"):
        await rig.backend.suspend(job, ALL, deadline_s=DEADLINE_S)
    monkeypatch.delenv("TIMESLICE_ARENA_FAULTS")
    probe = await rig.backend.probe(job)
    assert (probe.state, probe.locked, probe.device_bytes) == (Residency.RESIDENT, False, SIZE)
    assert worker.content_is_intact()


async def test_an_earlier_stage_that_can_not_come_back_puts_the_later_one_out_again(rig: Rig) -> None:
    """P5: there is room for one half only. The job stays suspended as a whole, and frees what it had taken."""
    worker = rig.start()
    job = rig.job(worker)
    await rig.out(job)
    squatter = rig.start("b", nbytes=8 * MIB, seed=2)
    with pytest.raises(BackendError, match="free"):
        await rig.backend.restore(job, ALL, deadline_s=DEADLINE_S)
    assert (await rig.backend.probe(job)).state is Residency.SUSPENDED
    assert rig.device.used_bytes() == 8 * MIB
    squatter.process.end()
    await rig.back(job)
    assert worker.content_is_intact()


async def test_by_force_a_stopped_job_leaves_and_comes_back_stopped(rig: Rig) -> None:
    """L08: its workload can't answer and is passed over, in both directions; later it leaves in the usual way again."""
    worker = rig.start()
    job = rig.job(worker)
    os.kill(worker.process.pid, signal.SIGSTOP)
    wait_until(lambda: process_state(worker.process.pid) == "T", "stopped")
    forced = rig.backend.outside()
    assert forced.name != rig.backend.name
    await forced.prepare(job, ALL, deadline_s=DEADLINE_S)
    await forced.suspend(job, ALL, deadline_s=DEADLINE_S)
    assert rig.device.used_bytes() == 0
    await forced.restore(job, ALL, deadline_s=DEADLINE_S)
    await forced.release(job, deadline_s=DEADLINE_S)
    assert process_state(worker.process.pid) == "T"
    os.kill(worker.process.pid, signal.SIGCONT)
    assert worker.content_is_intact()
    await rig.out(job)
    await rig.back(job)
    assert worker.content_is_intact()


async def test_by_force_a_job_that_was_half_out_comes_back_whole(rig: Rig) -> None:
    """Who froze it did not ask the workload; whoever lets it go does, or the job would run without a part."""
    worker = rig.start()
    job = rig.job(worker)
    await stage(rig, "channel").suspend(job, ALL, deadline_s=DEADLINE_S)
    forced = rig.backend.outside()
    await forced.prepare(job, ALL, deadline_s=DEADLINE_S)
    await forced.suspend(job, ALL, deadline_s=DEADLINE_S)
    await forced.restore(job, ALL, deadline_s=DEADLINE_S)
    await forced.release(job, deadline_s=DEADLINE_S)
    assert (await rig.backend.probe(job)).state is Residency.RESIDENT
    assert worker.content_is_intact()


async def test_parts_are_refused(rig: Rig) -> None:
    """What freezes a process takes all of it."""
    worker = rig.start()
    worker.target = worker.target.model_copy(update={"tags": ("kv",)})
    with pytest.raises(BackendError, match="leave tags and slot out") as caught:
        await rig.backend.prepare(rig.job(worker), Selection(tags=("kv",)), deadline_s=DEADLINE_S)
    assert caught.value.kind is FaultKind.UNSUPPORTED


def test_it_can_what_its_stages_can(rig: Rig, tmp_path: Path) -> None:
    """Modes of the first that moves, the strictest share, and by force what does not ask."""
    able = rig.backend.capabilities()
    assert sorted(able.modes) == ["discard", "offload"]
    assert (able.forced, able.freed_share) == (True, 0.99)
    assert sorted(rig.backend.outside().capabilities().modes) == ["offload"]
    folders = {"cuda.state": str(tmp_path / "cuda"), "quiesce.state": str(tmp_path / "quiesce")}
    cuda = replace(rig.context, options={"stages": "quiesce+cuda", **folders})
    assert not get_backend("composite", cuda).capabilities().overlaps  # one of them can't bring in beside one going out


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({}, "needs two stages"),
        ({"stages": "arena"}, "needs two stages"),
        ({"stages": "channel++arena"}, "needs two stages"),
        ({"stages": "arena+arena"}, "another backend"),
        ({"stages": "composite+arena"}, "none is composite"),
        ({"stages": "nope+arena"}, "no backend 'nope'"),
        ({"stages": "arena+channel"}, "last stage"),
        ({"stages": "arena+quiesce"}, "last stage"),
        ({"stages": "process+channel+arena"}, "put channel first"),
        ({"stages": "channel+arena", "settle": "1"}, "option settle is none of a stage"),
        ({"stages": "channel+arena", "quiesce.settle": "1"}, "option quiesce.settle is none of a stage"),
        ({"stages": "channel+arena", "arena.x": "1"}, "backend arena has no option x"),
    ],
)
def test_stages_that_make_no_sense_are_refused_at_the_start(
    rig: Rig, device: Device, options: dict[str, str], why: str
) -> None:
    """With a word on what is wrong."""
    context = Context(group="g", node="n1", devices=(Path(device.path),), channel=rig.context.channel, options=options)
    with pytest.raises(BackendError, match=why) as caught:
        get_backend("composite", context)
    assert caught.value.kind is FaultKind.UNSUPPORTED


async def test_hooks_go_around_a_checkpoint_of_stand_in_gpus(make_rig: MakeRig, tmp_path: Path) -> None:
    """C14: quiesce+cuda. Both ranks run while the first hook does, and again before the second one; all comes back."""
    rig = make_rig("cuda by tool")
    said, script = tmp_path / "said", tmp_path / "hook.sh"
    script.write_text(f'for pid in $TIMESLICE_PIDS; do echo $TIMESLICE_STAGE "$({LOOK} $pid)" >> {said}; done\n')
    line = f"/bin/sh {script}"
    hooks = {"quiesce.before": line, "quiesce.after": line, "quiesce.state": str(tmp_path / "quiesced")}
    options = {"stages": "quiesce+cuda", "cuda.state": rig.context.options["state"], **hooks}
    rig.backend = get_backend("composite", replace(rig.context, options=options))
    workers = [rig.start(nbytes=4 * MIB, seed=seed) for seed in (1, 2)]
    job = rig.job(*workers)
    await rig.out(job)
    assert (await rig.backend.probe(job)).state is Residency.SUSPENDED
    assert rig.used_bytes() == 0
    await rig.back(job)
    assert said.read_text().splitlines() == ["before running"] * 2 + ["after running"] * 2
    assert all(worker.content_is_intact() for worker in workers)
