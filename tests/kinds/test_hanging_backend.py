"""A backend that hangs in one group of a node while the other groups of the node go on, and that ends after all."""

from __future__ import annotations

import pytest

from tests.agent.rig import Rig, until
from tests.kinds.world import World

pytestmark = pytest.mark.slow

IN, OUT = ("resident", False), ("suspended", False)


@pytest.mark.parametrize("operation", ["prepare", "suspend", "restore"])
async def test_a_hang_past_the_deadline_holds_up_its_own_group_only(world: World, operation: str) -> None:
    """The group is blocked and says which node moves what; the other group swaps meanwhile. When the call ends, its
    answer is looked at by what is observed, and the waiter gets in."""
    other = World(world.url, world.prefix, world.folder / "other")
    other.rigs["n1"] = Rig(world.url, world.prefix, world.folder / "n1", name="h", node="n1")
    world.stack.push_async_callback(other.rigs["n1"].close)
    world.stack.push_async_callback(other.close)
    await world.agent("n1", groups=("g", "h"))
    await world.coordinate(prepare_timeout_ms=1500, suspend_timeout_ms=1000, restore_timeout_ms=1000)
    await world.load("a")
    await world.load("b")
    fake = world.rig("n1").fake
    fake.knob(operation, hang=True)
    done = len(fake.calls())
    turn = world.ask("a")
    await until(lambda: any(call.startswith(operation) for call in fake.calls()[done:]), "it hangs")
    view = await world.until(lambda view: view.phase == "blocked", "the group is blocked")
    assert "node n1 " in view.reason
    assert view.holder == ""
    for job in "cd":
        await other.load(job)
    await other.enter("c")
    assert other.states("c") == {"n1": IN}
    assert not turn.task.done()
    (fake.folder / "release").touch()
    await world.inside(turn)
    assert (world.states("a"), world.states("b")) == ({"n1": IN}, {"n1": OUT})
