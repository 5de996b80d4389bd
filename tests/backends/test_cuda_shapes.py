"""Which processes the ``cuda`` backend moves, which it leaves alone, and which it refuses untouched."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.backends.conftest import ALL, DEADLINE_S, MIB
from tests.backends.cuda_rig import FIRST, SECOND, SIZE, THIRD, CudaRig, cuda
from timeslice.arena.process import start_time_of
from timeslice.backends.base import DeviceMemory
from timeslice.backends.cuda_memory import Placement, number_of, shortage
from timeslice.errors import BackendError, FaultKind
from timeslice.models import Residency, Target

__all__ = ["cuda"]


async def test_a_process_without_a_context_is_left_alone(cuda: CudaRig) -> None:
    """G14: a parent that only counted devices is no part of the move; its child is."""
    parent, child = cuda.start(0), cuda.start()
    job = cuda.job(parent, child)
    await cuda.out(job)
    assert cuda.states() == ["", "checkpointed"]
    assert (await cuda.backend.probe(job)).state is Residency.SUSPENDED
    await cuda.back(job)
    assert parent.call("ping") == parent.pid


async def test_a_process_with_nothing_on_the_device_is_left_alone(cuda: CudaRig) -> None:
    """G14: it has a context that takes no memory: never locked, and the job counts as out without it."""
    empty, full = cuda.start(0), cuda.start()
    empty.call("context")
    job = cuda.job(empty, full)
    await cuda.out(job)
    assert cuda.states() == ["running", "checkpointed"]
    assert (await cuda.backend.probe(job)).state is Residency.SUSPENDED
    await cuda.back(job)
    assert cuda.states() == ["running", "running"]


async def test_a_context_that_takes_memory_moves_like_any_state(cuda: CudaRig) -> None:
    """On a GPU each context takes some: left behind, it would be missing for the next job."""
    cuda.node.set("context-bytes", MIB)
    worker = cuda.start(0)
    worker.call("context")
    job = cuda.job(worker)
    assert (await cuda.out(job)).freed_bytes == MIB
    assert cuda.node.used() == 0
    await cuda.back(job)
    assert cuda.node.used(FIRST) == MIB


async def test_memory_without_figures_moves_all_the_same(cuda: CudaRig) -> None:
    """G14: where the driver tells no bytes of any process ("no value"), those that it lists are the job's state."""
    worker = cuda.start()
    digest, job = worker.call("digest"), cuda.job(worker)
    cuda.node.set("novalue", 1)
    assert (await cuda.backend.probe(job)).state is Residency.RESIDENT
    assert (await cuda.out(job)).freed_bytes == SIZE
    assert cuda.states() == ["checkpointed"]
    await cuda.back(job)
    assert worker.call("digest") == digest


async def test_who_left_is_who_comes_back(cuda: CudaRig) -> None:
    """What is out is listed nowhere: a new agent brings back exactly what the old one moved, and no other process."""
    first, second, other = cuda.start(), cuda.start(), cuda.start()
    await cuda.out(cuda.job(first, second))
    cuda.restart()
    await cuda.back(cuda.job(first, second))
    assert cuda.states() == ["running"] * 3
    assert other.call("ping") == other.pid


@pytest.mark.parametrize("flag", ["uvm", "ipc"])
async def test_memory_that_can_not_be_moved_is_refused_from_the_first_failure_on(cuda: CudaRig, flag: str) -> None:
    """G37: the tool finds it only in the act: the job runs on, and the next prepare refuses without a touch."""
    worker = cuda.start(flags=flag)
    job = cuda.job(worker)
    await cuda.backend.prepare(job, ALL, deadline_s=DEADLINE_S)
    with pytest.raises(BackendError, match="unified memory") as caught:
        await cuda.backend.suspend(job, ALL, deadline_s=DEADLINE_S)
    assert caught.value.kind is FaultKind.UNSUPPORTED
    assert cuda.states() == ["running"]
    cuda.node.set("lock-fails")  # would be met by whoever tries
    error = await cuda.refused(job, "unified memory")
    assert error.kind is FaultKind.UNSUPPORTED
    other = cuda.start()
    cuda.node.clear("lock-fails")
    await cuda.out(cuda.job(other))  # only that process is refused
    await cuda.refused(job, "unified memory")


