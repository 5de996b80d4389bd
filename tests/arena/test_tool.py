"""The checkpoint tool on real jobs: states, signals, texts, exit codes, and whom it must not touch."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.arena.conftest import (
    CAPACITY,
    DEADLINE,
    MIB,
    DeviceMaker,
    JobError,
    JobProcess,
    Tool,
    process_state,
    wait_until,
)
from timeslice.arena import Device, Target, operations
from timeslice.arena.errors import NotAProcessError, TargetGoneError
from timeslice.arena.operations import get_state

StartJob = Callable[..., JobProcess]
PRESENT_STATE = '"the operation cannot be performed in the present state"'


def test_whole_cycle(device: Device, start_job: StartJob, tool: Tool) -> None:
    """Lock stops the process, checkpoint frees the device and lets the CPU go on, restore and unlock undo both."""
    job = start_job(device)
    view = job.allocate(5 * MIB)
    digest, place = job.fill(view, 1), job.address(view)
    assert tool.state(job.pid) == "running"
    for _ in range(2):
        tool.act(job.pid, "lock")
        assert (tool.state(job.pid), process_state(job.pid)) == ("locked", "T")
        assert device.used_bytes() == 5 * MIB
        tool.act(job.pid, "checkpoint")
        assert tool.state(job.pid) == job.state() == "checkpointed"
        assert (device.used_bytes(), job.on_device(), job.on_host()) == (0, 0, 5 * MIB)
        tool.act(job.pid, "restore")
        assert (tool.state(job.pid), process_state(job.pid)) == ("locked", "T")
        assert device.used_bytes() == 5 * MIB
        tool.act(job.pid, "unlock")
        assert tool.state(job.pid) == job.state() == "running"
        assert (job.digest(view), job.address(view)) == (digest, place)


def test_toggle(device: Device, start_job: StartJob, tool: Tool) -> None:
    """Toggle goes from running to checkpointed and back."""
    job = start_job(device)
    view = job.allocate(MIB)
    digest = job.fill(view, 2)
    assert tool.done("--toggle", "--pid", job.pid) == ""
    assert (tool.state(job.pid), device.used_bytes()) == ("checkpointed", 0)
    tool.done("--toggle", "-p", job.pid)
    assert tool.state(job.pid) == "running"
    assert job.digest(view) == digest


@pytest.mark.parametrize(
    ("before", "action"),
    [
        ((), "checkpoint"),
        ((), "restore"),
        ((), "unlock"),
        (("lock",), "lock"),
        (("lock",), "restore"),
        (("lock", "checkpoint"), "lock"),
        (("lock", "checkpoint"), "checkpoint"),
        (("lock", "checkpoint"), "unlock"),
    ],
)
def test_action_in_the_wrong_state(
    make_device: DeviceMaker, start_job: StartJob, tool: Tool, before: tuple[str, ...], action: str
) -> None:
    """An action that the state forbids fails with the real tool's text and changes nothing."""
    job = start_job(make_device())
    job.allocate(MIB)
    tool.act(job.pid, *before)
    state = tool.state(job.pid)
    result = tool("--action", action, "--pid", job.pid)
    assert result.returncode == 1
    assert result.stdout == ""
    assert result.stderr.splitlines()[0] == f"Could not {action} on process ID {job.pid}: {PRESENT_STATE}"
    assert tool.state(job.pid) == state


def test_process_without_an_arena(start_job: StartJob, tool: Tool) -> None:
    """A process without device memory is answered like one without a CUDA context."""
    job = start_job()
    result = tool("--get-state", "--pid", job.pid)
    assert result.returncode == 1
    line = f'Error getting process state for process ID {job.pid}: "initialization error"'
    assert result.stderr.splitlines()[0] == line
    result = tool("--toggle", "--pid", job.pid)
    assert result.stderr.splitlines()[0] == f'Error toggling CUDA in process ID {job.pid}: "initialization error"'
    assert tool("--get-restore-tid", "--pid", job.pid).returncode == 1


