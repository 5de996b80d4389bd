"""Jobs in containers that see another clock or another host name than their agent: whatever they call themselves, the
agent of their machine knows them by what the kernel says of them."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.agent.rig import Rig, until
from tests.agent.workers import SIZE, Starts, agent_on, device_path, devices_end, emulated, starts, watched
from timeslice.agent import procfs
from timeslice.arena.process import start_time_of
from timeslice.arena.survey import arenas_of
from timeslice.backends.registry import get_backend
from timeslice.locks import scripts
from timeslice.locks.scripts import Request

__all__ = ["starts"]

TIME = ["unshare", "--time", "--boottime", "100000", "--fork", "--kill-child"]


def _may_unshare() -> bool:
    if shutil.which("unshare") is None:
        return False
    return subprocess.run([*TIME, "true"], capture_output=True, check=False).returncode == 0


needs_time = pytest.mark.skipif(not _may_unshare(), reason="a time namespace of one's own needs root and Linux 5.6")

# Says who it is by its own clock; then registers and holds, and has state.
JOB = f"""
import os, sys
import timeslice
from timeslice.client.identity import process_start
arena = timeslice.arena.Arena(timeslice.arena.Device.open(sys.argv[1]))
state = arena.allocate({SIZE})
lease = timeslice.Client(job="a").acquire("g")
print(os.getpid(), process_start(os.getpid()), flush=True)
for word in sys.stdin:
    if word == "yield\\n":
        lease.yield_()
    print(lease.state, flush=True)
"""


@pytest.fixture
async def rig(redis_url: str, prefix: str, tmp_path: Path) -> AsyncIterator[Rig]:
    made = Rig(redis_url, prefix, tmp_path)
    yield made
    await made.close()


def _environment(rig: Rig, node: str) -> dict[str, str]:
    names = {"URL": rig.url, "PREFIX": rig.prefix, "NODE": node}
    return {**os.environ, **{f"TIMESLICE_{name}": value for name, value in names.items()}}


class Inside:
    """A job that holds the group, as a process that ``prefix`` starts; ``start`` is its start time by its own clock."""

    def __init__(self, rig: Rig, folder: Path, prefix: list[str], node: str) -> None:
        line = [*prefix, sys.executable, "-c", "import timeslice.arena\n" + JOB, str(device_path(folder, "g"))]
        self.process = subprocess.Popen(
            line, stdin=-1, stdout=-1, text=True, env=_environment(rig, node), process_group=0
        )
        rig.processes.append(self.process)
        self.pid, self.start = 0, 0

    def inside(self) -> Inside:
        assert self.process.stdout is not None
        self.pid, self.start = map(int, self.process.stdout.readline().split())
        return self

    def do(self, word: str) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()


async def _enter(rig: Rig, folder: Path, prefix: list[str], node: str = "n1") -> Inside:
    job = Inside(rig, folder, prefix, node)
    await rig_holds(rig)
    return job.inside()


async def rig_holds(rig: Rig) -> None:
    async def holds() -> bool:
        return await rig.holds("a")

    await until(holds, "the job has the group")


async def _moves(rig: Rig, job: Inside) -> None:
    """A swap takes its state off the device."""
    assert job.do("yield") == "yielded"
    await rig.acquire("b")
    swap = await rig.plan("a", into="b")
    assert (await rig.order(rig.command(swap, "prepare", "a", into="b")))["step"] == "prepared"
    await rig.step("prepare", "commit")
    assert (await rig.order(rig.command(swap, "commit", "a", into="b")))["step"] == "done"
    (arena,) = arenas_of(job.pid)
    assert (arena.bytes_on_device, arena.bytes_on_host) == (0, SIZE)


@needs_time
async def test_a_job_in_a_time_namespace_is_moved_and_its_end_noticed(rig: Rig, clean_environment: Path) -> None:
    """It registers with a start time by its own clock, as a container does that was restored from an image: it is not
    taken for dead, and neither its state nor its lease is."""
    with devices_end(clean_environment, "g"):
        async with rig.agent(get_backend, **emulated("g")):
            job = await _enter(rig, clean_environment, TIME)
            assert job.start != start_time_of(job.pid)
            await until(lambda: watched(rig) == {job.pid: "a"}, "its registration is taken")
            assert await rig.events("LeaseReclaimed") == []
            await _moves(rig, job)
            os.kill(job.pid, signal.SIGKILL)

            async def gone() -> bool:
                return (await rig.view()).targets == {} and await rig.member("a") is None

            await until(gone, "its registration is gone, and the job with it")


@needs_time
async def test_a_lease_from_a_time_namespace_is_vouched_for_and_ends_with_its_process(
    rig: Rig, clean_environment: Path
) -> None:
    """The lease names the process by its own clock as well."""
    with devices_end(clean_environment, "g"):
        async with rig.agent(get_backend, **emulated("g")):
            job = await _enter(rig, clean_environment, TIME)
            await until(lambda: watched(rig) == {job.pid: "a"}, "its registration is taken")
            os.kill(job.pid, signal.SIGKILL)

            async def free() -> bool:
                return [event["why"] for event in await rig.events("LeaseReclaimed")] == ["its process ended"]

            await until(free, "the lease is over long before its time")


@needs_time
async def test_an_agent_in_a_time_namespace_knows_the_jobs_of_its_machine(rig: Rig) -> None:
    """There it is the agent's clock that is another one; a later process of that number is another one all the same."""
    process = rig.spawn(job="a")
    target = rig.target("a", process.pid)
    code = """
import asyncio, sys
from pathlib import Path
from timeslice.agent.targets import TargetRegistry
from timeslice.models import Target

async def main():
    registry = TargetRegistry("g", "n1", Path(sys.argv[2]), lambda: None)
    await registry.refresh({f"a/n1/{Target.model_validate_json(sys.argv[1]).pid}": sys.argv[1]})
    print([each.pid for each in registry.alive("a")], len(registry.ended))

asyncio.run(main())
"""
    for record, found in ((target, [process.pid]), (target.model_copy(update={"start": target.start - 9}), [])):
        line = [*TIME, sys.executable, "-c", code, record.model_dump_json(), str(rig.folder / "targets.json")]
        done = subprocess.run(line, capture_output=True, text=True, check=False)  # noqa: ASYNC221
        assert done.stdout == f"{found} {1 - len(found)}\n", done.stderr


