"""Processes on real devices, as NVIDIA's management library tells them: over a stand-in for it. No GPU is involved."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.agent.rig import Rig, until
from tests.agent.workers import watched
from tests.gpu.fixtures import gpu_node
from tests.gpu.node import GIB, Node, uuid
from tests.support.jobs import shows
from timeslice.agent.discovery import nvml
from timeslice.agent.discovery.environment import Sighting
from timeslice.agent.proof import Shown
from timeslice.locks import scripts
from timeslice.locks.scripts import Observed

__all__ = ["gpu_node"]

MIB = 1 << 20
ROOT = Path(__file__).parent.parent.parent

StartAgent = Callable[..., "subprocess.Popen[str]"]
StartJob = Callable[..., int]


@pytest.fixture
def start_agent(rig: Rig, gpu_node: Node) -> StartAgent:
    """An agent on that node; returns when it serves."""

    def start(devices: dict[str, list[str]]) -> subprocess.Popen[str]:
        options = rig.options(groups=list(devices), backends={name: ["process"] for name in devices}, ttl_s=0.9)
        line = [sys.executable, "-m", "tests.kinds.daemon", "agent", json.dumps({**options, "devices": devices})]
        environment = {**os.environ, **gpu_node.environment}
        process = subprocess.Popen(line, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment)
        rig.processes.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    return start


@pytest.fixture
def start_job(rig: Rig) -> Iterator[StartJob]:
    """A process that shows a job and its groups; its number."""
    started: list[subprocess.Popen[Any]] = []

    def start(job: str = "a", groups: str = "g") -> int:
        shown = {"TIMESLICE_JOB": job, "TIMESLICE_GROUPS": groups, "TIMESLICE_PREFIX": rig.prefix}
        started.append(subprocess.Popen(["/bin/sleep", "600"], env=shown))
        return started[-1].pid

    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.fixture
def start_driver(rig: Rig) -> Iterator[Callable[[], int]]:
    """A process that shows the group and starts another one, which shows the job alone."""
    started: list[subprocess.Popen[Any]] = []
    code = "import os, subprocess; os.environ['TIMESLICE_JOB'] = 'a'; subprocess.run(['/bin/sleep', '600'])"

    def start() -> int:
        environment = {"TIMESLICE_PREFIX": rig.prefix}
        line = [sys.executable, "-c", code]
        started.append(subprocess.Popen(line, pass_fds=shows("a"), env=environment, process_group=0))
        return started[-1].pid

    yield start
    for process in started:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


async def seen_again(rig: Rig, gpu_node: Node, start_job: StartJob) -> dict[int, str]:
    """Who is watched once the agent has looked at everybody anew, for it has found one that was started now."""
    last = start_job("last")
    gpu_node.write(last, "state running", f"alloc {uuid(0)} {MIB}")
    await until(lambda: last in watched(rig), "it has looked")
    return {pid: job for pid, job in watched(rig).items() if pid != last}


async def test_only_the_child_with_device_memory_is_taken(
    rig: Rig, gpu_node: Node, start_agent: StartAgent, start_job: StartJob
) -> None:
    """G14: of four processes that show the job, one has memory, one is told with 0 bytes, one is on no device, and one
    of another job is told as well: the first is taken, and the last is its own job's."""
    start_agent({"g": ["0"]})
    worker, empty, helper, other = start_job(), start_job(), start_job(), start_job("b")
    gpu_node.write(empty, "state running", f"context {uuid(0)} 0")
    for pid in (worker, other):
        gpu_node.write(pid, "state running", f"context {uuid(0)} {MIB}")
    await until(lambda: watched(rig).keys() == {worker, other}, "who has memory is found")
    gpu_node.write(helper, "state running", f"alloc {uuid(0)} {MIB}")
    await until(lambda: helper in watched(rig), "the helper has memory now")
    assert await seen_again(rig, gpu_node, start_job) == {worker: "a", other: "b", helper: "a"}


async def test_a_process_of_which_no_figure_is_told_may_have_some(
    rig: Rig, gpu_node: Node, start_agent: StartAgent, start_job: StartJob
) -> None:
    """G14: in some containers the driver tells no bytes; whoever is in its list counts."""
    gpu_node.set("novalue", 1)
    start_agent({"g": ["0"]})
    worker, _ = start_job(), start_job()
    gpu_node.write(worker, "state running", f"alloc {uuid(0)} {MIB}")
    await until(lambda: worker in watched(rig), "it is found")
    assert await seen_again(rig, gpu_node, start_job) == {worker: "a"}


