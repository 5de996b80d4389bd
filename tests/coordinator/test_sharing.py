"""How coordinators share groups: no more than the share, no group in mid-swap, two of one name; and their wakes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.coordinator.scripted import DEADLINE_S, World, eventually
from timeslice.coordinator.group import GroupActor
from timeslice.coordinator.service import Coordinator, CoordinatorOptions, run_coordinator
from timeslice.errors import RefusedError
from timeslice.locks import scripts

LEASE_MS = 900


@pytest.fixture
async def worlds(redis_url: str, prefix: str) -> AsyncIterator[list[World]]:
    """Five groups under one prefix."""
    made = [await World(redis_url, prefix, f"g{number}").open("n1") for number in range(5)]
    yield made
    for world in made:
        await world.close()


def options(world: World, name: str, **more: Any) -> CoordinatorOptions:
    return CoordinatorOptions(url=world.url, prefix=world.keys.prefix, name=name, **more)


async def register(world: World, name: str, lease_ms: int = 10_000) -> None:
    """As if another coordinator had just registered, which owns nothing yet."""
    seconds, _ = await world.driver.client.time()
    await world.driver.client.zadd(world.keys.coordinators, {name: int(seconds) * 1000 + lease_ms})


async def test_nobody_takes_more_than_its_share(worlds: list[World]) -> None:
    """Five groups are free and two coordinators live: one look takes three, and leaves two to the other."""
    await register(worlds[0], "other")
    coordinator = Coordinator(options(worlds[0], "one"))
    await coordinator.scan()
    assert len(coordinator.owned) == 3
    await coordinator.close()


async def test_a_group_in_the_middle_of_a_swap_is_not_handed_over(worlds: list[World]) -> None:
    """Another coordinator comes while a swap runs that the owner's actor has not seen yet: of five groups it gets two,
    not this one, and the owner, epoch unchanged, finishes the swap."""
    busy = worlds[0]
    holder = await busy.load("a", yields=False)
    waiting = busy.ask("b")
    await busy.until(lambda view: view.queue, "b waits")
    coordinator = Coordinator(options(busy, "one"))
    await coordinator.scan()
    before = await busy.until(lambda view: view.state.get("owner") == "one", "owned")
    for world in worlds[1:]:
        await world.until(lambda view: view.state.get("owner") == "one", "owned")
    gate = busy.agents["n1"].gates["commit"] = asyncio.Event()
    await busy.give_up("a", holder)
    await busy.until(lambda view: view.state["swap_step"] == "commit", "it moves")
    for actor, _ in coordinator._actors.values():
        actor.busy = False  # none of the actors knows
    await register(busy, "other")
    await coordinator.scan()
    assert "g0" in coordinator.owned
    await busy.until(lambda _: coordinator._actors["g0"][0].busy, "its actor has seen the swap")
    await coordinator.scan()
    assert len(coordinator.owned) == 3
    after = await busy.view()
    assert (after.state["owner"], after.epoch) == ("one", before.epoch)
    gate.set()
    await waiting
    await coordinator.close()


async def test_a_group_that_ends_while_its_coordinator_signs_off_keeps_no_other(
    worlds: list[World], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One group is deleted, and its actor ends, just when the first one is let go: all others are let go as well, and
    the coordinator is off the list."""
    coordinator = Coordinator(options(worlds[0], "one", lease_ms=LEASE_MS))
    await coordinator.sign_on()
    await coordinator.scan()
    for world in worlds:
        await world.until(lambda view: view.state.get("owner") == "one", "owned")
    release = GroupActor.release

    async def ended() -> bool:
        return "g1" not in coordinator.owned

    async def meanwhile(actor: GroupActor, **more: Any) -> bool:
        if actor.name == "g0":
            await worlds[1].agents["n1"].stop()
            await worlds[1].run(scripts.leave(worlds[1].group, "n1"))
            await worlds[1].run(scripts.delete(worlds[1].group))
            await eventually(ended, "the actor of g1 has ended")
        return await release(actor, **more)

    monkeypatch.setattr(GroupActor, "release", meanwhile)
    await coordinator.close()
    assert "could not sign off" not in caplog.text
    assert await worlds[0].driver.client.zcard(worlds[0].keys.coordinators) == 0
    for world in (worlds[0], *worlds[2:]):
        assert (await world.view()).state["owner"] == ""


async def test_a_second_coordinator_of_one_name_is_refused(world: World) -> None:
    """The error says what to do; the first goes on."""
    await world.open("n1")
    await world.coordinate("one", LEASE_MS)
    with pytest.raises(RefusedError, match=r"named one runs already\. Give each one a name"):
        await run_coordinator(options(world, "one", lease_ms=LEASE_MS), stop=asyncio.Event())
    assert (await world.view()).state["owner"] == "one"
    assert await world.driver.client.zscore(world.keys.coordinators, "one")


async def test_the_name_of_one_that_died_is_free_when_its_registration_lapses(world: World) -> None:
    """A coordinator that was killed comes back under its name, without anybody's help."""
    await world.open("n1")
    await register(world, "one", LEASE_MS)
    await world.run(scripts.own(world.group, "one", LEASE_MS, instance="before"))
    await world.coordinate("one", LEASE_MS)
    await world.until(lambda view: view.state.get("owner_instance") not in ("", "before"), "its group is taken again")


async def test_a_namesake_that_slipped_in_is_another(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """One was stopped when its namesake came, and wakes: it neither drives nor releases the other's group, and the
    log says what is wrong."""
    await world.open("n1")
    await world.coordinate("one")
    await world.load("a")
    before = await world.until(lambda view: view.state.get("owner") == "one", "owned")
    namesake = Coordinator(options(world, "one"))
    await namesake.scan()
    assert namesake.owned == ()
    reply = await world.run(scripts.own(world.group, "one", instance="another"))
    assert isinstance(reply, scripts.OwnedBy)
    await world.run(scripts.disown(world.group, "one", instance="another"))
    await namesake.close()
    after = await world.view()
    assert (after.state["owner"], after.epoch) == ("one", before.epoch)
    assert "owned by another coordinator named one; give each its own name" in caplog.text
    await world.ask("b")


async def test_wakes_are_heard_again_after_the_inbox_was_lost(world: World) -> None:
    """Entries of an inbox that starts anew may have ids below those known: after one look in vain they are heard."""
    await world.open("n1")
    actor = GroupActor(world.driver, world.keys, world.group.name, "c1", LEASE_MS)
    actor._after = "99999999999999-0"
    await actor._sleep(time.monotonic() + 0.02, 1)
    await world.driver.client.xadd(world.group.inbox, {"why": "swap"})
    async with asyncio.timeout(DEADLINE_S):
        await actor._sleep(time.monotonic() + 10 * DEADLINE_S, 1)
