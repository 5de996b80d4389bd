"""What happens between two steps of an operator: the moments that a test has to bring about on purpose."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.arena.conftest import MIB, DeviceMaker, JobProcess, process_state, wait_until
from timeslice.arena import operations, transfer
from timeslice.arena.errors import ArenaBusyError
from timeslice.arena.process import HeldProcess

StartJob = Callable[..., JobProcess]


def thread_states(pid: int) -> set[str]:
    return {(task / "stat").read_text().rsplit(")", 1)[1].split()[0] for task in Path(f"/proc/{pid}/task").iterdir()}


def rights_at(pid: int, address: int) -> list[str]:
    rows = [row.split() for row in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    spans = [([int(x, 16) for x in row[0].split("-")], row[1]) for row in rows]
    return [rights for (start, end), rights in spans if start <= address < end]


def test_locked_means_every_thread_stands_still(make_device: DeviceMaker, start_job: StartJob) -> None:
    """When lock returns, no thread of a busy process runs any more."""
    job = start_job(make_device())
    job.spin(4)
    for _ in range(20):
        operations.lock(job.pid)
        assert thread_states(job.pid) == {"T"}
        operations.unlock(job.pid)


def test_continued_during_the_copy(
    make_device: DeviceMaker, start_job: StartJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy during which somebody continued the process is not believed; the device's content still counts."""
    device = make_device()
    job = start_job(device)
    view = job.allocate(MIB)
    digest = job.fill(view, 1)
    operations.lock(job.pid)

    def continued(*_: object) -> int:
        os.kill(job.pid, signal.SIGCONT)
        wait_until(lambda: process_state(job.pid) != "T", "it runs")
        return 0

    with monkeypatch.context() as patch:
        patch.setattr(operations, "copy_all", continued)
        with pytest.raises(ArenaBusyError, match="continued process"):
            operations.checkpoint(job.pid)
    assert (operations.get_state(job.pid), device.used_bytes()) == ("locked", MIB)
    operations.checkpoint(job.pid)
    operations.restore(job.pid)
    operations.unlock(job.pid)
    assert job.digest(view) == digest


def test_arena_made_during_the_lock(
    make_device: DeviceMaker, start_job: StartJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An arena that appears between the look and the stop makes the lock fail as busy; the next one has it too."""
    device = make_device()
    job = start_job(device)
    real_stop = HeldProcess.stop

    def late_stop(self: HeldProcess, timeout: float) -> None:
        job.allocate(MIB, job.arena(device.path))
        real_stop(self, timeout)

    with monkeypatch.context() as patch:
        patch.setattr(HeldProcess, "stop", late_stop)
        with pytest.raises(ArenaBusyError, match="made an arena just now"):
            operations.lock(job.pid)
    assert job.state() == "running"
    operations.lock(job.pid)
    operations.checkpoint(job.pid)
    assert device.used_bytes() == 0


def test_target_that_dies_in_mid_operation(
    make_device: DeviceMaker, start_job: StartJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that is killed during its checkpoint is reported as gone, and holds nothing afterwards."""
    from timeslice.arena.errors import TargetGoneError

    device = make_device()
    job = start_job(device)
    job.allocate(MIB)
    operations.lock(job.pid)
    real_copy = transfer.copy_all

    def dies(*arguments: object) -> int:
        job.process.kill()
        job.process.wait()
        return real_copy(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(operations, "copy_all", dies)
    with pytest.raises(TargetGoneError):
        operations.checkpoint(job.pid)
    assert device.used_bytes() == 0


def test_addresses_stay_taken_in_a_forked_child(make_device: DeviceMaker, start_job: StartJob) -> None:
    """In a forked child nothing else can come to lie where the parent's device memory was."""
    job = start_job(make_device())
    address = job.address(job.allocate(MIB))
    child = job.fork()
    try:
        wait_until(lambda: rights_at(child, address) == ["---p"], "the child runs and has blocked the addresses")
    finally:
        os.kill(child, signal.SIGKILL)
