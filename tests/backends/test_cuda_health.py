"""What the ``cuda`` backend says of a node before any job depends on it, and its program on the driver API."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.backends.conftest import ALL, DEADLINE_S
from tests.backends.cuda_rig import FIRST, SECOND, CudaRig, cuda
from timeslice.backends.cuda import API
from timeslice.backends.cuda_health import complaints
from timeslice.backends.cuda_tool import CudaTool, Features
from timeslice.backends.nvml import Nvml
from timeslice.backends.toolrun import ToolFailedError
from timeslice.errors import BackendError, FaultKind

__all__ = ["cuda"]


async def told(cuda: CudaRig) -> list[str]:
    return list(await cuda.backend.health())


async def test_a_good_node_has_no_complaints(cuda: CudaRig) -> None:
    """By the tool and by the driver API."""
    assert await told(cuda) == []
    cuda.restart(driver="api")
    assert await told(cuda) == []


async def test_a_missing_tool_says_where_to_get_it(cuda: CudaRig) -> None:
    """And what to do without it; a job that needs it meets a fault and runs on."""
    cuda.restart(tool="/nowhere/cuda-checkpoint")
    (line,) = await told(cuda)
    assert "/nowhere/cuda-checkpoint was not found" in line
    assert "github.com/NVIDIA/cuda-checkpoint" in line
    assert "driver=api" in line
    error = await cuda.refused(cuda.job(cuda.start()), "/nowhere/cuda-checkpoint can't be started")
    assert error.kind is FaultKind.UNSUPPORTED


async def test_a_tool_that_fails_is_quoted(cuda: CudaRig) -> None:
    """Its own words, for nobody else knows better."""
    cuda.restart(tool="/bin/false")
    assert await told(cuda) == ["/bin/false -h failed: /bin/false -h failed"]


async def test_a_driver_too_old_is_told(cuda: CudaRig) -> None:
    """Older than 550 checkpoints nothing; the driver API takes 570."""
    cuda.node.set("driver", 535)
    (line,) = await told(cuda)
    assert "is too old" in line
    cuda.node.set("driver", 550)
    cuda.restart(driver="api")
    (line,) = await told(cuda)
    assert "driver 570 or newer" in line


async def test_persistence_mode_is_asked_of_each_device(cuda: CudaRig) -> None:
    """With the command that turns it on."""
    cuda.node.set("persistence", 0)
    (line,) = await told(cuda)
    assert f"persistence mode is off on {FIRST}, {SECOND}" in line
    assert "nvidia-smi -pm 1" in line


async def test_no_nvml_is_told(cuda: CudaRig) -> None:
    """The driver is not loaded: NVML's own complaint, with its remedy."""
    cuda.node.set("nvml", "not_loaded")
    (line,) = await told(cuda)
    assert "modprobe nvidia" in line


async def test_a_proc_that_hides_processes_is_told(cuda: CudaRig, tmp_path: Path) -> None:
    """hidepid: a folder where process 1 can't be seen stands in for it."""
    (line,) = await complaints(CudaTool(("cuda-checkpoint",), {}), Nvml(), [FIRST], proc=tmp_path)
    assert "hidepid" in line


