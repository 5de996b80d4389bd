"""The arena backend against a checkpoint tool that misbehaves: flakes, lies, hangs and dies."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.backends.conftest import ALL, CAPACITY, DEADLINE_S, MIB, SIZE, MakeRig, Rig
from tests.support.jobs import process_state, wait_until
from timeslice.arena import Device
from timeslice.arena.device import FAULTS_FILE
from timeslice.backends.arena import ArenaBackend
from timeslice.backends.base import Backend, Context
from timeslice.errors import BackendError, FaultKind
from timeslice.models import Residency


@pytest.fixture(params=["arena", pytest.param("arena by tool", marks=pytest.mark.slow)])
def rig(request: pytest.FixtureRequest, make_rig: MakeRig) -> Rig:
    """With the state from the control block, and from the tool."""
    return make_rig(request.param)


@pytest.fixture
def second_device(tmp_path: Path) -> Iterator[Device]:
    made = Device.create(tmp_path / "second", CAPACITY)
    yield made
    made.destroy(force=True)


def misbehave(device: Device, faults: str) -> None:
    (Path(device.path) / FAULTS_FILE).write_text(faults)


def behave(device: Device) -> None:
    (Path(device.path) / FAULTS_FILE).unlink()


@pytest.mark.parametrize(("every", "swaps"), [(4, 10), pytest.param(20, 100, marks=pytest.mark.slow)])
async def test_a_lock_that_fails_once_in_a_while_is_nobodys_trouble(make_rig: MakeRig, every: int, swaps: int) -> None:
    """F03: every so many locks one fails, in many swaps: no fault, and the content is the same at the end."""
    rig = make_rig("arena")
    worker = rig.start(nbytes=MIB)
    job = rig.job(worker)
    misbehave(rig.device, f"lock:1/{every}")
    for _ in range(swaps):
        await rig.out(job)
        await rig.back(job)
    behave(rig.device)
    assert worker.content_is_intact()


async def test_a_failed_checkpoint_leaves_the_job_running_where_it_was(rig: Rig) -> None:
    """G04: the tool's own words are in the fault, the process runs unlocked with its memory on the device."""
    worker = rig.start()
    job = rig.job(worker)
    misbehave(rig.device, "checkpoint:fail")
    await rig.backend.prepare(job, ALL, deadline_s=DEADLINE_S)
    assert process_state(worker.process.pid) == "T"
    with pytest.raises(BackendError, match=rf"Could not checkpoint on process ID {worker.process.pid}") as caught:
        await rig.backend.suspend(job, ALL, deadline_s=DEADLINE_S)
    assert caught.value.kind is FaultKind.TRANSIENT
    probe = await rig.backend.probe(job)
    assert (probe.state, probe.locked, probe.device_bytes) == (Residency.RESIDENT, False, SIZE)
    assert worker.content_is_intact()


async def test_one_rank_that_fails_brings_the_other_back(make_rig: MakeRig, second_device: Device) -> None:
    """A suspend is all or nothing: the rank that had left is restored, and both run."""
    rig = make_rig("arena")
    rig.context = replace(rig.context, devices=(*rig.context.devices, Path(second_device.path)))
    rig.restart()
    first, second = rig.start(), rig.start(nbytes=0)
    second.process.call("arena", second_device.path)
    second.digest = second.process.call("allocate", SIZE, 2, 1)
    job = rig.job(first, second)
    misbehave(second_device, "checkpoint:fail")
    with pytest.raises(BackendError):
        await rig.out(job)
    assert (await rig.backend.probe(job)).state is Residency.RESIDENT
    assert first.content_is_intact()
    assert second.content_is_intact()


@pytest.mark.parametrize("fault", ["lie", "late=3"])
async def test_freed_bytes_are_measured_not_believed(rig: Rig, fault: str) -> None:
    """G06: the tool claims success and frees nothing, or later: the outcome says that nothing was free by then."""
    worker = rig.start()
    job = rig.job(worker)
    misbehave(rig.device, f"checkpoint:{fault}")
    await rig.backend.prepare(job, ALL, deadline_s=DEADLINE_S)
    outcome = await rig.backend.suspend(job, ALL, deadline_s=DEADLINE_S)
    assert outcome.freed_bytes == 0
    if fault != "lie":
        wait_until(lambda: rig.device.used_bytes() < SIZE, "freed at last")
    assert (await rig.backend.probe(job)).device_bytes == (SIZE if fault == "lie" else 0)
    behave(rig.device)
    await rig.back(job)
    assert worker.content_is_intact()


