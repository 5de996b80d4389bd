"""Operators that die, hang, fail and lie: what the next one finds, and that nobody's state is lost."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from tests.arena.conftest import MIB, DeviceMaker, JobProcess, Tool, process_state, wait_until
from timeslice.arena import Device, faults
from timeslice.arena.device import FAULTS_FILE
from timeslice.errors import UsageError

StartJob = Callable[..., JobProcess]
SIZE = 3 * MIB

# Which actions come before, and which state holds when the operator died at that step.
CRASHES = [
    ((), "lock", "stopping", "running"),
    ((), "lock", "stopped", "running"),
    (("lock",), "checkpoint", "begun", "locked"),
    (("lock",), "checkpoint", "half", "locked"),
    (("lock",), "checkpoint", "copied", "locked"),
    (("lock",), "checkpoint", "recorded", "checkpointed"),
    (("lock",), "checkpoint", "freed", "checkpointed"),
    (("lock", "checkpoint"), "restore", "stopped", "checkpointed"),
    (("lock", "checkpoint"), "restore", "reserved", "checkpointed"),
    (("lock", "checkpoint"), "restore", "half", "checkpointed"),
    (("lock", "checkpoint"), "restore", "copied", "checkpointed"),
    (("lock", "checkpoint", "restore"), "unlock", "recorded", "running"),
    (("lock", "checkpoint", "restore"), "unlock", "continued", "running"),
]
TO_RUNNING = {"running": (), "locked": ("unlock",), "checkpointed": ("restore", "unlock")}


def check_consistent(device: Device, job: JobProcess, tool: Tool) -> str:
    """State, device memory and process agree; the state."""
    state = tool.state(job.pid)
    assert device.used_bytes() == (0 if state == "checkpointed" else SIZE)
    if state == "locked":
        assert process_state(job.pid) == "T"
    else:
        assert job.state() == state  # it answers, so it was not left standing still
    return state


@pytest.mark.parametrize("again", [False, True], ids=["look", "repeat"])
@pytest.mark.parametrize(("before", "action", "step", "state"), CRASHES)
def test_operator_killed(
    device: Device,
    start_job: StartJob,
    tool: Tool,
    before: tuple[str, ...],
    action: str,
    step: str,
    state: str,
    again: bool,
) -> None:
    """Killed at any step, the next call (a look, or the same action again) finds a sound state; nothing is lost."""
    job = start_job(device)
    view = job.allocate(SIZE)
    digest = job.fill(view, 1)
    tool.act(job.pid, *before)
    killed = tool("--action", action, "--pid", job.pid, TIMESLICE_ARENA_FAULTS=f"{action}:die={step}")
    assert killed.returncode == -signal.SIGKILL
    if again:
        repeated = tool("--action", action, "--pid", job.pid)
        had_taken_effect = state == {"lock": "locked", "checkpoint": "checkpointed", "unlock": "running"}.get(action)
        assert repeated.returncode == (1 if had_taken_effect else 0), repeated.stderr
        check_consistent(device, job, tool)
    else:
        assert check_consistent(device, job, tool) == state
    tool.act(job.pid, *TO_RUNNING[tool.state(job.pid)])
    assert job.digest(view) == digest
    tool.act(job.pid, "lock", "checkpoint", "restore", "unlock")
    assert job.digest(view) == digest


def test_every_kill_point_is_tested() -> None:
    """The table above has every step at which an operator can be told to die."""
    assert {(action, step) for _, action, step, _ in CRASHES} == {
        (action, step) for action, steps in faults._STEPS.items() for step in steps
    }


def test_operator_killed_at_any_moment(make_device: DeviceMaker, start_job: StartJob, tool: Tool) -> None:
    """Operators killed at random moments, thirty times over, never cost the job its state."""
    device = make_device()
    job = start_job(device)
    view = job.allocate(SIZE)
    digest = job.fill(view, 2)
    random = Random(5)
    following = {"running": "lock", "locked": "checkpoint", "checkpointed": "restore"}
    for _ in range(30):
        action = following[check_consistent(device, job, tool)]
        operator = tool.start("--action", action, "--pid", job.pid)
        try:
            operator.wait(random.uniform(0.015, 0.06))
        except subprocess.TimeoutExpired:
            operator.kill()
        operator.communicate()
        if check_consistent(device, job, tool) == "locked" and random.random() < 0.4:
            tool.act(job.pid, "unlock")
            assert job.digest(view) == digest
    tool.act(job.pid, *TO_RUNNING[tool.state(job.pid)])
    assert job.digest(view) == digest


def test_user_stopped_process_stays_stopped_over_a_crash(
    make_device: DeviceMaker, start_job: StartJob, tool: Tool
) -> None:
    """An operator that died is cleaned up after without continuing a process that a user had stopped."""
    job = start_job(make_device())
    job.allocate(SIZE)
    job.process.send_signal(signal.SIGSTOP)
    wait_until(lambda: process_state(job.pid) == "T", "it is stopped")
    tool("--action", "lock", "--pid", job.pid, TIMESLICE_ARENA_FAULTS="lock:die=stopped")
    assert tool.state(job.pid) == "running"
    assert process_state(job.pid) == "T"


def test_one_in_n(make_device: DeviceMaker, start_job: StartJob, tool: Tool) -> None:
    """Every third lock fails, before it touches anything, over separate runs of the tool."""
    job = start_job(make_device())
    codes = []
    for _ in range(9):
        result = tool("--action", "lock", "--pid", job.pid, TIMESLICE_ARENA_FAULTS="lock:1/3")
        codes.append(result.returncode)
        if result.returncode == 0:
            tool.act(job.pid, "unlock")
        else:
            assert f'Could not lock on process ID {job.pid}: "OS call failed' in result.stderr
            assert job.state() == "running"
    assert codes == [0, 0, 1] * 3


def test_fail_once_and_fail(make_device: DeviceMaker, start_job: StartJob, tool: Tool) -> None:
    """``fail-once`` fails the first time, ``fail`` every time; a new process starts counting anew."""
    device = make_device()
    for _ in range(2):
        job = start_job(device)
        tool.act(job.pid, "lock")
        command = ("--action", "checkpoint", "--pid", job.pid)
        once = [tool(*command, TIMESLICE_ARENA_FAULTS="checkpoint:fail-once").returncode for _ in range(2)]
        assert once == [1, 0]
        command = ("--action", "restore", "--pid", job.pid)
        assert [tool(*command, TIMESLICE_ARENA_FAULTS="restore:fail").returncode for _ in range(3)] == [1, 1, 1]
        assert tool.state(job.pid) == "checkpointed"


def test_poison(make_device: DeviceMaker, start_job: StartJob, tool: Tool) -> None:
    """``poison`` reports out of memory once and an unusable driver ever after, as a failed CUDA restore does."""
    job = start_job(make_device())
    tool.act(job.pid, "lock", "checkpoint")
    texts = [
        tool("--action", "restore", "--pid", job.pid, TIMESLICE_ARENA_FAULTS="restore:poison").stderr for _ in range(3)
    ]
    assert ["out of memory" in text for text in texts] == [True, False, False]
    assert ["OS call failed" in text for text in texts] == [False, True, True]


def test_hang(device: Device, start_job: StartJob, tool: Tool) -> None:
    """A hung checkpoint keeps others out until it is killed; then all is as it was."""
    job = start_job(device)
    view = job.allocate(SIZE)
    digest = job.fill(view, 3)
    tool.act(job.pid, "lock")
    hung = tool.start("--action", "checkpoint", "--pid", job.pid, TIMESLICE_ARENA_FAULTS="checkpoint:hang")
    busy = ("--action", "lock", "--pid", job.pid, "--timeout", 1)
    wait_until(lambda: "device not ready" in tool(*busy).stderr, "the hung operator has the lock")
    assert hung.poll() is None
    assert tool.state(job.pid) == "locked"
    hung.kill()
    hung.communicate()
    tool.act(job.pid, "checkpoint", "restore", "unlock")
    assert job.digest(view) == digest


def test_slow(make_device: DeviceMaker, start_job: StartJob, tool: Tool) -> None:
    """``hang=S`` takes longer and then works."""
    job = start_job(make_device())
    tool.act(job.pid, "lock", TIMESLICE_ARENA_FAULTS="lock:hang=0.05")
    assert tool.state(job.pid) == "locked"


def test_lie(device: Device, start_job: StartJob, tool: Tool) -> None:
    """A lying checkpoint claims success with the memory still on the device; the content survives it."""
    job = start_job(device)
    size = 10 * MIB  # more than half of the device: what the lie left there is in the way of the restore
    view = job.allocate(size)
    digest = job.fill(view, 4)
    tool.act(job.pid, "lock")
    tool.act(job.pid, "checkpoint", TIMESLICE_ARENA_FAULTS="checkpoint:lie")
    assert (tool.state(job.pid), device.used_bytes()) == ("checkpointed", size)
    tool.act(job.pid, "restore", TIMESLICE_ARENA_FAULTS="restore:lie")
    assert tool.state(job.pid) == "checkpointed"
    tool.act(job.pid, "restore", "unlock")
    assert (job.digest(view), device.used_bytes()) == (digest, size)
    tool.act(job.pid, "lock", TIMESLICE_ARENA_FAULTS="lock:lie")
    assert job.state() == "running"


def test_late(device: Device, start_job: StartJob, tool: Tool) -> None:
    """A late checkpoint claims success and frees the memory afterwards by itself."""
    job = start_job(device)
    view = job.allocate(SIZE)
    digest = job.fill(view, 5)
    tool.act(job.pid, "lock")
    tool.act(job.pid, "checkpoint", TIMESLICE_ARENA_FAULTS="checkpoint:late=0.1")
    assert tool.state(job.pid) == "checkpointed"
    wait_until(lambda: device.used_bytes() == 0, "the memory is freed")
    tool.act(job.pid, "restore", "unlock")
    assert job.digest(view) == digest


def test_restored_before_the_late_free(make_device: DeviceMaker, start_job: StartJob, tool: Tool) -> None:
    """The late half of a checkpoint does nothing once the memory was restored."""
    device = make_device()
    job = start_job(device)
    view = job.allocate(SIZE)
    digest = job.fill(view, 6)
    tool.act(job.pid, "lock")
    tool.act(job.pid, "checkpoint", TIMESLICE_ARENA_FAULTS="checkpoint:late=60")
    assert (tool.state(job.pid), device.used_bytes()) == ("checkpointed", SIZE)
    tool.act(job.pid, "restore", "unlock")
    tool.done("--free-late", "0", "--pid", job.pid)
    assert (device.used_bytes(), job.digest(view)) == (SIZE, digest)


def test_fault_file_of_the_device(make_device: DeviceMaker, start_job: StartJob, tool: Tool) -> None:
    """Faults can be asked for by a file in the device's folder; in-process calls heed them too."""
    one, two = make_device(), make_device()
    job = start_job(one, two)
    (Path(one.path) / FAULTS_FILE).write_text("lock:fail\n")
    with pytest.raises(Exception, match="injected fault lock:fail"):
        job.suspend(0)
    assert job.suspend(1) == 0
    assert tool("--action", "lock", "--pid", job.pid).returncode == 1
    (Path(one.path) / FAULTS_FILE).unlink()
    tool.act(job.pid, "lock")


@pytest.mark.parametrize(
    "text",
    [
        "lock",
        "lock:explode",
        "fly:fail",
        "lock:1/0",
        "restore:late=1",
        "checkpoint:late",
        "lock:die=half",
        "lock:fail=2",
    ],
)
def test_unknown_fault(make_device: DeviceMaker, start_job: StartJob, tool: Tool, text: str) -> None:
    """A fault that does not exist is refused, so that no test passes because of a typing error."""
    with pytest.raises(UsageError, match="is no fault"):
        faults.parse(text)
    job = start_job(make_device())
    result = tool("--action", "lock", "--pid", job.pid, TIMESLICE_ARENA_FAULTS=text)
    assert (result.returncode, job.state()) == (2, "running")
