"""Orders of an operator that a coordinator has carried out: no waiter, by force, again until it is done."""

from __future__ import annotations

from tests.coordinator.model import view_of
from tests.coordinator.scripted import World
from timeslice.coordinator.swap import make_plan
from timeslice.locks import scripts
from timeslice.locks.flows import Grant
from timeslice.models import Plan


async def revoke(world: World, grant: Grant) -> None:
    await world.run(scripts.revoke(world.group, "a", "a", grant.token, "eve", "stuck"))


def test_a_plan_is_by_force_when_an_operator_ordered_it() -> None:
    """Else the workload is asked."""
    assert make_plan(view_of(state={"evict": "a", "force": "1"}, jobs={"a": "resident"})) == Plan(
        out=("a",), force=True
    )
    assert make_plan(view_of(state={"evict": "a"}, jobs={"a": "resident"})) == Plan(out=("a",))


async def test_the_orders_say_that_it_is_by_force(world: World) -> None:
    """Prepare and commit alike; whoever waits is served afterwards by an order without force."""
    await world.open("n1", "n2")
    await world.coordinate()
    grant = await world.load("a", yields=False)
    await revoke(world, grant)
    await world.until(lambda view: view.phase == "idle" and not view.resident, "job a is out")
    for agent in world.agents.values():
        assert [(order.step, order.force, order.into) for order in agent.orders] == [
            ("prepare", True, None),
            ("commit", True, None),
        ]
        agent.orders.clear()
    await world.load("b")
    await world.ask("a", "a-again")
    assert {order.force for agent in world.agents.values() for order in agent.orders} == {False}


async def test_a_failed_move_is_tried_again_with_longer_pauses(world: World) -> None:
    """Nobody gets in meanwhile, though it may wait; the group says why; in the end it is done."""
    await world.open("n1")
    await world.coordinate()
    grant = await world.load("a", yields=False)
    waiting = world.ask("b")
    pauses = []
    for number in range(2):
        world.agents["n1"].faults["prepare"] = f"the tool hangs ({number})"
        if not number:
            await revoke(world, grant)
        view = await world.until(
            lambda view, number=number: f"({number})" in view.state.get("evict_reason", ""),  # type: ignore[misc]
            "the failure is noted",
        )
        assert "job a could not be moved off the device" in view.reason
        assert not waiting.done()
        pauses.append(view.number("evict_until_ms") - view.number("evict_tried_ms"))
    assert pauses == [1000, 2000]
    assert (await waiting).token > grant.token
    assert world.agents["n1"].states["a"] == "suspended"


async def test_a_new_owner_goes_on_by_force(world: World) -> None:
    """The first coordinator is gone before its order was taken: the plan in the state says it all."""
    await world.open("n1")
    stop = await world.coordinate("c1", lease_ms=2000)
    grant = await world.load("a", yields=False)
    world.agents["n1"].deaf = {"prepare"}
    await revoke(world, grant)
    await world.until(lambda view: view.state.get("swap_step") == "prepare", "planned")
    stop.set()
    await world.until(lambda view: not view.state.get("owner"), "the first coordinator let go")
    await world.agents["n1"].stop()
    world.agents["n1"].deaf = set()
    world.agents["n1"].start()
    await world.coordinate("c2")
    await world.until(lambda view: view.phase == "idle" and not view.resident, "job a is out")
    assert {order.force for order in world.agents["n1"].orders} == {True}