@pytest.mark.parametrize("action", ["lock", "restore"])
async def test_a_tool_that_claims_too_much_is_found_out(rig: Rig, action: str) -> None:
    """Exit status 0 and nothing done: a fault, since each action is looked at afterwards."""
    worker = rig.start()
    job = rig.job(worker)
    if action == "restore":
        await rig.out(job)
    misbehave(rig.device, f"{action}:lie")
    with pytest.raises(BackendError, match="claimed success"):
        await (rig.backend.prepare if action == "lock" else rig.backend.restore)(job, ALL, deadline_s=1.0)
    behave(rig.device)
    await rig.back(job)
    assert worker.content_is_intact()


async def test_a_state_that_can_not_be_read_once_is_read_again(make_rig: MakeRig) -> None:
    """A flake of get-state costs nothing."""
    rig = make_rig("arena by tool")
    worker = rig.start()
    misbehave(rig.device, "get-state:1/3")
    for _ in range(3):
        await rig.out(rig.job(worker))
        await rig.back(rig.job(worker))
    assert worker.content_is_intact()


async def test_a_tool_that_hangs_is_not_killed(make_rig: MakeRig) -> None:
    """The fault says so and names it; the job is faulted until the tool has ended, and goes on from there."""
    rig = make_rig("arena")
    worker = rig.start()
    job = rig.job(worker)
    misbehave(rig.device, "checkpoint:hang")
    await rig.backend.prepare(job, ALL, deadline_s=DEADLINE_S)
    with pytest.raises(BackendError, match="must not be killed") as caught:
        await rig.backend.suspend(job, ALL, deadline_s=0.5)
    assert caught.value.kind is FaultKind.POISONED
    tool = int(re.findall(r"tool process (\d+)", str(caught.value))[0])
    assert process_state(tool) == "S"
    assert (await rig.backend.probe(job)).state is Residency.FAULTED
    with pytest.raises(BackendError, match="must not be killed"):
        await rig.backend.abort(job, deadline_s=0.1)
    behave(rig.device)
    os.kill(tool, signal.SIGKILL)  # what a person may do, and we may not
    await rig.backend.abort(job, deadline_s=DEADLINE_S)
    assert (await rig.backend.probe(job)).state is Residency.RESIDENT
    assert worker.content_is_intact()


async def test_a_slow_tool_that_ends_is_seen_to_have_ended(make_rig: MakeRig) -> None:
    """Overdue, then done: the repeat waits for it, and finds the job suspended."""
    rig = make_rig("arena")
    worker = rig.start()
    job = rig.job(worker)
    misbehave(rig.device, "checkpoint:hang=5")
    await rig.backend.prepare(job, ALL, deadline_s=DEADLINE_S)
    with pytest.raises(BackendError):
        await rig.backend.suspend(job, ALL, deadline_s=0.2)
    await rig.backend.suspend(job, ALL, deadline_s=DEADLINE_S)
    assert (await rig.backend.probe(job)).state is Residency.SUSPENDED
    await rig.back(job)
    assert worker.content_is_intact()


def test_a_tool_outlives_the_agent_that_started_it(make_rig: MakeRig) -> None:
    """The agent is cancelled and its event loop ends in mid-copy: the copy is finished, and its successor sees it."""
    rig = make_rig("arena")
    worker = rig.start()
    job = rig.job(worker)
    misbehave(rig.device, "checkpoint:hang=3")

    async def stopped_agent() -> None:
        await rig.backend.prepare(job, ALL, deadline_s=DEADLINE_S)
        step = asyncio.create_task(rig.backend.suspend(job, ALL, deadline_s=DEADLINE_S))
        while not tools(rig.backend):
            await asyncio.sleep(0.01)
        step.cancel()

    asyncio.run(stopped_agent())
    (call,) = tools(rig.backend)
    wait_until(lambda: rig.device.used_bytes() < SIZE, "the copy is finished")
    call.end()
    rig.restart()
    asyncio.run(rig.back(job))
    assert worker.content_is_intact()


