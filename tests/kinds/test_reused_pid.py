"""A process id that passes from a job's process to another one."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.agent.rig import until
from tests.kinds.world import World
from tests.support.jobs import process_state, shows

pytestmark = pytest.mark.slow

_LAST = Path("/proc/sys/kernel/ns_last_pid")


def _fork_as(pid: int) -> bool:
    """Whether there is a sleeping child with exactly this process id now: another program may be faster."""
    _LAST.write_text(str(pid - 1))
    child = os.fork()
    if child == 0:
        signal.pause()
        os._exit(0)
    if child != pid:
        _end(child)
    return child == pid


def _may_choose() -> bool:
    try:
        _LAST.write_text(_LAST.read_text())
    except OSError:
        return False
    return True


def _end(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


@pytest.mark.skipif(not _may_choose(), reason="choosing the next process id needs root")
@pytest.mark.parametrize("watched", [True, False])
async def test_a_process_that_got_a_jobs_number_is_no_part_of_it(world: World, watched: bool) -> None:
    """The job's process ends, and another one that even shows the same job gets its number, under the agent's eyes or
    while no agent runs: the job's end is reported, its lease is over, and the other process is left alone."""
    agent = await world.spawn_agent("n1")
    await world.coordinate()
    await world.job("a")
    await world.enter("a")
    rig = world.rig("n1")
    rig.fake.load("a", 600)
    process = rig.processes[-1]
    rig.fake.write("a", {**rig.fake.read("a"), "pid": process.pid})
    await world.until(lambda view: "a" in [m.job for m in view.members if m.backend], "the agent has seen it")
    if not watched:
        agent.kill()
        agent.wait()
    assert shows(*"abcd"), "a child of ours shows that it is the job's"
    process.kill()
    process.wait()
    await until(lambda: _fork_as(process.pid), f"process id {process.pid} is used again")
    try:
        rig.fake.write("a", {**rig.fake.read("a"), "state": "suspended"})  # its memory went with it
        if not watched:
            await world.spawn_agent("n1")
        await world.until(lambda view: view.holder == "", "the lease has ended with its process")
        assert [event["why"] for event in await rig.events("LeaseReclaimed")] == ["its process ended"]
        await world.job("b")
        await world.enter("b")
        assert rig.fake.calls() == [], "the other process was taken for the job's"
        assert process_state(process.pid) == "S"
    finally:
        _end(process.pid)
