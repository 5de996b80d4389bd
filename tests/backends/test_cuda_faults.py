"""What cuda-checkpoint and the driver are known to do wrong, injected into stand-ins for them."""

from __future__ import annotations

import asyncio
import os
import shutil

import psutil
import pytest

from tests.backends.conftest import ALL, DEADLINE_S, MIB
from tests.backends.cuda_rig import FIRST, SECOND, SIZE, CudaRig, cuda
from tests.support.jobs import wait_until
from timeslice.backends.base import Job
from timeslice.backends.calls import Calls
from timeslice.errors import BackendError, FaultKind
from timeslice.models import Residency, Target

__all__ = ["cuda"]


async def test_a_lock_that_fails_now_and_then_is_tried_again(cuda: CudaRig) -> None:
    """F03: every third lock says "initialization error" of a process that has a context: all swaps complete."""
    cuda.node.set("lock-fails", "every:3")
    worker = cuda.start()
    digest = worker.call("digest")
    for _ in range(6):
        await cuda.out(cuda.job(worker))
        assert cuda.states() == ["checkpointed"]
        await cuda.back(cuda.job(worker))
    assert worker.call("digest") == digest
    assert "lock-fails.count=8" in cuda.faults()  # six that worked, and two that did not


async def test_a_lock_that_always_fails_leaves_all_running(cuda: CudaRig) -> None:
    """G04: the tool's own text is in the fault, and no process stays locked."""
    cuda.node.set("lock-fails")
    job = cuda.job(cuda.start(), cuda.start())
    with pytest.raises(BackendError, match=r'Could not lock on process ID \d+: "initialization error"') as caught:
        await cuda.backend.prepare(job, ALL, deadline_s=0.5)
    assert caught.value.kind is FaultKind.TRANSIENT
    assert cuda.states() == ["running", "running"]


async def test_a_lock_that_does_not_end_is_never_killed(cuda: CudaRig) -> None:
    """The fault says so; nothing else is started on the process meanwhile; once the lock ends it is undone."""
    cuda.node.set("lock-hangs")
    job = cuda.job(cuda.start())
    with pytest.raises(BackendError, match="must not be killed") as caught:
        await cuda.backend.prepare(job, ALL, deadline_s=0.5)
    assert caught.value.kind is FaultKind.POISONED
    assert (await cuda.backend.probe(job)).state is Residency.FAULTED
    (tool,) = [child for child in psutil.Process().children() if child.name() == "cuda-checkpoint"]
    assert os.getsid(tool.pid) == tool.pid  # so that no Ctrl-C at the agent's terminal reaches it
    cuda.node.clear("lock-hangs")
    wait_until(lambda: cuda.states() == ["locked"], "the lock ended by itself")
    await cuda.backend.abort(job, deadline_s=DEADLINE_S)
    assert cuda.states() == ["running"]


async def test_ranks_that_wait_for_each_other_are_locked_together(cuda: CudaRig) -> None:
    """C14: while some ranks are locked the others tell not even their state. Once all were looked at, all locks
    go out at once, and it works."""
    cuda.node.set("siblings-hang")
    workers = [cuda.start(MIB, flags="nccl") for _ in range(3)]
    cuda.node.set("slow", workers[2].pid)  # whoever looks at it once the locks are under way waits for ever
    await cuda.out(cuda.job(*workers))
    assert cuda.states() == ["checkpointed"] * 3
    await cuda.back(cuda.job(*workers))
    assert cuda.states() == ["running"] * 3


async def test_a_rank_that_nobody_registered_can_not_block_the_others_for_ever(cuda: CudaRig) -> None:
    """C14: the lock of the ranks that are known can't end; inside the deadline they are let go."""
    cuda.node.set("siblings-hang")
    known, _ = cuda.start(flags="nccl"), cuda.start(flags="nccl")
    with pytest.raises(BackendError, match="device not ready") as caught:
        await cuda.backend.prepare(cuda.job(known), ALL, deadline_s=1.0)
    assert caught.value.kind is FaultKind.TRANSIENT
    assert cuda.states() == ["running", "running"]


async def test_copies_are_made_one_process_at_a_time(cuda: CudaRig) -> None:
    """Two checkpoints or restores at once may wait for each other for ever: on the way out, back, and in an undo."""
    cuda.node.set("parallel-deadlocks")
    workers = [cuda.start(MIB) for _ in range(3)]
    job = cuda.job(*workers)
    await cuda.out(job)
    await cuda.back(job)
    await cuda.backend.prepare(job, ALL, deadline_s=DEADLINE_S)
    cuda.node.set("checkpoint-fails", "every:3")
    with pytest.raises(BackendError, match="unknown error"):
        await cuda.backend.suspend(job, ALL, deadline_s=DEADLINE_S)
    assert cuda.states() == ["running"] * 3


