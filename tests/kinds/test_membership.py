"""Nodes join, leave and are forgotten while a swap is under way."""

from __future__ import annotations

from typing import Any

import pytest

from tests.agent.rig import until
from tests.kinds.world import World
from timeslice.locks import scripts
from timeslice.locks.view import GroupView

pytestmark = pytest.mark.slow

HANGS = {"prepare": "prepare", "commit": "suspend", "rollback": "restore"}


async def _hang_in(world: World, step: str) -> Any:
    """b has asked, and n1 hangs in this step of its swap. The waiter."""
    await world.load("a", "n1", "n2")
    await world.job("b", "n1", "n2")
    world.rig("n1").fake.knob(HANGS[step], hang=True)
    if step == "rollback":
        world.rig("n2").fake.knob("suspend", fail=1, kind="poisoned")
    turn = world.ask("b")
    await world.until(lambda view: view.state.get("swap_step") == step, f"the swap is at {step}")
    await until(lambda: f"{HANGS[step]} a" in world.rig("n1").fake.calls(), "n1 hangs")
    await world.until(_elsewhere_nothing, "the other nodes have said that nothing of a is on them")
    return turn


def _elsewhere_nothing(view: GroupView) -> bool:
    """A job that was let in is taken to be on every node, until that node's agent says otherwise."""
    return not [at for at in view.members if at.job == "a" and at.state == "resident" and at.node not in ("n1", "n2")]


async def _goes_on(world: World, turn: Any, *nodes: str) -> None:
    """n1 is let go: b gets in, a is out wherever it was, and these are the group's nodes."""
    assert not turn.task.done(), "nobody is let in while a node is in the middle of a step"
    (world.rig("n1").fake.folder / "release").touch()
    await world.inside(turn)
    assert {world.rigs[node].fake.state("a") for node in ("n1", "n2")} == {"suspended"}
    view = await world.view()
    assert (set(view.nodes), view.swap, view.holder) == (set(nodes), 0, "b")
    assert await world.first.events("LeaseReclaimed") == []


@pytest.mark.parametrize("step", HANGS)
async def test_a_node_that_joins_is_heard_before_anybody_is_let_in(world: World, step: str) -> None:
    """What is on the newcomer's devices is in no plan: it takes part in the next one, with what it has."""
    await world.start("n1", "n2")
    turn = await _hang_in(world, step)
    newcomer = world.rig("n3")
    await world.agent("n3")
    process = await newcomer.job("a", 300)
    await world.until(lambda view: "n3" in view.nodes and view.nodes["n3"].alive, "n3 has joined")
    await _goes_on(world, turn, "n1", "n2", "n3")
    assert newcomer.fake.state("a") == "suspended"
    assert process.poll() is None


@pytest.mark.parametrize("step", HANGS)
async def test_a_node_that_leaves_is_not_waited_for(world: World, step: str) -> None:
    """Its agent has nothing of any job, and is stopped with `leave`."""
    await world.start("n1", "n2")
    leaver = await world.spawn_agent("n3", leave=True)
    turn = await _hang_in(world, step)
    leaver.terminate()
    await world.until(lambda view: "n3" not in view.nodes, "n3 has left")
    assert leaver.wait(60) == 0
    await _goes_on(world, turn, "n1", "n2")


async def test_a_node_that_leaves_while_a_job_that_is_not_on_it_holds(world: World) -> None:
    """The holder is taken to be on every node, but its agent sees better: the group goes on without that node, and the
    holder is not disturbed."""
    await world.start("n1", "n2")
    leaver = await world.spawn_agent("n3", leave=True)
    await world.job("a", "n1", "n2")
    grant = await world.enter("a")
    await world.job("b", "n1", "n2")
    turn = world.ask("b")
    leaver.terminate()
    assert leaver.wait(60) == 0
    view = await world.view()
    assert (set(view.nodes), view.holder, view.state["token"]) == ({"n1", "n2"}, "a", str(grant.token))
    await world.leave("a")
    await world.inside(turn)


async def test_a_node_that_leaves_with_a_process_of_the_holder_is_waited_for(world: World) -> None:
    """It may have loaded something since the last look: nobody is let in until the agent is back."""
    await world.start("n1", "n2")
    leaver = await world.spawn_agent("n3", leave=True)
    await world.load("a", "n1", "n2", "n3")
    await world.enter("a")
    leaver.terminate()
    assert leaver.wait(60) == 0
    await world.leave("a")
    await world.job("b", "n1")
    turn = world.ask("b")
    await world.until(lambda view: "n3 unreachable" in view.state["reason"], "n3 is waited for")
    assert not turn.task.done()
    await world.spawn_agent("n3")
    await world.inside(turn)
    assert world.rig("n3").fake.state("a") == "suspended"


@pytest.mark.parametrize("step", HANGS)
async def test_a_node_that_is_forgotten_is_not_waited_for(world: World, step: str) -> None:
    """Its machine burns; the group names it, and goes on once an operator has said that it will not come back."""
    await world.start("n1", "n2")
    dead = await world.spawn_agent("n3")
    turn = await _hang_in(world, step)
    dead.kill()
    dead.wait()
    await world.until(lambda view: not view.nodes["n3"].alive, "n3 is overdue")
    await world.first.driver.run(scripts.forget(world.first.group, "n3", "test", "it burned"))
    await _goes_on(world, turn, "n1", "n2")
