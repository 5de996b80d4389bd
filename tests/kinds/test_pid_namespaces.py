"""Jobs in pid namespaces of their own, as in containers, with an agent on the host; and the reverse."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from tests.agent.rig import Rig, until
from tests.agent.workers import SIZE, device_path, devices_end, emulated, stored, watched
from timeslice.agent import procfs
from timeslice.agent.targets import TargetRegistry
from timeslice.arena.survey import arenas_of
from timeslice.backends.registry import get_backend
from timeslice.locks import scripts

UNSHARE = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]


def _may_unshare() -> bool:
    if shutil.which("unshare") is None:
        return False
    return subprocess.run([*UNSHARE, "true"], capture_output=True, check=False).returncode == 0


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not _may_unshare(), reason="a pid namespace of one's own needs root"),
]

# Registers itself with its own number, holds the group, and answers when it is spoken to.
JOB = f"""
import os, sys
import timeslice
from timeslice.arena import Arena, Device
arena = Arena(Device.open(sys.argv[1]))
state = arena.allocate({SIZE})
state[:] = b"7" * {SIZE}
if "channel" in sys.argv:
    workload = timeslice.register_arena("g", arena)
client = timeslice.Client()
lease = client.acquire("g") if "idle" not in sys.argv else None
print(os.getpid(), flush=True)
for word in map(str.strip, sys.stdin):
    if word == "yield":
        lease.yield_()
    elif word == "hold":
        lease = client.acquire("g")
    print("same" if bytes(state[:4]) == b"7777" else "different", flush=True)
"""


class Inside:
    """A job's process whose number in its own pid namespace is ``inner``, and here ``pid``."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        assert process.stdout is not None
        self.inner = int(process.stdout.readline())
        (self.pid,) = map(int, Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split())

    def do(self, word: str) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()


@pytest.fixture
async def rig(redis_url: str, prefix: str, tmp_path: Path) -> AsyncIterator[Rig]:
    made = Rig(redis_url, prefix, tmp_path)
    yield made
    await made.close()


Enter = Callable[..., Awaitable[Inside]]


@pytest.fixture
def enter(rig: Rig, clean_environment: Path) -> Enter:
    """Start a job's process in a pid namespace of its own; it has the group when this returns."""

    async def start(job: str = "a", *words: str) -> Inside:
        names = {"JOB": job, "URL": rig.url, "PREFIX": rig.prefix, "NODE": rig.node}
        environment = {**os.environ, **{f"TIMESLICE_{name}": value for name, value in names.items()}}
        line = [*UNSHARE, sys.executable, "-c", JOB, str(device_path(clean_environment, "g")), *words]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        process = subprocess.Popen(line, env=environment, **pipes)  # type: ignore[call-overload]  # noqa: ASYNC220
        rig.processes.append(process)
        return await asyncio.to_thread(Inside, process)  # the agent of this loop has to beat meanwhile

    return start


async def _moved(rig: Rig, out: str, into: str) -> None:
    """A planned swap, to its end."""
    swap = await rig.plan(out, into=into)
    prepared = await rig.order(rig.command(swap, "prepare", out, into=into))
    assert prepared["step"] == "prepared", prepared
    await rig.step("prepare", "commit")
    done = await rig.order(rig.command(swap, "commit", out, into=into))
    assert done["step"] == "done", done
    assert isinstance(await rig.promote(swap), scripts.Promoted)


@pytest.mark.parametrize("way", ["arena", "channel"])
async def test_a_container_is_moved_by_the_numbers_of_the_host(
    rig: Rig, enter: Enter, clean_environment: Path, way: str
) -> None:
    """G27: it registers as process 1 of its own namespace; the agent knows which one that is here, suspends it from
    outside or over its channel (whose name has the other number), brings it back, and sees it end."""
    with devices_end(clean_environment, "g"):
        async with rig.agent(get_backend, **emulated("g", backends={"g": [way]})):
            job = await enter("a", *([way] if way == "channel" else []))
            assert job.inner != job.pid
            await until(lambda: watched(rig) == {job.inner: "a"}, "its registration is taken")
            view = await rig.view()
            assert view.holder == "a"
            assert f"a/n1/{job.inner}" in view.targets
            assert job.do("yield") == "same"
            await rig.acquire("b")
            await _moved(rig, "a", "b")
            (arena,) = arenas_of(job.pid)
            assert (arena.bytes_on_device, arena.bytes_on_host) == (0, SIZE)
            await rig.yield_("b")
            await rig.acquire("a")
            await _moved(rig, "b", "a")
            assert arenas_of(job.pid)[0].bytes_on_device == SIZE
            assert job.do("look") == "same"
            await rig.yield_("a")
            os.kill(job.pid, signal.SIGKILL)

            async def gone() -> bool:
                return (await rig.view()).targets == {} and await rig.member("a") is None

            await until(gone, "its registration is gone, and the job with it")


