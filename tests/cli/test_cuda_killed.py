"""Agents that are killed with SIGKILL at calls of the checkpoint tool while jobs take turns, and started again each
time; the whole system with daemons as users start them. GPU, driver and tool are stand-ins."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Cli
from tests.cli.devices import GROUP, Job, Served
from tests.cli.test_cuda_jobs import JOB
from tests.gpu.fixtures import gpu_node
from tests.gpu.killer import Killer
from tests.gpu.node import Node, uuid

__all__ = ["gpu_node"]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="the backend cuda works only for root"),
]

MIB = 1 << 20
CAPACITY, SIZE, CONTEXT = 8 * MIB, 6 * MIB, MIB  # two jobs do not fit
WITHIN_S = 90.0
ACTIONS = ("lock", "checkpoint", "restore", "unlock")


class Mortal:
    """A node whose agent dies at the point that was chosen."""

    def __init__(self, served: Served, backend: str, killer: Killer) -> None:
        self.served, self.killer = served, killer
        self._words = ("--group", GROUP, "--backend", backend)
        served.coordinator()
        served.ready(*self._words)

    def turn(self, job: Job, when: str, action: str) -> str:
        """A turn of a job while the agent is killed there and started again; what the job says of its state."""
        self.killer.at(when, f"--action {action}")
        agent = self.served.agents[-1]
        job.go()
        assert agent.wait(WITHIN_S) == -9
        self.killer.never()
        self.served.ready(*self._words)
        said = job.says(WITHIN_S)
        job.go()
        assert job.says() == "yielded"
        return said


@pytest.fixture
def served(cli: Cli, tmp_path: Path, gpu_node: Node, clean_environment: Path) -> Served:
    (gpu_node.folder / "devices").write_text("")
    gpu_node.add_device(uuid(0), CAPACITY)
    gpu_node.set("copy-takes", "0.5")
    return Served(cli, tmp_path, gpu_node)


@pytest.mark.parametrize("when", ["before", "after"])
def test_jobs_take_turns_though_the_agent_dies_in_every_one(served: Served, when: str) -> None:
    """P5, P6: with the tool at work or right behind it, whichever action it is: each turn comes, with the content
    intact, and no two calls ever worked on one process."""
    killer = Killer.make(served.folder / "killer", served.node)
    mortal = Mortal(served, f"cuda:state={served.folder / 'marks'},tool={killer.tool}", killer)
    jobs = [Job(served, [sys.executable, "-c", JOB, name, GROUP, str(SIZE)]) for name in ("a", "bb")]
    for each in jobs:
        assert each.turn().endswith("True")
    for number, action in enumerate(ACTIONS):
        assert mortal.turn(jobs[number % 2], when, action).endswith("True"), action
    assert {each["residency"] for each in served.cli.json("jobs")["jobs"]} == {"suspended", "resident"}
    assert served.node.overlaps() == []


@pytest.mark.parametrize("when", ["before", "after"])
def test_the_agent_dies_between_two_stages(served: Served, when: str) -> None:
    """P6: channel+cuda: the workload has moved its tensors, and the agent is killed at each action of the second stage.
    The next one goes on from what it finds: both stages come back in reverse, and each job has its state."""
    killer = Killer.make(served.folder / "killer", served.node)
    options = f"cuda.state={served.folder / 'marks'},cuda.tool={killer.tool}"
    mortal = Mortal(served, f"composite:stages=channel+cuda,{options}", killer)
    jobs = [served.job(name, SIZE, CONTEXT) for name in ("a", "bb")]
    for each in jobs:
        assert each.turn().endswith("True")
    for number, action in enumerate(ACTIONS):
        assert mortal.turn(jobs[number % 2], when, action).endswith("True"), action
    assert served.node.used(uuid(0)) == SIZE + CONTEXT
    assert served.node.overlaps() == []
