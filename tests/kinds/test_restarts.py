"""The agent is killed and started again while jobs are suspended, and some of what is known gets lost."""

from __future__ import annotations

import shutil

import pytest

from tests.client.world import Job
from tests.kinds.devices import Devices, comes_back, inside, leaves, tell
from tests.support.jobs import wait_until

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("lost", ["nothing", "state folder", "data", "state folder and data"])
def test_a_suspended_job_comes_back_after_its_agent_died(devices: Devices, lost: str) -> None:
    """Its bytes are in its own process; whoever serves the node next finds it, whatever is lost meanwhile."""
    devices.start("g")
    first = devices.enters("a")
    leaves(first)
    second = devices.enters("b")
    leaves(second)
    before = devices.view().counter
    devices.agent.kill()
    devices.agent.wait()
    if "folder" in lost:
        shutil.rmtree(devices.state_dir)
    if "data" in lost:
        devices.redis.flushall()
    tell(first, "hold")
    assert first.line() == "asks"
    devices.start_agent()
    if "data" in lost:
        assert inside_after_quiet(devices, first) == "restored"
    else:
        assert inside(first) == "restored"
    assert devices.view().counter > before
    leaves(first)
    assert comes_back(second) == "restored"


def inside_after_quiet(devices: Devices, job: Job) -> str:
    """Nobody is granted for a lease after data was lost, while agents and jobs come back; that time is cut short here
    once all that came back is there."""
    wait_until(lambda: {"a", "b"} <= set(devices.view().jobs), "the agent knows both jobs again")
    view = devices.view()
    assert view.number("quiet_until_ms") > view.now_ms
    assert view.holder == ""
    devices.redis.hset(devices.group().state, "quiet_until_ms", view.now_ms)
    return inside(job)


@pytest.mark.parametrize("operation", ["lock", "checkpoint", "restore", "unlock"])
def test_an_agent_killed_in_mid_move_is_followed_by_one_that_finishes_it(devices: Devices, operation: str) -> None:
    """SIGKILL while the device's tool is at work, which goes on; the next agent brings both jobs where they belong."""
    devices.start("g")
    first = devices.enters("a")
    leaves(first)
    second = devices.enters("b")
    tell(first, "hold")
    assert first.line() == "asks"
    devices.misbehave("g", f"{operation}:hang=3")
    leaves(second)
    wait_until(lambda: at_work(devices, operation), "it is being moved")
    devices.agent.kill()
    devices.agent.wait()
    devices.misbehave("g", "")
    devices.start_agent()
    assert inside(first) == "restored"
    leaves(first)
    assert comes_back(second) == "restored"


def at_work(devices: Devices, operation: str) -> bool:
    """Whether the swap has come as far as this operation, as the group sees it."""
    view = devices.view()
    if operation in {"lock", "checkpoint"}:
        return view.nodes["n1"].step == ("begun prepare" if operation == "lock" else "begun commit")
    return view.jobs["b"].residency == "suspended"
