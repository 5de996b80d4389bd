"""Processes that their user stopped, such as a holder that stood still past its lease: out and back all the same, and
never on a device that is not theirs."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.backends.conftest import ALL, DEADLINE_S
from tests.backends.cuda_rig import CudaRig, cuda
from tests.support.jobs import JobProcess, process_state, wait_until
from timeslice.errors import BackendError
from timeslice.models import Residency

__all__ = ["cuda"]


def stop(worker: JobProcess) -> None:
    os.kill(worker.pid, signal.SIGSTOP)
    wait_until(lambda: process_state(worker.pid) == "T", "stopped")


def content(cuda: CudaRig, worker: JobProcess) -> bytes:
    """Of its allocation, read past it: on the device or in its copy."""
    (block,) = (cuda.node.folder / "memory").glob(f"{worker.pid}-*")
    return block.read_bytes()[:8]


def switches(worker: JobProcess) -> list[str]:
    """How often it was let run."""
    lines = Path(f"/proc/{worker.pid}/status").read_text().splitlines()
    return [line for line in lines if "ctxt_switches" in line]


async def test_a_stopped_process_can_not_touch_the_device_once_it_is_locked(cuda: CudaRig, tmp_path: Path) -> None:
    """P2, L08: it has threads that write to the device all the time, and each call of the tool lets them run. From the
    lock to the release nothing of that arrives: not though it is continued by its user, not while another job is in."""
    worker = cuda.start()
    job, counter = cuda.job(worker), tmp_path / "counter"
    worker.call("scribble", str(counter))
    wait_until(lambda: counter.exists() and len(counter.read_bytes()) == 8, "it writes")
    worker.ask("stand_still")
    wait_until(lambda: process_state(worker.pid) == "T", "stopped")
    await cuda.backend.prepare(job, ALL, deadline_s=DEADLINE_S)
    assert process_state(worker.pid) == "T"
    locked = content(cuda, worker)
    await cuda.backend.suspend(job, ALL, deadline_s=DEADLINE_S)
    assert process_state(worker.pid) == "T"
    assert content(cuda, worker) == locked
    os.kill(worker.pid, signal.SIGCONT)
    worker.answer()
    assert worker.call("ping") == worker.pid  # it runs, and its threads meet the lock
    other = cuda.start()
    assert content(cuda, worker) == locked
    other.end()
    stop(worker)
    await cuda.backend.restore(job, ALL, deadline_s=DEADLINE_S)
    assert process_state(worker.pid) == "T"
    assert content(cuda, worker) == locked
    os.kill(worker.pid, signal.SIGCONT)
    assert worker.call("ping") == worker.pid
    assert content(cuda, worker) == locked
    await cuda.backend.release(job, deadline_s=DEADLINE_S)
    wait_until(lambda: content(cuda, worker) != locked, "it writes again")


async def test_a_stopped_process_that_does_not_tell_its_state_is_moved(cuda: CudaRig) -> None:
    """The driver may answer in a thread of the process: it is let run for the answer, and stands still again."""
    cuda.node.set("silent-while-stopped")
    worker = cuda.start()
    digest, job = worker.call("digest"), cuda.job(worker)
    stop(worker)
    assert (await cuda.backend.probe(job)).state is Residency.RESIDENT
    assert process_state(worker.pid) == "T"
    await cuda.out(job)
    assert (await cuda.backend.probe(job)).state is Residency.SUSPENDED
    await cuda.back(job)
    assert process_state(worker.pid) == "T"
    os.kill(worker.pid, signal.SIGCONT)
    assert worker.call("digest") == digest


async def test_a_look_leaves_a_stopped_process_alone_that_tells_its_state(
    cuda: CudaRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A probe changes nothing: it does not run in between."""
    monkeypatch.setattr("timeslice.backends.awake.HEAR_S", DEADLINE_S)  # however slow the tool is today
    worker = cuda.start()
    stop(worker)
    before = switches(worker)
    for _ in range(3):
        assert (await cuda.backend.probe(cuda.job(worker))).state is Residency.RESIDENT
    assert switches(worker) == before != []


async def test_a_stopped_process_is_not_stopped_again_under_a_call_that_goes_on(cuda: CudaRig) -> None:
    """The call could never end without the process."""
    cuda.node.set("lock-hangs")
    worker = cuda.start()
    job = cuda.job(worker)
    stop(worker)
    with pytest.raises(BackendError, match="must not be killed"):
        await cuda.backend.prepare(job, ALL, deadline_s=0.5)
    assert process_state(worker.pid) != "T"
    cuda.node.clear("lock-hangs")
    wait_until(lambda: cuda.states() == ["locked"], "the lock ended by itself")
    await cuda.backend.abort(job, deadline_s=DEADLINE_S)
    assert cuda.states() == ["running"]
