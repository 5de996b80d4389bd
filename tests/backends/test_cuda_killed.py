"""An agent that is killed with SIGKILL at a call of the checkpoint tool, and the backend of the next one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.backends.conftest import ALL, DEADLINE_S
from tests.backends.cuda_rig import FIRST, SECOND, CudaRig, cuda
from tests.gpu.killer import Killer
from tests.support.jobs import JobProcess
from timeslice.models import Residency

__all__ = ["cuda"]

# One job out and back, as an agent does it; the arguments are its targets.
AGENT = f"""
import asyncio, sys
from timeslice.backends.base import Context, Job, Selection
from timeslice.backends.cuda import CudaBackend
from timeslice.models import Target
tool, state, *records = sys.argv[1:]
options = {{"tool": tool, "state": state}}
backend = CudaBackend(Context(group="g", node="n1", accelerators=("{FIRST}", "{SECOND}"), options=options))
job = Job(group="g", job="a", node="n1", targets=tuple(map(Target.model_validate_json, records)))
async def main():
    for step in (backend.prepare, backend.suspend, backend.restore):
        await step(job, Selection(), deadline_s=60)
    await backend.release(job, deadline_s=60)
asyncio.run(main())
"""
FAST = {("before", "checkpoint", 2), ("after", "restore", 2)}
POINTS = [
    pytest.param(when, action, number, marks=[] if (when, action, number) in FAST else [pytest.mark.slow])
    for action in ("lock", "checkpoint", "restore", "unlock")
    for number in (1, 2)
    for when in ("before", "after")
]


@pytest.fixture
def killer(cuda: CudaRig, tmp_path: Path) -> Killer:
    return Killer.make(tmp_path / "killer", cuda.node)


def die(cuda: CudaRig, killer: Killer, *workers: JobProcess) -> None:
    """Run an agent that gets killed; the rig's backend is the next one's."""
    records = [target.model_dump_json() for target in cuda.targets(*workers)]
    words = [sys.executable, "-c", AGENT, str(killer.tool), str(cuda.folder / "marks"), *records]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == -9, done.stderr
    killer.never()
    cuda.restart(tool=str(killer.tool))


@pytest.mark.parametrize(("when", "action", "number"), POINTS)
async def test_the_next_agent_finishes_what_a_killed_one_began(
    cuda: CudaRig, killer: Killer, when: str, action: str, number: int
) -> None:
    """P6: killed while the tool works on the first or second of two ranks, or right behind it: the steps are repeated
    and find what was done. No call meets another one, and the content is intact."""
    workers = [cuda.start(), cuda.start()]
    digests, job = [worker.call("digest") for worker in workers], cuda.job(*workers)
    cuda.node.set("copy-takes", "0.3")
    killer.at(when, f"--action {action}", number)
    die(cuda, killer, *workers)
    if action in {"lock", "checkpoint"}:
        await cuda.out(job)
        assert cuda.states() == ["checkpointed"] * 2
        assert (await cuda.backend.probe(job)).state is Residency.SUSPENDED
    await cuda.back(job)
    assert cuda.states() == ["running"] * 2
    assert [worker.call("digest") for worker in workers] == digests
    assert cuda.node.overlaps() == []


@pytest.mark.parametrize(("when", "action", "number"), POINTS[:8])
async def test_the_next_agent_undoes_what_a_killed_one_began(
    cuda: CudaRig, killer: Killer, when: str, action: str, number: int
) -> None:
    """P5: the swap is gone meanwhile: whoever is locked runs on, and whoever is out comes back."""
    workers = [cuda.start(), cuda.start()]
    digests, job = [worker.call("digest") for worker in workers], cuda.job(*workers)
    cuda.node.set("copy-takes", "0.3")
    killer.at(when, f"--action {action}", number)
    die(cuda, killer, *workers)
    if (await cuda.backend.probe(job)).state is Residency.RESIDENT:
        await cuda.backend.abort(job, deadline_s=DEADLINE_S)
    else:  # out, or not known, for the tool still works or only one of them left
        await cuda.back(job)
    assert cuda.states() == ["running"] * 2
    assert [worker.call("digest") for worker in workers] == digests
    assert cuda.node.overlaps() == []


@pytest.mark.parametrize("when", ["before", pytest.param("after", marks=pytest.mark.slow)])
@pytest.mark.parametrize("number", [1, pytest.param(2, marks=pytest.mark.slow)])
async def test_a_toggle_that_outlives_its_agent_is_not_done_again(
    cuda: CudaRig, killer: Killer, when: str, number: int
) -> None:
    """Driver 550: a second toggle would bring back what is to leave. The first is the way out, the second the way
    back."""
    cuda.node.set("driver", 550)
    worker = cuda.start()
    digest, job = worker.call("digest"), cuda.job(worker)
    cuda.node.set("copy-takes", "0.3")
    killer.at(when, "--toggle", number)
    die(cuda, killer, worker)
    if number == 1:
        await cuda.out(job)
        assert cuda.states() == ["checkpointed"]
    await cuda.back(job)
    assert cuda.states() == ["running"]
    assert worker.call("digest") == digest
    assert cuda.node.overlaps() == []


async def test_a_tool_that_a_killed_agent_left_behind_is_waited_for(cuda: CudaRig, killer: Killer) -> None:
    """No state is claimed while it works, no second one is started, and the fault says what is under way."""
    worker = cuda.start()
    job = cuda.job(worker)
    cuda.node.set("lock-hangs")
    killer.at("before", "--action lock")
    die(cuda, killer, worker)
    assert (await cuda.backend.probe(job)).state is Residency.FAULTED
    error = await cuda.refused(job, "begun by an earlier agent, has not ended. It must not be killed", deadline_s=0.5)
    assert error.kind == "poisoned"
    cuda.node.clear("lock-hangs")
    await cuda.backend.abort(job, deadline_s=DEADLINE_S)
    assert cuda.states() == ["running"]
    assert cuda.node.overlaps() == []


async def test_a_prepare_after_a_kill_locks_nobody_twice(cuda: CudaRig, killer: Killer) -> None:
    """One that finds its process locked has nothing to do."""
    worker = cuda.start()
    killer.at("after", "--action lock")
    die(cuda, killer, worker)
    outcome = await cuda.backend.prepare(cuda.job(worker), ALL, deadline_s=DEADLINE_S)
    assert outcome.moved_bytes == 0
    assert cuda.states() == ["locked"]