def test_restore_thread_is_of_the_process(make_device: DeviceMaker, start_job: StartJob, tool: Tool) -> None:
    """The restore thread id is one of the process's threads."""
    job = start_job(make_device())
    tid = tool.done("--get-restore-tid", "--pid", job.pid)
    assert Path(f"/proc/{job.pid}/task/{tid}").exists()


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--action", "lock"],
        ["--pid", "1"],
        ["--action", "fly", "--pid", "1"],
        ["--get-state", "--toggle", "--pid", "1"],
        ["--get-state", "--pid", "one"],
        ["--action", "restore", "--pid", "1", "--timeout", "5"],
        ["--frobnicate"],
        ["--get-state", "--pid"],
    ],
    ids=" ".join,
)
def test_usage_errors(tool: Tool, words: list[str]) -> None:
    """A call that makes no sense exits 2 and touches nothing."""
    assert tool(*words).returncode == 2


def test_help_names_every_operation(tool: Tool) -> None:
    """The help says what it emulates and lists what callers probe for."""
    text = tool.done("--help")
    assert "emulated device" in text
    for word in ("--get-state", "--action lock | checkpoint | restore | unlock", "--toggle", "--get-restore-tid"):
        assert word in text
    assert tool.done("-h") == text


def test_process_that_is_gone(make_device: DeviceMaker, start_job: StartJob, tool: Tool) -> None:
    """A process that ended is reported as such, zombie or reaped."""
    job = start_job(make_device())
    job.process.kill()
    wait_until(lambda: process_state(job.pid) == "Z", "it is dead")
    for _ in range(2):
        result = tool("--get-state", "--pid", job.pid)
        assert result.returncode == 1
        assert "OS call failed" in result.stderr
        job.process.wait()


def test_thread_id_is_refused(device: Device, start_job: StartJob, tool: Tool) -> None:
    """A thread's id is not taken for its process's."""
    job = start_job(device)
    job.allocate(MIB)
    thread = job.thread()
    result = tool("--action", "lock", "--pid", thread)
    assert result.returncode == 1
    assert f"thread of process {job.pid}" in result.stderr
    assert job.state() == "running"
    with pytest.raises(NotAProcessError):
        get_state(thread)


def test_reused_process_id_is_refused(device: Device, start_job: StartJob) -> None:
    """A target whose start time differs is another process: it is neither signalled nor moved."""
    job = start_job(device)
    job.allocate(MIB)
    stale = Target(job.pid, Target(job.pid).start_time - 1)
    for operation in (operations.lock, operations.checkpoint, operations.restore, operations.unlock, get_state):
        with pytest.raises(TargetGoneError, match="another one now"):
            operation(stale)
    assert process_state(job.pid) != "T"
    assert job.state() == "running"


def test_early_restore(device: Device, start_job: StartJob, tool: Tool) -> None:
    """A restore that does not fit fails with need and free, the copy intact; later it works."""
    first, second = start_job(device), start_job(device)
    view = first.allocate(10 * MIB)
    digest = first.fill(view, 3)
    with pytest.raises(JobError):
        second.allocate(10 * MIB)
    tool.act(first.pid, "lock", "checkpoint")
    second.allocate(10 * MIB)
    result = tool("--action", "restore", "--pid", first.pid)
    assert result.returncode == 1
    lines = result.stderr.splitlines()
    assert lines[0] == f'Could not restore on process ID {first.pid}: "out of memory"'
    assert "need 10.0 MiB, 6.0 MiB free" in lines[1]
    assert (tool.state(first.pid), device.used_bytes()) == ("checkpointed", 10 * MIB)
    assert first.state() == "checkpointed"  # it answers: its CPU side goes on
    tool.act(second.pid, "lock", "checkpoint")
    tool.act(first.pid, "restore", "unlock")
    assert first.digest(view) == digest


