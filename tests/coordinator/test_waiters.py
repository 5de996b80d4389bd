"""Waiters that vanish, fall silent or think better of it while a swap is made for them."""

from __future__ import annotations

import asyncio

from tests.coordinator.scripted import World
from timeslice.locks import scripts


async def vanish(world: World, job: str, waiter: str, idle_ms: int = 5000) -> None:
    """A waiter that asked and was killed ``idle_ms`` ago."""
    await world.run(scripts.acquire(world.group, world.request(job, waiter)))
    now = (await world.view()).now_ms
    await world.driver.client.zadd(world.group.alive, {waiter: now + 15_000 - idle_ms})


async def test_a_silent_waiter_is_passed_over_and_keeps_its_place(world: World) -> None:
    """L04: the first in the queue gives no sign of life: no state moves for it, the second gets in; when the first
    speaks again it is served before those behind it."""
    await world.open("n1")
    holder = await world.load("a", yields=False)
    await vanish(world, "b", "b")
    await vanish(world, "b", "b2")
    second = world.ask("c")
    await world.until(lambda view: len(view.queue) == 3, "all wait")
    await world.coordinate()
    await world.give_up("a", holder)
    grant = await second
    assert [order.out for order in world.agents["n1"].orders] == [("a",), ("a",)]
    view = await world.view()
    assert [entry.waiter for entry in view.queue] == ["b", "b2"]
    assert [event["reason"] for event in await world.events("SwapDeferred")] == ["silent", "silent"]

    back, later = world.ask("b"), world.ask("d")
    await world.until(lambda view: len(view.queue) == 3, "d waits")
    await world.give_up("c", grant)
    await back
    assert not later.done()


async def test_a_waiter_that_lives_but_was_quiet_answers_the_poke(world: World) -> None:
    """Between two refreshes a waiter is not heard of for seconds; asked, it answers, and nobody is passed over."""
    await world.open("n1")
    holder = await world.load("a", yields=False)
    waiting = world.ask("b")
    await world.until(lambda view: view.queue, "b waits")
    now = (await world.view()).now_ms
    await world.driver.client.zadd(world.group.alive, {"b": now + 15_000 - 4000})
    await world.coordinate()
    await world.give_up("a", holder)
    await waiting
    assert await world.events("SwapDeferred") == []


async def test_a_waiter_that_goes_before_the_plan_moves_nothing(world: World) -> None:
    """Cancelled while it is asked: the swap is dropped and the next one's begins."""
    await world.open("n1")
    holder = await world.load("a", yields=False)
    await vanish(world, "b", "b")
    await world.coordinate()
    await world.give_up("a", holder)
    await world.until(lambda view: view.state.get("swap_job") == "b", "a swap for b")
    await world.run(scripts.cancel(world.group, "b"))
    await world.until(lambda view: not view.swap, "dropped")
    assert world.agents["n1"].orders == []
    await world.ask("c")


async def test_a_waiter_that_cancels_in_mid_swap_leaves_it_to_its_jobs_next(world: World) -> None:
    """The state of its job is in, so that job's next waiter gets the grant, before one that is ahead in the queue."""
    await world.open("n1")
    await world.load("a")
    gate = world.agents["n1"].gates["commit"] = asyncio.Event()
    await world.coordinate()
    first = world.ask("b")
    await world.until(lambda view: view.nodes["n1"].step == "begun commit", "it moves")
    other = world.ask("c")
    await world.until(lambda view: len(view.queue) == 2, "c waits")
    second = world.ask("b", "b2")
    await world.until(lambda view: len(view.queue) == 3, "b2 waits")
    await world.run(scripts.cancel(world.group, "b"))
    gate.set()
    assert (await second).how == "first load"
    assert not other.done()
    first.cancel()


async def test_a_waiter_that_cancels_in_mid_swap_leaves_it_to_whoever_is_next(world: World) -> None:
    """Nobody else of its job waits: the queue advances."""
    await world.open("n1")
    await world.load("a")
    gate = world.agents["n1"].gates["commit"] = asyncio.Event()
    await world.coordinate()
    first, other = world.ask("b"), world.ask("c")
    await world.until(lambda view: view.nodes["n1"].step == "begun commit", "it moves")
    await world.run(scripts.cancel(world.group, "b"))
    gate.set()
    assert (await other).how == "first load"
    first.cancel()


async def test_a_paused_group_finishes_its_swap_and_grants_nobody(world: World) -> None:
    """Paused in mid-swap: what was begun is finished, the grant comes only after resume."""
    await world.open("n1")
    await world.load("a")
    gate = world.agents["n1"].gates["commit"] = asyncio.Event()
    await world.coordinate()
    waiting = world.ask("b")
    await world.until(lambda view: view.nodes["n1"].step == "begun commit", "it moves")
    await world.run(scripts.pause(world.group, True, "ann"))
    gate.set()
    await world.until(lambda view: view.phase == "paused" and not view.swap, "paused")
    assert not waiting.done()
    await world.run(scripts.pause(world.group, False, "ann"))
    await waiting
