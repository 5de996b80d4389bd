"""A job's process is moved by the groups that it takes part in, and by no other that the same agent serves."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.agent.rig import Rig
from tests.security.registry import Known, Start
from tests.support.jobs import process_state, shows
from timeslice.backends.registry import get_backend

BOTH = """
import time
from timeslice.client.identity import show_membership
show_membership("g", "a")
show_membership("other", "a")
print("up", flush=True)
time.sleep(600)
"""
FOREIGN = [
    {"pass_fds": shows("a", group="other")},
    {"env": {"TIMESLICE_JOB": "a", "TIMESLICE_GROUPS": "other,gg"}},
    {"env": {"TIMESLICE_JOB": "a"}},
]
KINDS = ["memory-file", "environment", "no-group"]


@pytest.mark.parametrize("options", FOREIGN, ids=KINDS)
async def test_a_process_of_another_group_is_not_this_ones(known: Known, start: Start, options: dict[str, Any]) -> None:
    """That it is the same job's says nothing: jobs of one name may be in groups of two tenants."""
    assert "does not show that it takes part in job a of group g" in await known.claim(start(**options))
    assert known.registry.jobs() == ()


async def test_a_process_may_take_part_in_two_groups(known: Known, start: Start) -> None:
    """F04: two roles of one job in one process; the library shows each group that it registers in."""
    assert await known.claim(start([sys.executable, "-c", BOTH])) == ""


async def test_no_client_of_another_group_can_have_a_holder_stopped(
    redis_url: str, prefix: str, tmp_path: Path, start: Start
) -> None:
    """The whole way: a job holds one group; who may write to another group of the agent registers its process there,
    and orders it out. It is never stopped."""
    theirs, ours = (Rig(redis_url, prefix, tmp_path, name=name) for name in ("theirs", "g"))
    victim = start(env={"TIMESLICE_JOB": "a", "TIMESLICE_GROUPS": "theirs"})
    backends = {"theirs": ["process"], "g": ["process"]}
    async with theirs.agent(get_backend, groups=("theirs", "g"), backends=backends):
        await theirs.register(theirs.target("a", victim))
        await theirs.acquire("a")
        target = ours.target("a", victim)
        await ours.driver.client.hset(ours.group.targets, f"a/{ours.node}/{victim}", target.model_dump_json())
        swap = await ours.begin_swap("a", into="b")
        await ours.order(ours.command(swap, "prepare", "a", into="b"))
        await ours.step("prepare", "commit")
        await ours.order(ours.command(swap, "commit", "a", into="b"))
        assert process_state(victim) not in "tT"
        assert (await theirs.view()).holder != ""
    await ours.close()
    await theirs.close()
