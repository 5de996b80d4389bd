"""An agent that is stopped (SIGSTOP) past its time to live in the middle of a step, and goes on later."""

from __future__ import annotations

import signal

import pytest

from tests.agent.rig import until
from tests.kinds.world import Turn, World
from timeslice.locks import scripts
from timeslice.locks.view import GroupView

pytestmark = pytest.mark.slow

NODES = ("n1", "n2")
IN, OUT = dict.fromkeys(NODES, ("resident", False)), dict.fromkeys(NODES, ("suspended", False))


async def _stopped_in(world: World, operation: str) -> Turn:
    """a comes back, b has to leave, and n2's agent is stopped while it does this. a's turn."""
    await world.start("n1")
    agent = await world.spawn_agent("n2")
    await world.load("a")
    await world.load("b")
    fake = world.rig("n2").fake
    fake.knob(operation, hang=True)
    done = len(fake.calls())
    turn = world.ask("a")
    await until(lambda: any(call.startswith(operation) for call in fake.calls()[done:]), f"n2 is in {operation}")
    agent.send_signal(signal.SIGSTOP)
    fake.write("knobs", {})
    await world.until(lambda view: not view.nodes["n2"].alive, "n2 is overdue")
    return turn


@pytest.mark.parametrize("operation", ["prepare", "suspend", "restore", "release"])
async def test_it_is_waited_for_and_goes_on(world: World, operation: str) -> None:
    """Nobody is granted on a guess: the group names the node; when it runs again, the swap ends well everywhere."""
    turn = await _stopped_in(world, operation)
    view = await world.until(lambda view: "node n2" in view.reason, "the group names the node")
    assert view.holder == ""
    assert not turn.task.done()
    world.agents["n2"].send_signal(signal.SIGCONT)
    (world.rig("n2").fake.folder / "release").touch()
    await world.inside(turn)
    assert (world.states("a"), world.states("b")) == (IN, OUT)


@pytest.mark.parametrize("operation", ["prepare", "suspend", "restore"])
async def test_what_it_says_after_it_was_forgotten_is_refused(world: World, operation: str) -> None:
    """An operator has given the node up and the others went on. It wakes: its answer changes nothing, it joins anew,
    and what is really on its device is told, so that the next swap moves that, too."""
    turn = await _stopped_in(world, operation)
    await world.first.driver.run(scripts.forget(world.first.group, "n2", "test", "gone", lose=("a", "b")))
    granted = await world.inside(turn)
    view = await world.view()
    assert (view.holder, set(view.nodes)) == ("a", {"n1"})
    world.agents["n2"].send_signal(signal.SIGCONT)
    (world.rig("n2").fake.folder / "release").touch()
    fake = world.rig("n2").fake

    def told(view: GroupView) -> bool:
        # Of a, which holds, less is taken only when it has yielded.
        found = {member.job: member.state for member in view.members if member.node == "n2"}
        return found.get("b") == fake.state("b") and not fake.locked("a") and not fake.locked("b")

    view = await world.until(told, "n2 tells what is on its device, and nothing is locked there")
    assert (view.holder, view.number("token")) == ("a", granted.token), "the late answer has changed the hold"
    await world.leave("a")
    await world.enter("b")
    assert (world.states("a"), world.states("b")) == (OUT, IN)
