"""An agent that is killed with SIGKILL at every point of a step, and started again on the same state folder."""

from __future__ import annotations

from typing import Any, Literal

import pytest

from tests.agent.rig import Rig, until
from timeslice.locks import scripts


async def _commit(rig: Rig, swap: int, out: str, into: str) -> Any:
    assert (await rig.order(rig.command(swap, "prepare", out, into=into)))["step"] == "prepared"
    await rig.step("prepare", "commit")
    return rig.command(swap, "commit", out, into=into)


# In the fast tier: an intent of which nothing was done, one that was done, and the other kind of order.
@pytest.mark.parametrize(
    ("when", "operation"),
    [
        pytest.param("before", "prepare", marks=pytest.mark.slow),
        ("after", "prepare"),
        ("before", "suspend"),
        pytest.param("after", "suspend", marks=pytest.mark.slow),
        pytest.param("before", "restore", marks=pytest.mark.slow),
        ("after", "restore"),
        pytest.param("before", "release", marks=pytest.mark.slow),
        pytest.param("after", "release", marks=pytest.mark.slow),
    ],
)
async def test_an_agent_killed_in_a_step_finishes_it_when_it_is_back(
    rig: Rig, operation: str, when: Literal["before", "after"]
) -> None:
    """Killed between intent and result, the next run finishes the same order from what it observes."""
    agent = rig.spawn_agent()
    await rig.job("a", 600)
    await rig.job("b", 500)
    await rig.swap("a", into="b")  # so that a later order has something to restore
    await rig.yield_("b")
    await rig.acquire("a")
    swap = await rig.plan("b", into="a")
    rig.fake.knob(operation, die=when)
    if operation == "prepare":
        command = rig.command(swap, "prepare", "b", into="a")
    else:
        command = await _commit(rig, swap, "b", "a")
    await rig.send(command)
    assert agent.wait(60) == -9
    rig.fake.write("knobs", {})
    rig.spawn_agent()
    answer = await rig.outcome(command)
    if operation == "prepare":
        assert answer["step"] == "prepared"
        assert rig.fake.locked("b")
    else:
        assert answer["step"] == "done"
        assert (rig.fake.state("a"), rig.fake.locked("a"), rig.fake.state("b")) == ("resident", False, "suspended")
        assert isinstance(await rig.promote(swap), scripts.Promoted)
    await rig.idle()


async def test_an_agent_killed_in_a_step_finishes_it_for_a_new_owner_of_the_group(rig: Rig) -> None:
    """Another coordinator owns the group when the agent is back: it waits for the node, so the order is finished."""
    agent = rig.spawn_agent()
    await rig.job("a", 600)
    swap = await rig.begin_swap("a", into="b")
    command = await _commit(rig, swap, "a", "b")
    rig.fake.knob("suspend", die="after")
    await rig.send(command)
    assert agent.wait(60) == -9
    rig.fake.write("knobs", {})
    await rig.driver.run(scripts.disown(rig.group, "c1"))
    mine = await rig.driver.run(scripts.own(rig.group, "c2"))
    assert isinstance(mine, scripts.Mine)
    assert mine.epoch > rig.epoch
    rig.spawn_agent()
    assert (await rig.outcome(command))["step"] == "done"
    rig.epoch = mine.epoch
    assert isinstance(await rig.promote(swap, "first load"), scripts.Promoted)


async def test_an_order_of_a_deposed_owner_is_not_begun(rig: Rig) -> None:
    """One that the node has not begun is the new owner's to give."""
    async with rig.agent():
        await rig.job("a", 600)
        swap = await rig.begin_swap("a", into="b")
        await rig.driver.run(scripts.disown(rig.group, "c1"))
        await rig.driver.run(scripts.own(rig.group, "c2"))
        await rig.send(rig.command(swap, "prepare", "a", into="b"))
        await rig.idle()
        assert rig.fake.calls() == []


async def test_the_answer_survives_the_agent(rig: Rig) -> None:
    """The same command id gets the same answer from a later run, and nothing is done twice."""
    first = rig.spawn_agent()
    await rig.job("a", 600)
    swap = await rig.begin_swap("a", into="b")
    command = rig.command(swap, "prepare", "a", into="b")
    answer = await rig.order(command)
    await rig.idle()
    first.kill()
    first.wait()
    rig.fake.write("a", {**rig.fake.read("a"), "locked": False})  # a second run would lock it again
    rig.spawn_agent()
    await rig.send(command)
    await rig.idle()
    assert await rig.outcome(command) == answer
    assert rig.fake.calls() == ["prepare a"]


async def test_a_rollback_after_a_crash_knows_what_the_swap_did(rig: Rig) -> None:
    """Killed after the suspend, then told to roll back: the job is on the device again."""
    agent = rig.spawn_agent()
    await rig.job("a", 600)
    swap = await rig.begin_swap("a", into="b")
    command = await _commit(rig, swap, "a", "b")
    rig.fake.knob("suspend", die="after")
    await rig.send(command)
    assert agent.wait(60) == -9
    assert rig.fake.state("a") == "suspended"
    rig.fake.write("knobs", {})
    await rig.step("commit", "rollback")
    rollback = rig.command(swap, "rollback", "a", into="b")
    await rig.send(rollback)
    rig.spawn_agent()
    assert (await rig.outcome(rollback))["step"] == "rolled back"
    assert (rig.fake.state("a"), rig.fake.locked("a")) == ("resident", False)
    await rig.settle(swap)


async def test_a_swap_that_vanished_leaves_nobody_locked(rig: Rig) -> None:
    """The group lost its swap while a job was locked for it: the job runs on by itself, without any order."""
    async with rig.agent(ttl_s=1.5):
        await rig.job("a", 600)
        swap = await rig.begin_swap("a", into="b")
        await rig.order(rig.command(swap, "prepare", "a", into="b"))
        assert rig.fake.locked("a")
        await rig.driver.client.hset(rig.group.state, "swap_id", "0")
        await until(lambda: not rig.fake.locked("a"), "job a runs on")
        assert rig.fake.state("a") == "resident"


async def test_an_agent_that_died_in_a_swap_that_vanished_tidies_up(rig: Rig) -> None:
    """Killed in a commit, restarted when the swap is gone: the state is what is observed, and nobody is locked."""
    agent = rig.spawn_agent(ttl_s=1.5)
    await rig.job("a", 600)
    swap = await rig.begin_swap("a", into="b")
    command = await _commit(rig, swap, "a", "b")
    rig.fake.knob("suspend", die="before")
    await rig.send(command)
    assert agent.wait(60) == -9
    rig.fake.write("knobs", {})
    await rig.driver.client.hset(rig.group.state, "swap_id", "0")
    rig.spawn_agent(ttl_s=1.5)
    await until(lambda: not rig.fake.locked("a"), "job a runs on")
    assert rig.fake.state("a") == "resident"
    await rig.idle()