# Starts a process whose boot clock is moved by no whole number of ticks, and says who that is, by its own clock.
RESTORED = """
import ctypes, os, signal
from timeslice.client.identity import process_start
assert ctypes.CDLL(None).unshare(0x80) == 0  # CLONE_NEWTIME
open("/proc/self/timens_offsets", "w").write("boottime 7 12345678")
if os.fork() == 0:
    print(os.getpid(), process_start(os.getpid()), flush=True)
    signal.pause()
os.wait()
"""


@needs_time
def test_an_offset_that_is_no_whole_tick_is_no_other_process() -> None:
    """A restored container's clock is moved by any number of nanoseconds; start times are told in ticks of 10 ms."""
    for _ in range(4):
        line = [sys.executable, "-c", RESTORED]
        process = subprocess.Popen(line, stdin=-1, stdout=-1, text=True, process_group=0)
        try:
            assert process.stdout is not None
            pid, told = map(int, process.stdout.readline().split())
            here = start_time_of(pid)
            assert here is not None
            assert told - here in {701, 702}
            assert procfs.is_start(pid, here, told)
            assert not procfs.is_start(pid, here, told + 3)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


async def test_a_job_whose_host_has_another_name_is_found_moved_and_vouched_for(
    rig: Rig, clean_environment: Path
) -> None:
    """The agent of its machine answers for it all the same: it has state on the device, and shows whose it is."""
    with devices_end(clean_environment, "g"):
        async with rig.agent(get_backend, **emulated("g")):
            job = await _enter(rig, clean_environment, [], node="3fa9c1d2e4b5")
            await until(lambda: watched(rig) == {job.pid: "a"}, "it is found")
            assert (await rig.view()).targets == {}
            await _moves(rig, job)


async def _holds_from_elsewhere(rig: Rig, pid: int) -> int:
    """A lease of a process that calls its host by a name that no node has, and never renews it; its deadline."""
    start = start_time_of(pid)
    assert start is not None
    request = Request("a-1", "a", "3fa9c1d2e4b5", pid, start, lease_ms=2000)
    await until(rig._beats, "the agent beats")
    granted = await rig.driver.run(scripts.acquire(rig.group, request))
    assert isinstance(granted, scripts.Granted)
    return (await rig.view()).number("deadline_ms")


async def test_a_lease_of_another_host_name_is_vouched_for_and_ends_with_its_process(
    rig: Rig, starts: Starts, clean_environment: Path
) -> None:
    """The process has nothing on the device yet: job, number and start time of the lease are its own, and it shows the
    job."""
    async with agent_on(rig, clean_environment, "g"):
        worker = starts(SHOWS="g/a")
        deadline_ms = await _holds_from_elsewhere(rig, worker.pid)

        async def renewed() -> bool:
            return (await rig.view()).number("deadline_ms") > deadline_ms

        await until(renewed, "the agent has renewed the lease")
        assert watched(rig) == {worker.pid: "a"}
        worker.process.kill()
        worker.process.wait()

        async def reclaimed() -> bool:
            return [event["why"] for event in await rig.events("LeaseReclaimed")] == ["its process ended"]

        await until(reclaimed, "the lease ends with it")


async def test_nobody_vouches_for_a_process_of_another_node(rig: Rig, starts: Starts, clean_environment: Path) -> None:
    """Its host is a node of the group, whose own agent answers for it: that ours sees one of that number is chance."""
    async with agent_on(rig, clean_environment, "g"):
        await rig.driver.run(scripts.heartbeat(rig.group, "3fa9c1d2e4b5", 600_000))
        await rig.driver.run(scripts.report(rig.group, "3fa9c1d2e4b5", 0, [], whole=True))
        worker = starts(JOB="a", GROUPS="g")
        worker.do("load")
        await until(lambda: watched(rig) == {worker.pid: "a"}, "it is found")
        await _holds_from_elsewhere(rig, worker.pid)

        async def expired() -> bool:
            return [event["why"] for event in await rig.events("LeaseReclaimed")] == ["expired"]

        await until(expired, "its own client did not renew it")