async def test_each_group_looks_at_its_own_devices(
    rig: Rig, gpu_node: Node, start_agent: StartAgent, start_job: StartJob
) -> None:
    """F04: two groups of one node, one of them on an instance of a divided GPU. A process that may be in both is in
    that one on whose device it is."""
    gpu_node.add_device(uuid(1), GIB)
    gpu_node.add_device("MIG-a", GIB // 4, parent=uuid(1))
    gpu_node.add_device("MIG-b", GIB // 4, parent=uuid(1))
    start_agent({"g": ["0"], "h": ["MIG-b"]})
    first, second, third = start_job(groups="g,h"), start_job(groups="g,h"), start_job(groups="g,h")
    gpu_node.write(third, "state running", f"alloc MIG-a {MIB}")
    gpu_node.write(first, "state running", f"alloc {uuid(0)} {MIB}")
    gpu_node.write(second, "state running", f"alloc MIG-b {MIB}")
    await until(lambda: first in watched(rig) and second in watched(rig, "h"), "each is found")
    assert await seen_again(rig, gpu_node, start_job) == {first: "a"}
    assert watched(rig, "h") == {second: "a"}


async def test_a_suspended_job_of_which_nothing_is_remembered_is_found(
    rig: Rig, gpu_node: Node, start_agent: StartAgent, start_job: StartJob
) -> None:
    """G14: suspended processes vanish from the driver's list. An agent that has lost its folder takes all that show the
    job and the group, for the group says that the job is suspended here; of other jobs it takes nobody."""
    pulse = await rig.driver.run(scripts.heartbeat(rig.group, rig.node, 60_000))
    lost = [Observed("a", "suspended", host_bytes=MIB, backend="cuda")]
    await rig.driver.run(scripts.report(rig.group, rig.node, pulse.counter, lost, whole=True))
    worker, _ = start_job(), start_job("b")
    start_agent({"g": ["0"]})
    await until(lambda: worker in watched(rig), "it is found")
    assert await seen_again(rig, gpu_node, start_job) == {worker: "a"}


async def test_a_library_that_fails_finds_nobody_and_stops_nothing(
    rig: Rig, gpu_node: Node, start_agent: StartAgent, start_job: StartJob
) -> None:
    """The agent goes on, and finds them as soon as it is told of them again."""
    agent = start_agent({"g": ["0"]})
    gpu_node.set("nvml_lost", uuid(0))
    worker = start_job()
    gpu_node.write(worker, "state running", f"alloc {uuid(0)} {MIB}")
    await rig.job("c")
    await until(lambda: "c" in watched(rig).values(), "it has looked at the group since")
    assert worker not in watched(rig)
    gpu_node.clear("nvml_lost")
    await until(lambda: worker in watched(rig), "it is found")
    assert agent.poll() is None


async def _told_before(rig: Rig, state: str, *, host_bytes: int = 0, device_bytes: int = 0) -> None:
    """The group knows that job a is here, in this state, from an agent whose folder is lost."""
    pulse = await rig.driver.run(scripts.heartbeat(rig.group, rig.node, 60_000))
    told = [Observed("a", state, host_bytes, device_bytes, "cuda")]
    await rig.driver.run(scripts.report(rig.group, rig.node, pulse.counter, told, whole=True))


async def _beaten(rig: Rig) -> None:
    """The agent has looked at the group, and reported, since now."""
    process = await rig.job("c")
    await until(lambda: process.pid in watched(rig), "it has looked at the group since")


async def test_a_suspended_job_is_found_though_the_library_fails(
    rig: Rig, gpu_node: Node, start_agent: StartAgent, start_job: StartJob
) -> None:
    """G14: it is on no device, so the driver's list is not what finds it. Nothing is remembered of it, and it is never
    told as absent: its state would count as lost."""
    worker = start_job()
    start_agent({"g": ["0"]})
    gpu_node.set("nvml_lost", uuid(0))
    await _told_before(rig, "suspended", host_bytes=MIB)
    await until(lambda: watched(rig) == {worker: "a"}, "it is found")
    for _ in range(2):
        await _beaten(rig)
    assert await rig.member_state("a") == "suspended"


async def test_a_job_is_not_told_as_out_while_nobody_can_look(
    rig: Rig, gpu_node: Node, start_agent: StartAgent, start_job: StartJob
) -> None:
    """The group says that it is on the device, nothing is remembered of it, and the driver's list fails: no other job
    comes in, with the reason, until it can be told again."""
    worker = start_job()
    start_agent({"g": ["0"]})
    gpu_node.set("nvml_lost", uuid(0))
    gpu_node.write(worker, "state running", f"alloc {uuid(0)} {MIB}")
    await _told_before(rig, "resident", device_bytes=MIB)
    for _ in range(2):  # what one look finds is told before the next
        await _beaten(rig)
    assert await rig.member_state("a") == "resident"
    await rig.acquire("b")
    swap = await rig.plan("a", into="b")
    refused = await rig.order(rig.command(swap, "prepare", "a", into="b"))
    assert refused["step"] == "failed"
    assert "job a may have processes on node n1 that did not register" in refused["error"]
    gpu_node.clear("nvml_lost")
    await until(lambda: worker in watched(rig), "it is found")


async def test_more_processes_of_a_suspended_job_are_found_when_nothing_is_remembered(
    rig: Rig, start_agent: StartAgent, start_driver: Callable[[], int]
) -> None:
    """The driver stands in Redis, as it registered; its engine, which has the state, shows the job alone and never
    registered. Both are the job's for an agent that has lost its folder."""
    await _told_before(rig, "suspended", host_bytes=MIB)
    driver = start_driver()
    await rig.register(rig.target("a", driver))
    start_agent({"g": ["0"]})
    await until(lambda: len(watched(rig)) == 2, "both are found")
    assert driver in watched(rig)
    assert set(watched(rig).values()) == {"a"}


def test_numbers_of_a_container_are_told_from_the_hosts() -> None:
    """G27: most drivers count as the host does. Where one counts as the container does, its number means the process
    in there only if nobody here has that number."""
    inside = Sighting(pid=4711, start=1, uid=0, inner=7, shown=Shown(frozenset(), frozenset({"a"}), frozenset()))
    plain = Sighting(pid=7, start=1, uid=0, inner=7, shown=Shown(frozenset(), frozenset({"a"}), frozenset()))
    assert nvml.is_among(inside, {4711}, {4711, 7})
    assert nvml.is_among(inside, {7}, {4711})
    assert not nvml.is_among(inside, {7}, {4711, 7})
    assert nvml.is_among(plain, {7}, {7})
    assert not nvml.is_among(plain, {8}, {7})