async def test_the_lease_of_a_container_ends_with_its_process(rig: Rig, enter: Enter, clean_environment: Path) -> None:
    """The lease names the process by its number in there: the agent vouches for that one, and tells its end."""
    with devices_end(clean_environment, "g"):
        async with rig.agent(get_backend, **emulated("g")):
            job = await enter()
            await until(lambda: watched(rig) == {job.inner: "a"}, "its registration is taken")
            assert (await rig.view()).holder == "a"
            os.kill(job.pid, signal.SIGKILL)

            async def free() -> bool:
                return [event["why"] for event in await rig.events("LeaseReclaimed")] == ["its process ended"]

            await until(free, "the lease is over long before its time")


async def test_an_agent_that_starts_again_knows_a_container(rig: Rig, enter: Enter, clean_environment: Path) -> None:
    """What it wrote down is the registration as it was told; one that ended meanwhile has ended."""
    with devices_end(clean_environment, "g"):
        async with rig.agent(get_backend, **emulated("g")):
            job = await enter()
            await until(lambda: watched(rig) == {job.inner: "a"}, "its registration is taken")
            assert job.do("yield") == "same"
        await rig.driver.client.delete(rig.group.targets)
        async with rig.agent(get_backend, **emulated("g")):

            async def told() -> bool:
                return list((await rig.view()).targets) == [f"a/n1/{job.inner}"]

            await until(told, "its registration is told again, as it was")
        os.kill(job.pid, signal.SIGKILL)
        job.process.wait()
        if not procfs.sees_all():
            return  # from here nobody could tell whether it ended
        async with rig.agent(get_backend, **emulated("g")):

            async def gone() -> bool:
                return (await rig.view()).targets == {}

            await until(gone, "it is known to have ended")


async def test_two_containers_of_a_job_with_the_same_number_are_both_known(
    rig: Rig, enter: Enter, clean_environment: Path
) -> None:
    """Both are process 1 of their namespaces, and both register before an agent looks. Each is watched, and each one's
    end takes its own registration away."""
    with devices_end(clean_environment, "g"):
        async with rig.agent(get_backend, **emulated("g", backends={"g": ["channel"]})):
            pass  # the node is the group's, and nobody looks
        first, second = await enter("a", "channel", "idle"), await enter("a", "channel", "idle")
        assert first.inner == second.inner
        async with rig.agent(get_backend, **emulated("g", backends={"g": ["channel"]})):
            await until(lambda: [each["pid"] for each in stored(rig)] == [first.inner] * 2, "both are known")
            os.kill(first.pid, signal.SIGKILL)

            async def one() -> bool:
                return len((await rig.view()).targets) == 1

            await until(one, "one is gone")
            (left,) = stored(rig)
            assert left["start"] == procfs.look_at(second.pid).start  # type: ignore[union-attr]
            os.kill(second.pid, signal.SIGKILL)

            async def none() -> bool:
                return (await rig.view()).targets == {}

            await until(none, "the other one is gone")


@pytest.mark.skipif(not procfs.sees_all(), reason="only who sees all processes can tell that one is gone")
async def test_a_container_that_ended_before_anybody_looked_is_forgotten(
    rig: Rig, enter: Enter, clean_environment: Path
) -> None:
    """F05: its registration is not refused for ever. One that holds or waits is left to its lease, for what can't be
    seen from here might live in a sandbox."""
    with devices_end(clean_environment, "g"):
        # For a node that is silent nobody would be let in, and the job's process may take long to start.
        async with rig.agent(get_backend, **emulated("g", ttl_s=600.0)):
            pass
        job = await enter()
        assert job.do("yield") == "same"
        os.kill(job.pid, signal.SIGKILL)
        job.process.wait()
        records = (await rig.view()).targets
        assert list(records) == [f"a/n1/{job.inner}"]
        registry = TargetRegistry("g", "n1", rig.folder / "targets.json", lambda: None)
        await registry.refresh(records, busy={job.inner})
        assert "it is in another pid namespace" in registry.refused[f"a/n1/{job.inner}"]
        assert registry.ended == set()
        async with rig.agent(get_backend, **emulated("g")):

            async def gone() -> bool:
                return (await rig.view()).targets == {}

            await until(gone, "its registration is gone")


def _agent_inside(rig: Rig) -> subprocess.Popen[str]:
    options = rig.options(groups=["g"], backends={"g": ["process"]}, ttl_s=0.9)
    line = [*UNSHARE, sys.executable, "-m", "tests.kinds.daemon", "agent", json.dumps(options)]
    process = subprocess.Popen(line, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parent.parent.parent)
    rig.processes.append(process)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


async def test_an_agent_that_can_not_see_the_host_says_what_to_do(rig: Rig) -> None:
    """G27: an agent without the host's pid namespace refuses a registration from there, touches nobody, and names the
    remedy."""
    process = rig.spawn(job="a")
    agent = _agent_inside(rig)
    await rig.register(rig.target("a", process.pid))

    async def told() -> bool:
        stored = await rig.driver.client.hget(rig.keys.node_state(rig.node), "complaints")
        return b"with the host's pid namespace (hostPID)" in (stored or b"")

    await until(told, "the complaint is in the node's record")
    assert watched(rig) == {}
    agent.kill()
    agent.wait()