def test_one_flipped_byte_changes_the_content(device: Device, start_job: StartJob, tool: Tool) -> None:
    """What comes back is the saved copy and nothing else."""
    job = start_job(device)
    view = job.allocate(MIB)
    digest = job.fill(view, 4)
    tool.act(job.pid, "lock", "checkpoint")
    (copy,) = [p for p in Path(f"/proc/{job.pid}/fd").iterdir() if "timeslice-host-copy" in str(p.readlink())]
    with copy.open("r+b") as file:
        file.seek(MIB // 2)
        byte = file.read(1)[0]
        file.seek(MIB // 2)
        file.write(bytes([byte ^ 1]))
    tool.act(job.pid, "restore", "unlock")
    assert job.digest(view) != digest


def test_touch_while_checkpointed_kills(device: Device, start_job: StartJob, tool: Tool) -> None:
    """A process that touches its device memory while it is out dies of SIGBUS, and its copy goes with it."""
    job = start_job(device)
    view = job.allocate(MIB)
    tool.act(job.pid, "lock", "checkpoint")
    job.ask("touch", view)
    assert job.process.wait(DEADLINE) == -signal.SIGBUS


def test_user_stopped_process_stays_stopped(device: Device, start_job: StartJob, tool: Tool) -> None:
    """A process that a user had stopped is checkpointed and restored, and never continued by the tool."""
    job = start_job(device)
    view = job.allocate(MIB)
    digest = job.fill(view, 5)
    os.kill(job.pid, signal.SIGSTOP)
    wait_until(lambda: process_state(job.pid) == "T", "it is stopped")
    for action in ("lock", "checkpoint", "restore", "unlock"):
        tool.act(job.pid, action)
        assert process_state(job.pid) == "T"
    os.kill(job.pid, signal.SIGCONT)
    assert job.digest(view) == digest


def test_who_was_continued_while_locked_runs_on(device: Device, start_job: StartJob, tool: Tool) -> None:
    """Stopped by a user, locked, continued by the user: the checkpoint stops it once more, and then lets it run."""
    job = start_job(device)
    view = job.allocate(MIB)
    digest = job.fill(view, 5)
    os.kill(job.pid, signal.SIGSTOP)
    wait_until(lambda: process_state(job.pid) == "T", "it is stopped")
    tool.act(job.pid, "lock")
    os.kill(job.pid, signal.SIGCONT)
    wait_until(lambda: process_state(job.pid) != "T", "it runs")
    tool.act(job.pid, "checkpoint")
    assert process_state(job.pid) != "T"
    tool.act(job.pid, "restore", "unlock")
    assert job.digest(view) == digest


def test_user_stops_it_while_checkpointed(device: Device, start_job: StartJob, tool: Tool) -> None:
    """The same for one that was stopped while its device memory was out; and the other way round."""
    job = start_job(device)
    job.allocate(MIB)
    tool.act(job.pid, "lock", "checkpoint")
    os.kill(job.pid, signal.SIGSTOP)
    wait_until(lambda: process_state(job.pid) == "T", "it is stopped")
    tool.act(job.pid, "restore", "unlock")
    assert process_state(job.pid) == "T"
    tool.act(job.pid, "lock", "checkpoint")
    assert process_state(job.pid) == "T"
    os.kill(job.pid, signal.SIGCONT)
    tool.act(job.pid, "restore", "unlock")
    assert job.state() == "running"


def test_two_roles_are_independent(make_device: DeviceMaker, start_job: StartJob, tool: Tool) -> None:
    """Case F04: while the trainer role's memory is out, the sampler role of the same process computes."""
    trainers, samplers = make_device(), make_device()
    job = start_job(trainers, samplers)
    trained, sampled = job.allocate(2 * MIB, 0), job.allocate(MIB, 1)
    digest = job.fill(trained, 6)
    only = {"TIMESLICE_VISIBLE_ARENAS": trainers.path}
    tool.act(job.pid, "lock", "checkpoint", **only)
    assert (trainers.used_bytes(), samplers.used_bytes()) == (0, MIB)
    assert tool.state(job.pid, **only) == "checkpointed"
    assert tool.state(job.pid, TIMESLICE_VISIBLE_ARENAS=samplers.path) == "running"
    assert job.fill(sampled, 7) == job.digest(sampled)
    job.allocate(MIB, 1)
    tool.act(job.pid, "lock", TIMESLICE_VISIBLE_ARENAS=samplers.path)
    tool.act(job.pid, "restore", **only)
    tool.act(job.pid, "unlock", **only)
    assert process_state(job.pid) == "T"  # the samplers' lock still stands
    tool.act(job.pid, "unlock", TIMESLICE_VISIBLE_ARENAS=samplers.path)
    assert job.digest(trained) == digest


def test_nothing_visible(make_device: DeviceMaker, start_job: StartJob, tool: Tool) -> None:
    """With no device visible the process has no context, as with an empty CUDA_VISIBLE_DEVICES."""
    job = start_job(make_device())
    result = tool("--get-state", "--pid", job.pid, TIMESLICE_VISIBLE_ARENAS="")
    assert result.returncode == 1
    assert "initialization error" in result.stderr


def test_two_devices_come_back_together_or_not(make_device: DeviceMaker, start_job: StartJob, tool: Tool) -> None:
    """Without a restriction one call moves all arenas; when one device is full, nothing is restored on either."""
    one, two = make_device(), make_device()
    job, rival = start_job(one, two), start_job(two)
    views = [job.allocate(8 * MIB, 0), job.allocate(8 * MIB, 1)]
    digests = [job.fill(view, 8 + view) for view in views]
    tool.act(job.pid, "lock", "checkpoint")
    assert (one.used_bytes(), two.used_bytes()) == (0, 0)
    rival.allocate(12 * MIB)
    assert tool("--action", "restore", "--pid", job.pid).returncode == 1
    assert (one.used_bytes(), two.used_bytes(), tool.state(job.pid)) == (0, 12 * MIB, "checkpointed")
    rival.close()
    tool.act(job.pid, "restore", "unlock")
    assert [job.digest(view) for view in views] == digests


def test_child_of_fork_is_no_target(device: Device, start_job: StartJob, tool: Tool) -> None:
    """A forked child of a job has no device memory to move."""
    job = start_job(device)
    job.allocate(MIB)
    child = job.fork()
    try:
        assert "initialization error" in tool("--action", "lock", "--pid", child).stderr
        assert process_state(child) != "T"
    finally:
        os.kill(child, signal.SIGKILL)


def test_heir_of_a_descriptor_is_no_target(make_device: DeviceMaker, start_job: StartJob, tool: Tool) -> None:
    """A process that only inherited the descriptor of a control block is not taken for the arena's owner."""
    job = start_job(make_device())
    heir, fd = job.heir()
    assert "timeslice-arena" in str(Path(f"/proc/{heir}/fd/{fd}").readlink())
    assert "initialization error" in tool("--action", "lock", "--pid", heir).stderr
    assert process_state(heir) != "T"


def test_lock_gives_up_in_time(device: Device, start_job: StartJob, tool: Tool) -> None:
    """A lock that can't be had within its timeout fails as "device not ready" and leaves the process running."""
    job = start_job(device)
    job.allocate(MIB)
    job.keep_lock()
    result = tool("--action", "lock", "--pid", job.pid, "--timeout", 100)
    assert result.returncode == 1
    assert result.stderr.startswith(f'Could not lock on process ID {job.pid}: "device not ready"')
    assert process_state(job.pid) != "T"
    assert tool.state(job.pid) == "running"  # looking needs no lock


def test_whole_device_swaps(device: Device, start_job: StartJob, tool: Tool) -> None:
    """Two jobs that each need the whole device take turns on it."""
    jobs = [start_job(device), start_job(device)]
    digests = []
    for number, job in enumerate(jobs):
        digests.append(job.fill(job.allocate(CAPACITY), number))
        tool.act(job.pid, "lock", "checkpoint")
    for _ in range(3):
        for job, digest in zip(jobs, digests, strict=True):
            tool.act(job.pid, "restore", "unlock")
            assert job.digest(0) == digest
            tool.act(job.pid, "lock", "checkpoint")