async def test_what_only_root_could_is_not_held_against_a_process(
    cuda: CudaRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver's text is the same for a lack of rights: an agent that is not root remembers nothing."""
    worker = cuda.start(flags="uvm")
    job = cuda.job(worker)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(BackendError, match="Nor can anything by an agent that is not root"):
        await cuda.out(job)
    await cuda.backend.prepare(job, ALL, deadline_s=DEADLINE_S)
    assert cuda.states() == ["locked"]


async def test_ipc_memory_moves_with_a_driver_that_can(cuda: CudaRig) -> None:
    """G37: nothing is refused on suspicion."""
    cuda.node.set("driver", 610)
    worker = cuda.start(flags="ipc")
    await cuda.out(cuda.job(worker))
    assert cuda.states() == ["checkpointed"]


async def test_several_devices_need_a_driver_with_device_maps(cuda: CudaRig) -> None:
    """G37: driver 570 can't be told which device is which, so a process on two is refused at prepare; 580 moves it."""
    worker = cuda.start()
    worker.call("allocate", SIZE, 9, 1)
    digest, job = worker.call("digest"), cuda.job(worker)
    cuda.node.set("driver", 570)
    error = await cuda.refused(job, "2 devices.*driver 580")
    assert error.kind is FaultKind.UNSUPPORTED
    cuda.node.set("driver", 580)
    cuda.restart()
    await cuda.out(job)
    await cuda.back(job)
    assert (cuda.node.used(FIRST), cuda.node.used(SECOND)) == (SIZE, SIZE)
    assert worker.call("digest") == digest


@pytest.mark.parametrize("lost", [False, True])
async def test_several_devices_come_back_by_a_map_and_without_one(cuda: CudaRig, lost: bool) -> None:
    """The map names every device. One that the driver refuses, because the process sees others than we do, is left
    out."""
    worker = cuda.start()
    worker.call("allocate", SIZE, 9, 1)
    job = cuda.job(worker)
    await cuda.out(job)
    if lost:
        cuda.node.set("nvml_lost", THIRD)
    log = cuda.node.folder / "maps"
    await cuda.back(job)
    assert log.read_text().splitlines() == [
        f"{FIRST}={FIRST},{SECOND}={SECOND}" + ("" if lost else f",{THIRD}={THIRD}")
    ]
    assert (cuda.node.used(FIRST), cuda.node.used(SECOND)) == (SIZE, SIZE)


async def test_a_process_on_a_device_of_others_is_refused(cuda: CudaRig) -> None:
    """G37: moving it would take memory from a device that the group does not have."""
    worker = cuda.start()
    worker.call("allocate", MIB, 9, 2)
    error = await cuda.refused(cuda.job(worker), f"also computes on {THIRD}")
    assert error.kind is FaultKind.UNSUPPORTED


async def test_a_thread_is_no_process(cuda: CudaRig) -> None:
    """The tool takes the number of a thread and hits its process: so does nobody here."""
    worker = cuda.start()
    thread = worker.call("thread")
    cuda.node.write(thread, *cuda.node.read(worker.pid))
    named = cuda.job(worker, pid=thread, start=start_time_of(thread))
    error = await cuda.refused(named, f"a thread of process {worker.pid}")
    assert error.kind is FaultKind.UNSUPPORTED


async def test_memory_that_the_tool_knows_nothing_of_is_told(cuda: CudaRig) -> None:
    """G27: NVML lists the process and the tool finds no context: never taken for a job without state."""
    worker = cuda.start()
    job = cuda.job(worker)
    cuda.node.set("no-restore-thread")
    with pytest.raises(BackendError, match=r"has \d+ bytes on .*no CUDA context.*as root, in the host's PID"):
        await cuda.backend.probe(job)


def test_numbers_of_the_driver_are_ours_or_the_containers(tmp_path: Path) -> None:
    """G27: a process is known by its number here; by its number inside its container only where nobody here has it."""
    target = Target(job="a", host="n1", pid=70, start=1, uid=os.getuid(), pid_namespace="")
    (tmp_path / "70").mkdir()
    (tmp_path / "70" / "status").write_bytes(b"Name:\tx\xd0\nNSpid:\t70\t7\n")  # names are cut within a character
    assert number_of(target, {70, 7}, tmp_path) == 70
    assert number_of(target, {7}, tmp_path) == 7
    (tmp_path / "7").mkdir()
    assert number_of(target, {7}, tmp_path) == 70


def test_what_came_back_is_compared_device_by_device() -> None:
    """A part on another device is as wrong as all of it; a little less is not, nor is what nobody can tell."""
    before = {FIRST: 100, SECOND: 100}
    assert Placement.compare(7, before, {FIRST: 100, SECOND: 95}).missing == ()
    assert Placement.compare(7, before, {FIRST: None, SECOND: None}).missing == ()
    assert Placement.compare(7, {FIRST: None}, {FIRST: 3}).missing == ()
    found = Placement.compare(7, before, {FIRST: 60, SECOND: 140})
    assert str(found) == f"process 7 has 60 of 100 bytes on {FIRST}, but 140 bytes on {SECOND}"
    assert Placement.compare(7, before, {SECOND: 100}).elsewhere == ()


def test_what_is_left_of_a_process_is_no_obstacle_to_itself() -> None:
    """G33: a process that is out may still hold a part; all others count with what they hold."""
    device = DeviceMemory(device=FIRST, total_bytes=100, free_bytes=50, holders=((7, 30), (8, 20)))
    assert shortage([device], [{FIRST: 80}], {7}) == ""
    assert shortage([device], [{FIRST: 81}], {7}).startswith(f"device {FIRST}: 81 bytes needed, 50 free")
    assert "process 7 holds 30; process 8 holds 20" in shortage([device], [{FIRST: 80}], set())


def test_an_unknown_driver_is_refused(cuda: CudaRig) -> None:
    """The words that there are, are in the fault."""
    with pytest.raises(BackendError, match=r"driver=gpu is neither cli .* nor api"):
        cuda.restart(driver="gpu")
