# ruff: noqa: ASYNC240 - a test may wait for its files
"""The process backend: real signals, marks that outlive the agent, page-out where there is swap."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.backends.conftest import ALL, DEADLINE_S, MIB, MakeRig, Rig, Worker
from tests.support.jobs import process_state, wait_until
from timeslice.arena.process import start_time_of
from timeslice.backends.base import Context
from timeslice.backends.pageout import _private_ranges, free_swap_bytes, resident_bytes
from timeslice.backends.process import ProcessBackend
from timeslice.errors import BackendError, FaultKind
from timeslice.models import Residency


@pytest.fixture
def rig(make_rig: MakeRig) -> Rig:
    return make_rig("process")


def state_of(worker: Worker) -> str:
    return process_state(worker.process.pid)


async def test_a_suspended_job_stands_still(rig: Rig) -> None:
    """Stopped from prepare to release, by the kernel's own word."""
    worker = rig.start()
    job = rig.job(worker)
    await rig.backend.prepare(job, ALL, deadline_s=DEADLINE_S)
    assert state_of(worker) == "T"
    await rig.backend.suspend(job, ALL, deadline_s=DEADLINE_S)
    await rig.backend.restore(job, ALL, deadline_s=DEADLINE_S)
    assert state_of(worker) == "T"
    await rig.backend.release(job, deadline_s=DEADLINE_S)
    assert worker.answers()


async def test_a_stop_by_the_user_is_remembered_over_an_agents_death(rig: Rig) -> None:
    """Who was stopped before stays stopped after, even when another instance releases it."""
    worker, other = rig.start(), rig.start()
    job = rig.job(worker, other)
    os.kill(worker.process.pid, signal.SIGSTOP)
    wait_until(lambda: state_of(worker) == "T", "stopped")
    await rig.out(job)
    rig.restart()
    await rig.back(job)
    assert state_of(worker) == "T"
    assert other.answers()


async def test_a_stop_by_the_user_is_no_suspend(rig: Rig) -> None:
    """A process that somebody else stopped is resident: nobody moved it, and it may run again at any time."""
    worker = rig.start()
    os.kill(worker.process.pid, signal.SIGSTOP)
    wait_until(lambda: state_of(worker) == "T", "stopped")
    probe = await rig.backend.probe(rig.job(worker))
    assert (probe.state, probe.locked) == (Residency.RESIDENT, False)


async def test_a_process_that_was_continued_behind_our_back_is_resident(rig: Rig) -> None:
    """Observed state beats the mark; and a later stop by the user is not taken for ours."""
    worker = rig.start()
    job = rig.job(worker)
    await rig.out(job)
    os.kill(worker.process.pid, signal.SIGCONT)
    wait_until(lambda: state_of(worker) != "T", "runs")
    assert (await rig.backend.probe(job)).state is Residency.RESIDENT
    os.kill(worker.process.pid, signal.SIGSTOP)
    wait_until(lambda: state_of(worker) == "T", "stopped again")
    await rig.backend.release(job, deadline_s=DEADLINE_S)
    assert state_of(worker) == "T"


async def test_the_agent_does_not_stop_itself(rig: Rig) -> None:
    """A job in the agent's own process is refused, and its other processes run on."""
    worker = rig.start()
    itself = worker.target.model_copy(update={"pid": os.getpid(), "start": start_time_of(os.getpid())})
    job = rig.job(worker, Worker(process=worker.process, target=itself))
    with pytest.raises(BackendError, match="itself") as caught:
        await rig.backend.prepare(job, ALL, deadline_s=DEADLINE_S)
    assert caught.value.kind is FaultKind.UNSUPPORTED
    assert worker.answers()


async def test_freed_bytes_are_what_left_ram(rig: Rig) -> None:
    """Without swap nothing, and it says so; with swap what the kernel paged out."""
    worker = rig.start()
    worker.process.call("plain_memory", 64 * MIB)
    before = resident_bytes(worker.process.pid)
    await rig.backend.prepare(rig.job(worker), ALL, deadline_s=DEADLINE_S)
    outcome = await rig.backend.suspend(rig.job(worker), ALL, deadline_s=DEADLINE_S)
    left = resident_bytes(worker.process.pid)
    assert outcome.freed_bytes == before - left
    if free_swap_bytes() > 128 * MIB:
        assert left < before / 2
    else:
        assert outcome.freed_bytes == 0


async def test_marks_are_written_where_only_we_may_write(tmp_path: Path) -> None:
    """A folder that others may write to could make us continue or leave stopped what they like."""
    tmp_path.chmod(0o777)
    with pytest.raises(BackendError, match="chmod 700") as caught:
        ProcessBackend(Context(group="g", node="n1", options={"state": str(tmp_path)}))
    assert caught.value.kind is FaultKind.UNSUPPORTED


async def test_marks_do_not_pile_up(rig: Rig) -> None:
    """After release there is none, and one of a process that died goes with the next prepare."""
    worker, doomed = rig.start(), rig.start()
    folder = Path(rig.context.options["state"])
    await rig.out(rig.job(worker))
    await rig.back(rig.job(worker))
    assert list(folder.iterdir()) == []
    await rig.out(rig.job(doomed))
    doomed.process.end()
    await rig.backend.prepare(rig.job(worker), ALL, deadline_s=DEADLINE_S)
    await rig.backend.abort(rig.job(worker), deadline_s=DEADLINE_S)
    assert list(folder.iterdir()) == []


async def test_a_folder_that_can_not_be_written_stops_nobody(rig: Rig) -> None:
    """P5: as good as a full disk, for root too: the second of two can't be noted, and the first one runs on."""
    first, second = rig.start(), rig.start()
    target = second.target
    (Path(rig.context.options["state"]) / f"{target.pid}-{target.start}.new").mkdir()
    with pytest.raises(BackendError, match=r"job a: .* can't be written to .*: Is a directory; make room") as caught:
        await rig.backend.prepare(rig.job(first, second), ALL, deadline_s=DEADLINE_S)
    assert caught.value.kind is FaultKind.TRANSIENT
    assert first.answers()
    assert second.answers()


def test_a_file_of_any_name_may_be_mapped(tmp_path: Path) -> None:
    """Names need be no text. Of a process that has ended it is said that it is gone, and not that a file is missing."""
    path = os.fsencode(tmp_path) + b"/\xd0"
    with open(path, "w+b") as file:  # noqa: PTH123 - a path of bytes
        file.truncate(4096)
        with mmap.mmap(file.fileno(), 4096, flags=mmap.MAP_PRIVATE):
            assert _private_ranges(os.getpid())
    ended = subprocess.Popen(["true"])
    ended.wait()
    with pytest.raises(ProcessLookupError, match=f"process {ended.pid} is gone"):
        _private_ranges(ended.pid)
