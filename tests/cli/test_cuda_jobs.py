"""Jobs that take turns on a GPU by the ``cuda`` backend, with daemons as users start them. GPU, driver and tool are
stand-ins."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Cli, eventually
from tests.cli.devices import GROUP, Job, Served
from tests.gpu.fixtures import gpu_node
from tests.gpu.node import Node, uuid
from tests.support.jobs import JobProcess

__all__ = ["gpu_node"]

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="the backend cuda works only for root")

MIB = 1 << 20
CAPACITY, SIZE = 8 * MIB, 6 * MIB  # two jobs do not fit
JOB = """
import sys, timeslice
from tests.gpu.worker import Job
job, digest = Job(), None
print("up", flush=True)
while sys.stdin.readline():
    with timeslice.hold(sys.argv[2], job=sys.argv[1], timeout=120) as lease:
        if digest is None:
            digest = job.allocate(int(sys.argv[3]), len(sys.argv[1]))
        print(lease.grant.how, job.digest() == digest, flush=True)
        if not sys.stdin.readline():
            break
    print("yielded", flush=True)
"""


@pytest.fixture
def served(cli: Cli, tmp_path: Path, gpu_node: Node, clean_environment: Path) -> Served:
    """A coordinator and an agent with one device of 8 MiB, and only the backend cuda."""
    (gpu_node.folder / "devices").write_text("")
    gpu_node.add_device(uuid(0), CAPACITY)
    made = Served(cli, tmp_path, gpu_node)
    made.coordinator()
    made.ready("--group", GROUP, "--backend", f"cuda:state={tmp_path / 'marks'}")
    return made


def job(served: Served, name: str) -> Job:
    return Job(served, [sys.executable, "-c", JOB, name, GROUP, str(SIZE)])


def test_jobs_take_turns_though_every_third_lock_fails(served: Served) -> None:
    """F03: every swap completes, the content is intact each time, and nobody is faulted."""
    served.node.set("lock-fails", "every:3")
    jobs = [job(served, "a"), job(served, "bb")]
    for number in range(8):
        assert jobs[number % 2].turn().endswith("True")
    states = {each["job"]: each["residency"] for each in served.cli.json("jobs")["jobs"]}
    assert states == {"a": "suspended", "bb": "resident"}
    assert served.node.used() == SIZE


@pytest.mark.slow
def test_nobody_comes_in_where_nothing_was_freed(served: Served) -> None:
    """G06: the tool says success and the memory is still there: the job that waits hears how much; the one that should
    have left is back; freed late, and all is well."""
    first, second = job(served, "a"), job(served, "bb")
    assert first.turn() == "first load True"
    served.node.set("checkpoint-frees", "nothing")
    second.go()
    eventually(lambda: f"only 0 of its {SIZE} bytes were measured free" in served.why("bb"), within=60)
    served.node.set("checkpoint-frees", "late:1")
    assert second.says(60).endswith("True")
    second.go()
    assert second.says() == "yielded"
    served.node.clear("checkpoint-frees")
    assert first.turn().endswith("True")


def test_a_job_waits_outside_while_a_stranger_has_the_memory(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """G07: its restore is not tried, for that would spoil the driver; who has how much is told; with room it is in."""
    first, second = job(served, "a"), job(served, "bb")
    assert first.turn() == "first load True"
    assert second.turn().endswith("True")
    second.process.kill()
    second.process.wait()
    for name, value in served.node.environment.items():
        monkeypatch.setenv(name, value)
    squatter = JobProcess("tests.gpu.worker")
    try:
        squatter.call("allocate", 4 * MIB)
        first.go()
        eventually(lambda: f"process {squatter.pid} holds {4 * MIB}" in served.why("a"), within=60)
    finally:
        squatter.end()
    assert first.says(60).endswith("True")
    assert not (served.node.folder / "faults").exists()  # the driver was not spoiled
