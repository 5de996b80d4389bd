"""Memory that its process has sealed: copied out once, later only dropped; from inside and from outside."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest

from tests.arena.conftest import MIB, DeviceMaker, JobProcess, Tool
from timeslice.arena import Arena, Device
from timeslice.arena.errors import ArenaStateError
from timeslice.errors import UsageError

StartJob = Callable[..., JobProcess]
STATIC, MOVING = 4 * MIB, 2 * MIB


def _job(start_job: StartJob, device: Device) -> tuple[JobProcess, list[str]]:
    """A job with a sealed piece 0 and a piece 1 that changes; the digests of both."""
    job = start_job(device)
    job.allocate(STATIC)
    job.allocate(MOVING)
    digests = [job.fill(0, 1), job.fill(1, 2)]
    job.seal(0)
    return job, digests


def _digests(job: JobProcess) -> list[str]:
    return [job.digest(0), job.digest(1)]


def test_it_is_copied_once_and_then_only_dropped(device: Device, start_job: StartJob) -> None:
    """The device is as free as ever, the content the same; what was not copied is told."""
    job, digests = _job(start_job, device)
    assert (job.suspend(), job.saved()) == (STATIC + MOVING, 0)
    for seed in (3, 4):
        job.resume()
        assert _digests(job) == digests
        digests[1] = job.fill(1, seed)
        assert (job.suspend(), job.saved()) == (MOVING, STATIC)
        assert device.used_bytes() == 0
    job.resume()
    assert _digests(job) == digests


def test_the_tool_knows_it_too(device: Device, start_job: StartJob, tool: Tool) -> None:
    """From outside, and in turns with the inside, it is one and the same copy."""
    job, digests = _job(start_job, device)
    tool.act(job.pid, "lock", "checkpoint", "restore", "unlock")
    digests[1] = job.fill(1, 3)
    assert (job.suspend(), job.saved()) == (MOVING, STATIC)
    tool.act(job.pid, "restore", "unlock")
    assert _digests(job) == digests


def test_a_write_to_it_kills(device: Device, start_job: StartJob) -> None:
    """A change that the next suspend would lose must not go unnoticed."""
    job, _ = _job(start_job, device)
    job.suspend()
    job.resume()
    job.write(1, 7)
    job.ask("write", 0, 7)
    assert job.process.wait() == -signal.SIGSEGV
    assert device.used_bytes() == 0


def test_unsealed_it_may_change_and_is_copied_again(device: Device, start_job: StartJob) -> None:
    """What is written after that comes back, not the older copy."""
    job, digests = _job(start_job, device)
    job.suspend()
    job.resume()
    job.unseal(0)
    digests[0] = job.fill(0, 5)
    assert (job.suspend(), job.saved()) == (STATIC + MOVING, 0)
    job.resume()
    assert _digests(job) == digests
    assert (job.suspend(), job.saved()) == (STATIC + MOVING, 0)


def test_without_its_copy_it_is_copied_again(device: Device, start_job: StartJob) -> None:
    """`trim` gives the host memory back, of sealed memory too."""
    job, digests = _job(start_job, device)
    job.suspend()
    job.resume()
    assert job.trim() == STATIC + MOVING
    assert (job.suspend(), job.saved()) == (STATIC + MOVING, 0)
    job.resume()
    assert _digests(job) == digests


@pytest.mark.parametrize("step", ["begun", "half", "copied", "recorded", "freed"])
@pytest.mark.parametrize("cycles", [0, 1], ids=["before the first copy", "with a copy"])
def test_an_operator_killed_in_between_costs_no_content(
    make_device: DeviceMaker, start_job: StartJob, tool: Tool, step: str, cycles: int
) -> None:
    """A copy that was half made is not believed, and one that is whole is not lost."""
    device = make_device()
    job, digests = _job(start_job, device)
    for _ in range(cycles):
        tool.act(job.pid, "lock", "checkpoint", "restore", "unlock")
    tool.act(job.pid, "lock")
    killed = tool("--action", "checkpoint", "--pid", job.pid, TIMESLICE_ARENA_FAULTS=f"checkpoint:die={step}")
    assert killed.returncode == -signal.SIGKILL
    if tool.state(job.pid) == "locked":
        tool.act(job.pid, "unlock")
        job.unseal(0)
        digests[0] = job.fill(0, 6)
        job.seal(0)
        tool.act(job.pid, "lock", "checkpoint")
    tool.act(job.pid, "restore", "unlock")
    assert _digests(job) == digests
    assert (job.suspend(), job.saved()) == (MOVING, STATIC)
    job.resume()
    assert _digests(job) == digests


def test_only_memory_that_is_there_can_be_sealed(device: Device, start_job: StartJob) -> None:
    """Not while it is suspended, not another arena's, not what was freed."""
    with Arena(device) as arena:
        view = arena.allocate(MIB)
        arena.suspend()
        with pytest.raises(ArenaStateError, match="seal after its resume"):
            arena.seal(view)
        arena.resume()
        with pytest.raises(UsageError, match="not of this arena"):
            arena.seal(memoryview(bytearray(8)))
        arena.seal(view)
        arena.free(view)
        with pytest.raises(UsageError, match="freed already"):
            arena.unseal(view)
