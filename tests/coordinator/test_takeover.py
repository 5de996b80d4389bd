"""Coordinators killed in the middle, deposed, and the ones that go on in their place."""

from __future__ import annotations

import asyncio
import signal
import sys
from typing import Any

import pytest

from tests.coordinator import doomed
from tests.coordinator.scripted import DEADLINE_S, World
from timeslice.errors import StaleCommandError
from timeslice.locks import scripts
from timeslice.models import Command, Plan


async def start_doomed(world: World, point: str) -> asyncio.subprocess.Process:
    program = [sys.executable, "-m", doomed.__name__, world.url, world.keys.prefix, "doomed", point]
    return await asyncio.create_subprocess_exec(*program)


async def killed(process: asyncio.subprocess.Process) -> None:
    """Wait until the process has met its end, and that it was the right one."""
    async with asyncio.timeout(DEADLINE_S):
        assert await process.wait() == -signal.SIGKILL


def planned(events: list[dict[str, str]], swap: str) -> list[str]:
    return [event["plan"] for event in events if event["swap"] == swap]


# In the fast tier one point a risk: nothing is stored, a step is stored and not ordered, the last word is not said.
@pytest.mark.parametrize(
    "point",
    [
        "before plan",
        pytest.param("after plan", marks=pytest.mark.slow),
        pytest.param("after orders prepare", marks=pytest.mark.slow),
        pytest.param("before step commit", marks=pytest.mark.slow),
        "after step commit",
        pytest.param("after orders commit", marks=pytest.mark.slow),
        "before promote",
        pytest.param("after promote", marks=pytest.mark.slow),
    ],
)
async def test_a_swap_goes_on_after_its_coordinator_was_killed(world: World, point: str) -> None:
    """Killed at this point of a swap by SIGKILL; another takes the group when the lease has passed and finishes the
    same swap by the plan that is stored: each node moves once, one grant, one finish."""
    await world.open("n1", "n2")
    await world.load("a")
    process = await start_doomed(world, point)
    waiting = world.ask("b")
    await killed(process)
    before = await world.view()
    await world.coordinate("heir", lease_ms=doomed.LEASE_MS)
    assert (await waiting).how == "first load"

    started, finished = await world.events("SwapStarted"), await world.events("SwapFinished")
    assert [event["swap"] for event in started] == [event["swap"] for event in finished]
    assert len(planned(await world.events("SwapPlanned"), started[0]["swap"])) == 1
    assert [event["job"] for event in await world.events("LeaseGranted")] == ["a", "b"]
    for agent in world.agents.values():
        assert [order.step for order in agent.orders] == ["prepare", "commit"]
        assert agent.states["a"] == "suspended"
    if before.swap:
        epochs = [order.epoch for order in world.agents["n1"].orders]
        assert epochs == sorted(epochs)
        assert (await world.view()).state["owner"] == "heir"


@pytest.mark.parametrize(
    "point",
    [
        pytest.param("before step rollback", marks=pytest.mark.slow),
        "after step rollback",
        pytest.param("after orders rollback", marks=pytest.mark.slow),
    ],
)
async def test_an_undoing_goes_on_after_its_coordinator_was_killed(world: World, point: str) -> None:
    """Killed while a failed swap is undone: the next owner undoes the rest, and the job that was in is whole."""
    await world.open("n1", "n2")
    await world.load("a")
    world.agents["n2"].faults["commit"] = "the checkpoint tool failed"
    process = await start_doomed(world, point)
    waiting = world.ask("b")
    await killed(process)
    await world.coordinate("heir", lease_ms=doomed.LEASE_MS)
    view = await world.until(lambda view: view.queue and view.queue[0].deferred, "put off")
    assert view.queue[0].deferred == "node n2: the checkpoint tool failed"
    assert [agent.states["a"] for agent in world.agents.values()] == ["resident"] * 2
    waiting.cancel()


async def test_the_stored_plan_is_executed_though_a_new_one_would_differ(world: World) -> None:
    """Between the owners another job's state turns up on the device: the orders are still those of the stored plan,
    and the swap that can't be closed by it is undone, not enlarged."""
    await world.open("n1")
    await world.load("a")
    process = await start_doomed(world, "after plan")
    waiting = world.ask("b")
    await killed(process)
    stored = Plan.model_validate_json((await world.view()).state["plan"])
    await world.agents["n1"].report(c="resident")
    await world.coordinate("heir", lease_ms=doomed.LEASE_MS)
    view = await world.until(lambda view: view.queue and view.queue[0].deferred, "put off")
    assert view.queue[0].deferred == "job c is still on the device"
    assert {order.out for order in world.agents["n1"].orders} == {stored.out} == {("a",)}
    await waiting


async def test_orders_of_a_deposed_coordinator_are_refused(world: World) -> None:
    """It is stopped (SIGSTOP) after the plan, loses the group, wakes, and sends what it had in mind: no agent touches
    anything for it."""
    await world.open("n1")
    await world.load("a")
    agent = world.agents["n1"]
    process = await start_doomed(world, "after plan")
    waiting = world.ask("b")
    await killed(process)
    old = await world.view()
    gate = agent.gates["prepare"] = asyncio.Event()
    await world.coordinate("heir", lease_ms=doomed.LEASE_MS)
    await world.until(lambda view: view.nodes["n1"].step == "begun prepare", "the heir's order")
    order = Command(
        id=f"{old.swap}/n1/prepare/{old.epoch}.1", group="trainers", node="n1", swap=old.swap, epoch=old.epoch,
        step="prepare", out=("a",), suspend_timeout_ms=1000, restore_timeout_ms=1000,
    )  # fmt: skip
    await world.driver.client.xadd(world.keys.commands("n1"), {"body": order.model_dump_json()})
    gate.set()
    await waiting
    assert len(agent.refused) == 1
    assert {order.epoch for order in agent.orders} == {(await world.view()).epoch}
    # An agent answers an id it knows from its journal: another owner's order must never look like this one's.
    assert all(taken.id.endswith(f"/{taken.epoch}.1") for taken in agent.orders)
    calls: list[scripts.Call[Any]] = [
        scripts.step(world.group, old.swap, old.epoch, "prepare", "commit", 1000),
        scripts.promote(world.group, old.swap, old.epoch, "no-op"),
        scripts.settle(world.group, old.swap, old.epoch, "x", 1000),
    ]
    for call in calls:
        with pytest.raises(StaleCommandError, match="no longer ours"):
            await world.run(call)


async def test_a_stopped_coordinator_loses_its_group_and_does_no_harm_when_it_wakes(world: World) -> None:
    """L08, for coordinators: SIGSTOP for longer than its lease in the middle of a swap; another finishes the swap;
    SIGCONT: it finds out, drops what it had in mind, and goes on living without the group."""
    await world.open("n1", "n2")
    await world.load("a")
    gate = world.agents["n2"].gates["commit"] = asyncio.Event()
    process = await start_doomed(world, "never")
    waiting = world.ask("b")
    await world.until(lambda view: view.nodes["n2"].step == "begun commit", "it moves")
    process.send_signal(signal.SIGSTOP)
    await world.coordinate("heir", lease_ms=doomed.LEASE_MS)
    await world.until(lambda view: view.state["owner"] == "heir", "taken over")
    process.send_signal(signal.SIGCONT)
    gate.set()
    grant = await waiting
    await world.give_up("b", grant)
    assert len(await world.events("SwapFinished")) == 1
    assert process.returncode is None
    process.kill()
    await process.wait()