async def test_a_failed_checkpoint_is_undone_and_the_rest_is_not_tried(cuda: CudaRig) -> None:
    """G04: the second of three fails: the first comes back, the third never left."""
    workers = [cuda.start(MIB) for _ in range(3)]
    digests = [worker.call("digest") for worker in workers]
    cuda.node.set("checkpoint-fails", "every:2")
    await cuda.backend.prepare(cuda.job(*workers), ALL, deadline_s=DEADLINE_S)
    with pytest.raises(BackendError, match="Could not checkpoint"):
        await cuda.backend.suspend(cuda.job(*workers), ALL, deadline_s=DEADLINE_S)
    assert "checkpoint-fails.count=2" in cuda.faults()
    assert cuda.states() == ["running"] * 3
    assert [worker.call("digest") for worker in workers] == digests


@pytest.mark.parametrize(("how", "freed"), [("nothing", 0), ("half", SIZE // 2)])
async def test_what_a_checkpoint_did_not_free_is_measured(cuda: CudaRig, how: str, freed: int) -> None:
    """G06: the tool says success; the outcome and the devices tell what was freed, and not what was promised."""
    cuda.node.set("checkpoint-frees", how)
    job = cuda.job(cuda.start())
    outcome = await cuda.out(job)
    assert outcome.freed_bytes == freed
    assert cuda.backend.capabilities().freed_share == 0.99
    probe = await cuda.backend.probe(job)
    assert (probe.state, probe.device_bytes) == (Residency.SUSPENDED, SIZE - freed)


async def test_memory_that_is_freed_late_is_seen_once_it_is(cuda: CudaRig) -> None:
    """G06: the devices are asked each time."""
    cuda.node.set("checkpoint-frees", "late:0.3")
    await cuda.out(cuda.job(cuda.start()))

    memory = await cuda.backend.memory()
    while memory[0].free_bytes < 8 * MIB:
        memory = await cuda.backend.memory()
    assert [each.free_bytes for each in memory] == [8 * MIB, 8 * MIB]


async def test_a_restore_without_room_is_not_even_tried(cuda: CudaRig) -> None:
    """G07: one that fails spoils the driver for good, here as there. The fault names who holds how much."""
    worker = cuda.start(6 * MIB)
    digest, job = worker.call("digest"), cuda.job(worker)
    await cuda.out(job)
    squatter = cuda.start(3 * MIB)
    with pytest.raises(BackendError, match=f"process {squatter.pid} holds {3 * MIB}") as caught:
        await cuda.backend.restore(job, ALL, deadline_s=DEADLINE_S)
    assert caught.value.kind is FaultKind.TRANSIENT
    assert "poisoned" not in cuda.faults()
    squatter.end()
    await cuda.back(job)
    assert worker.call("digest") == digest


async def test_a_folder_that_can_not_be_written_costs_nothing(cuda: CudaRig) -> None:
    """P5: without its footprint nothing leaves, and without the word of what it works on no tool is started."""
    worker = cuda.start()
    job = cuda.job(worker)
    await cuda.backend.prepare(job, ALL, deadline_s=DEADLINE_S)
    target = job.targets[0]
    (cuda.folder / "marks" / f"{target.pid}-{target.start}.new").mkdir()  # as good as a full disk, for root too
    with pytest.raises(BackendError, match=r"can't be written to .*Is a directory") as caught:
        await cuda.backend.suspend(job, ALL, deadline_s=DEADLINE_S)
    assert caught.value.kind is FaultKind.TRANSIENT
    assert cuda.states() == ["running"]
    shutil.rmtree(cuda.folder / "marks")
    error = await cuda.refused(job, "calls can't be written: No such file")
    assert error.kind is FaultKind.UNSUPPORTED


async def test_a_job_of_which_only_a_part_fits_is_not_begun(cuda: CudaRig) -> None:
    """G07: the room is counted for all of its processes before the first one comes back."""
    workers = [cuda.start(3 * MIB), cuda.start(3 * MIB)]
    job = cuda.job(*workers)
    await cuda.out(job)
    squatter = cuda.start(4 * MIB)
    cuda.node.set("restore-fails", "every:100")  # counts the tries
    with pytest.raises(BackendError, match=f"{6 * MIB} bytes needed, {4 * MIB} free; process {squatter.pid} holds"):
        await cuda.backend.restore(job, ALL, deadline_s=DEADLINE_S)
    assert "restore-fails.count" not in cuda.faults()


async def test_a_process_that_dies_while_it_is_copied_is_no_fault(cuda: CudaRig) -> None:
    """F02: a job ends within its own suspend: that ends as gone, its peer leaves, and the device is free for others."""
    dying, peer = cuda.start(MIB), cuda.start(MIB)
    job, digest = cuda.job(dying, peer), peer.call("digest")
    await cuda.backend.prepare(job, ALL, deadline_s=DEADLINE_S)
    cuda.node.set("copy-takes", "1")
    leaving = asyncio.ensure_future(cuda.backend.suspend(job, ALL, deadline_s=DEADLINE_S))
    calls = Calls(cuda.folder / "marks" / "calls")
    while not calls.works_on(job.targets[0]) or "locked" not in cuda.states()[0]:
        await asyncio.sleep(0.01)
    dying.end()
    await leaving
    assert (await cuda.backend.probe(job)).state is Residency.SUSPENDED
    assert cuda.node.used() == 0
    await cuda.back(cuda.job(peer))
    assert peer.call("digest") == digest
    await cuda.out(cuda.job(peer))
    assert len(list((cuda.folder / "marks").glob("[0-9]*"))) == 1  # nothing is kept of who is gone


async def test_without_a_footprint_only_empty_devices_are_restored_into(cuda: CudaRig) -> None:
    """G07: the agent's folder was lost: how much comes back is not known, so nobody else may be there."""
    worker = cuda.start()
    await cuda.out(cuda.job(worker))
    squatter = cuda.start(MIB, device=1)
    shutil.rmtree(cuda.folder / "marks")
    cuda.restart()
    with pytest.raises(BackendError, match=f"process {squatter.pid} holds {MIB} on {SECOND}"):
        await cuda.backend.restore(cuda.job(worker), ALL, deadline_s=DEADLINE_S)
    squatter.end()
    await cuda.back(cuda.job(worker))
    assert cuda.states()[0] == "running"


async def test_a_restore_to_the_wrong_device_is_a_fault_and_undone(cuda: CudaRig) -> None:
    """Both devices are named; the job is off the devices again, and comes back once the driver does it right."""
    worker = cuda.start()
    digest, job = worker.call("digest"), cuda.job(worker)
    await cuda.out(job)
    cuda.node.set("restore-lands", SECOND)
    with pytest.raises(BackendError, match=f"of {SIZE} bytes on {FIRST}, but {SIZE} bytes on {SECOND}") as caught:
        await cuda.backend.restore(job, ALL, deadline_s=DEADLINE_S)
    assert caught.value.kind is FaultKind.TRANSIENT
    assert cuda.states() == ["checkpointed"]
    cuda.node.set("restore-lands", FIRST)
    await cuda.back(job)
    assert cuda.node.used(FIRST) == SIZE
    assert worker.call("digest") == digest


async def test_an_undo_by_toggle_touches_only_who_came_back(cuda: CudaRig) -> None:
    """Driver 550 knows no lock: a process that ran all along would be toggled out by it."""
    cuda.node.set("driver", 550)
    bystander, worker = cuda.start(0), cuda.start()
    bystander.call("context")
    job = cuda.job(bystander, worker)
    await cuda.out(job)
    assert cuda.states() == ["running", "checkpointed"]
    cuda.node.set("restore-lands", SECOND)
    with pytest.raises(BackendError, match=SECOND):
        await cuda.backend.restore(job, ALL, deadline_s=DEADLINE_S)
    assert cuda.states() == ["running", "checkpointed"]


async def test_a_restore_that_fails_is_not_tried_twice_by_itself(cuda: CudaRig) -> None:
    """The copy is intact; the next restore brings it back."""
    worker = cuda.start()
    digest = worker.call("digest")
    await cuda.out(cuda.job(worker))
    cuda.node.set("restore-fails", "once")
    with pytest.raises(BackendError, match="Could not restore"):
        await cuda.backend.restore(cuda.job(worker), ALL, deadline_s=DEADLINE_S)
    assert cuda.states() == ["checkpointed"]
    await cuda.back(cuda.job(worker))
    assert worker.call("digest") == digest


async def test_an_unlock_that_fails_once_is_tried_again(cuda: CudaRig) -> None:
    """No job stays locked for a passing fault."""
    job = cuda.job(cuda.start())
    await cuda.out(job)
    cuda.node.set("unlock-fails", "once")
    await cuda.back(job)
    assert cuda.states() == ["running"]


async def test_a_state_that_can_not_be_read_once_is_read_again(cuda: CudaRig) -> None:
    """A passing fault of a look is none of the job."""
    job = cuda.job(cuda.start())
    cuda.node.set("get-state-fails", "once")
    assert (await cuda.backend.probe(job)).state is Residency.RESIDENT
    assert "get-state-fails" not in cuda.faults()


async def test_a_process_that_the_driver_gave_up_is_poisoned(cuda: CudaRig) -> None:
    """State "failed": nobody may believe anything of it, nor touch it."""
    worker = cuda.start()
    lines = [line for line in cuda.node.read(worker.pid) if not line.startswith("state")]
    cuda.node.write(worker.pid, "state failed", *lines)
    assert (await cuda.backend.probe(cuda.job(worker))).state is Residency.FAULTED
    error = await cuda.refused(cuda.job(worker), "end it")
    assert error.kind is FaultKind.POISONED


async def test_a_measurement_that_fails_behind_the_copy_undoes_it(cuda: CudaRig) -> None:
    """P5: the devices can't be asked just then: a suspend that failed leaves the job running where it was."""
    worker = cuda.start()
    digest, job = worker.call("digest"), cuda.job(worker)
    await cuda.backend.prepare(job, ALL, deadline_s=DEADLINE_S)
    cuda.node.set("checkpoint-then", "nvml_fails:once")
    with pytest.raises(BackendError, match="measuring"):
        await cuda.backend.suspend(job, ALL, deadline_s=DEADLINE_S)
    assert cuda.states() == ["running"]
    assert worker.call("digest") == digest
    assert (await cuda.out(job)).freed_bytes == SIZE


async def test_an_undo_that_can_not_measure_the_room_restores_nothing(cuda: CudaRig) -> None:
    """G07: it stays out with its copy, and the fault says both; once the devices answer it comes back."""
    worker = cuda.start()
    digest, job = worker.call("digest"), cuda.job(worker)
    await cuda.backend.prepare(job, ALL, deadline_s=DEADLINE_S)
    cuda.node.set("checkpoint-then", "nvml_fails:always")
    with pytest.raises(BackendError, match="putting it back failed: measuring") as caught:
        await cuda.backend.suspend(job, ALL, deadline_s=DEADLINE_S)
    assert caught.value.kind is FaultKind.POISONED
    assert cuda.states() == ["checkpointed"]
    cuda.node.clear("nvml_fails")
    await cuda.back(job)
    assert worker.call("digest") == digest


async def test_a_checkpoint_that_spoils_its_process_is_never_taken_for_undone(cuda: CudaRig) -> None:
    """G04: the driver gave one of two up: the other one runs on, and nobody may believe that the job does."""
    first, second = cuda.start(MIB), cuda.start(MIB)
    digest, job = first.call("digest"), cuda.job(first, second)
    await cuda.backend.prepare(job, ALL, deadline_s=DEADLINE_S)
    cuda.node.set("checkpoint-spoils", "every:2")
    with pytest.raises(BackendError, match=f"gave process {second.pid} up; end it") as caught:
        await cuda.backend.suspend(job, ALL, deadline_s=DEADLINE_S)
    assert caught.value.kind is FaultKind.POISONED
    assert cuda.states() == ["running", "failed"]
    assert first.call("digest") == digest


async def test_a_process_that_ends_while_it_is_looked_at_is_no_fault(
    cuda: CudaRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F02: the driver listed it, and it has ended when the tool is asked: it is gone, and its peer leaves."""
    dying, peer = cuda.start(MIB), cuda.start(MIB)
    job, listing = cuda.job(dying, peer), cuda.backend._listing

    async def then_it_ends() -> object:
        found = await listing()
        dying.end()
        return found

    monkeypatch.setattr(cuda.backend, "_listing", then_it_ends)
    await cuda.out(job)
    assert cuda.states() == ["", "checkpointed"]


async def test_a_process_that_ends_behind_its_restore_is_no_fault(
    cuda: CudaRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F02: it is on no device because it is gone, not because the driver put it elsewhere: its peer runs on."""
    dying, peer = cuda.start(MIB), cuda.start(MIB)
    job, digest, do = cuda.job(dying, peer), peer.call("digest"), cuda.backend.do
    await cuda.out(job)

    async def then_it_ends(job: Job, target: Target, action: str, until: float) -> None:
        await do(job, target, action, until)
        if (action, target.pid) == ("restore", dying.pid):
            dying.end()

    monkeypatch.setattr(cuda.backend, "do", then_it_ends)
    await cuda.back(job)
    assert cuda.states() == ["", "running"]
    assert peer.call("digest") == digest