def tools(backend: Backend) -> list[Any]:
    """Calls of the tool under way."""
    assert isinstance(backend, ArenaBackend)
    return [call for call in backend._tool._running.values() if "checkpoint" in call.words]


@pytest.mark.parametrize(
    "fault",
    [
        "lock:die=stopping",
        "lock:die=stopped",
        "checkpoint:die=begun",
        "checkpoint:die=half",
        "checkpoint:die=copied",
        "checkpoint:die=recorded",
        "checkpoint:die=freed",
        "restore:die=stopped",
        "restore:die=reserved",
        "restore:die=half",
        "restore:die=copied",
        "unlock:die=recorded",
        "unlock:die=continued",
    ],
)
async def test_a_tool_that_dies_at_any_point_loses_nothing(rig: Rig, fault: str) -> None:
    """Whatever it left half done is put right: a known state after each step, and the content at the end."""
    worker = rig.start()
    job = rig.job(worker)
    misbehave(rig.device, fault)
    kinds = []
    for step in (rig.out, rig.back):
        try:
            await step(job, deadline_s=1.0 if fault.startswith("lock") else DEADLINE_S)
        except BackendError as error:
            kinds.append(error.kind)
            break
    assert (await rig.backend.probe(job)).state is not Residency.FAULTED
    assert kinds in ([], [FaultKind.TRANSIENT])
    behave(rig.device)
    if (await rig.backend.probe(job)).state is Residency.SUSPENDED:
        await rig.backend.restore(job, ALL, deadline_s=DEADLINE_S)
    await rig.backend.release(job, deadline_s=DEADLINE_S)
    assert (await rig.backend.probe(job)).state is Residency.RESIDENT
    assert worker.content_is_intact()


async def test_a_restore_that_fails_is_not_tried_again(make_rig: MakeRig) -> None:
    """G07: a second try could cost the driver its senses; the copy stays, and the tool's words are told."""
    rig = make_rig("arena")
    job = rig.job(rig.start())
    await rig.out(job)
    misbehave(rig.device, "restore:poison")
    with pytest.raises(BackendError, match="out of memory"):  # the first failure's text, not the later ones'
        await rig.backend.restore(job, ALL, deadline_s=DEADLINE_S)
    assert (await rig.backend.probe(job)).state is Residency.SUSPENDED


async def test_only_the_devices_of_the_group_are_touched(make_rig: MakeRig, second_device: Device) -> None:
    """F04: one process with two roles: the trainer's memory leaves, the sampler's stays and can be used."""
    rig = make_rig("arena")
    worker = rig.start()
    worker.process.call("arena", second_device.path)
    both = worker.process.call("allocate", MIB, 2, 1)
    await rig.out(rig.job(worker))
    assert (rig.device.used_bytes(), second_device.used_bytes()) == (0, MIB)
    assert worker.answers()
    await rig.back(rig.job(worker))
    assert worker.process.call("digest") == both


async def test_a_few_pages_are_a_bare_context(make_rig: MakeRig) -> None:
    """F01: less than 64 KiB on the device is no state; that much is."""
    rig = make_rig("arena")
    bare, small = rig.start("a", nbytes=60 << 10), rig.start("b", nbytes=64 << 10)
    assert (await rig.backend.probe(rig.job(bare))).state is Residency.ABSENT
    assert (await rig.backend.probe(rig.job(small, name="b"))).state is Residency.RESIDENT


def test_without_a_device_there_is_no_arena_backend() -> None:
    """The message says how to give it one."""
    with pytest.raises(BackendError, match="--emulate g=") as caught:
        ArenaBackend(Context(group="g", node="n1"))
    assert caught.value.kind is FaultKind.UNSUPPORTED


async def test_health_names_a_device_that_is_gone(tmp_path: Path) -> None:
    """After a reboot, say: which one, and what to do."""
    (complaint,) = await ArenaBackend(Context(group="g", node="n1", devices=(tmp_path,))).health()
    assert str(tmp_path) in complaint