async def test_not_being_root_is_told(cuda: CudaRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver would refuse each call."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    (line,) = await told(cuda)
    assert line.startswith("not root")
    assert "run the agent as root" in line


@pytest.mark.parametrize(("driver", "expected"), [(550, (False, False)), (555, (False, False)), (570, (True, False)),
                                                  (580, (True, True)), (610, (True, True))])  # fmt: skip
async def test_what_the_tool_can_do_is_read_from_its_help(
    cuda: CudaRig, driver: int, expected: tuple[bool, bool]
) -> None:
    """Flags belong to the driver that is installed, so none is taken for granted."""
    cuda.node.set("driver", driver)
    steps, device_map = expected
    assert await CudaTool(("cuda-checkpoint",), {}).ask() == Features(steps=steps, device_map=device_map)
    if driver >= 570:
        assert await CudaTool(API, {}).ask() == Features(steps=steps, device_map=device_map)


async def test_a_tool_that_only_toggles_leaves_no_mark_behind(cuda: CudaRig) -> None:
    """Driver 550 tells no state: a mark and no listing mean that a process is out, so one that failed to leave, or came
    back, has none."""
    cuda.node.set("driver", 550)
    worker = cuda.start()
    job = cuda.job(worker)
    cuda.node.set("checkpoint-fails", "once")
    with pytest.raises(BackendError, match="Error toggling CUDA in process ID"):
        await cuda.out(job)
    assert list((cuda.folder / "marks").glob("[0-9]*")) == []
    await cuda.out(job)
    cuda.restart()
    assert cuda.states() == ["checkpointed"]
    await cuda.back(job)
    cuda.node.process(worker.pid).unlink()  # it destroys its context
    assert (await cuda.backend.probe(job)).state == "absent"


async def test_a_state_that_contradicts_the_restore_thread_is_no_answer(cuda: CudaRig) -> None:
    """ "initialization error" of a process that has a context is a fault of the moment, never "nothing there"."""
    worker = cuda.start()
    (target,) = cuda.targets(worker)
    tool = CudaTool((sys.executable, "-c", FLAKY), {})
    with pytest.raises(ToolFailedError, match="has a context"):
        await tool.state(target, DEADLINE_S)


FLAKY = """
import sys
if "--get-state" in sys.argv:
    sys.exit('Error getting process state for process ID 1: "initialization error"')
print(1)
"""


def api(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*API, *words], env={**os.environ, **environment}, capture_output=True, text=True, timeout=60, check=False
    )


def test_the_driver_program_speaks_as_the_tool_does(cuda: CudaRig) -> None:
    """Same flags, same output, same texts: what drives the one drives the other."""
    worker = cuda.start()
    pid = ("--pid", str(worker.pid))
    for words in (("--get-state",), ("--action", "unlock"), ("--action", "lock", "--timeout", "50"),
                  ("--get-state",), ("--action", "checkpoint"), ("--get-state",)):  # fmt: skip
        ours = api(*words, *pid)
        if words[-1] == "unlock":
            theirs = subprocess.run([cuda.node.tool, *words, *pid], capture_output=True, text=True, check=False)
            assert (ours.returncode, ours.stdout, ours.stderr) == (theirs.returncode, theirs.stdout, theirs.stderr)
        else:
            assert (ours.returncode, ours.stderr) == (0, "")
    assert ours.stdout == "checkpointed\n"
    nobody = api("--get-state", "--pid", str(os.getpid()))
    assert nobody.stderr == f'Error getting process state for process ID {os.getpid()}: "initialization error"\n'
    assert api("--get-restore-tid", "--pid", str(os.getpid())).returncode == 1


def test_a_map_reaches_the_driver(cuda: CudaRig) -> None:
    """UUIDs go through the bindings as bytes and come out the same."""
    worker = cuda.start()
    pid = ("--pid", str(worker.pid))
    for action in ("lock", "checkpoint"):
        api("--action", action, *pid)
    third = "GPU-00000002-1111-2222-3333-444444444444"
    swap = f"{FIRST}={SECOND},{SECOND}={FIRST},{third}={third}"
    assert api("--action", "restore", "--device-map", swap, *pid).returncode == 0
    assert (cuda.node.folder / "maps").read_text() == f"{swap}\n"
    assert cuda.node.used(SECOND) > 0
    bad = api("--action", "restore", "--device-map", "GPU-1=GPU-2", *pid)
    assert (bad.returncode, "GPU-1 is no UUID of a device" in bad.stderr) == (1, True)


def test_without_a_driver_the_program_says_so() -> None:
    """One line with what is missing, no traceback."""
    done = api("-h", LD_LIBRARY_PATH="")
    assert done.returncode == 1
    assert done.stderr.startswith("libcuda.so.1 was not found; is the NVIDIA driver installed?")


async def test_jobs_move_by_the_driver_program_too(cuda: CudaRig) -> None:
    """The whole way, with the retry of a lock that fails once."""
    cuda.restart(driver="api")
    cuda.node.set("lock-fails", "once")
    worker = cuda.start()
    digest, job = worker.call("digest"), cuda.job(worker)
    await cuda.backend.prepare(job, ALL, deadline_s=DEADLINE_S)
    await cuda.backend.suspend(job, ALL, deadline_s=DEADLINE_S)
    await cuda.back(job)
    assert worker.call("digest") == digest
