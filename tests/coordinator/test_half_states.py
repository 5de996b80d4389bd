"""L24: what a crash between two writes, or a hand at the keys, leaves behind is repaired or reported."""

from __future__ import annotations

import pytest

from tests.coordinator.scripted import World


async def plant(world: World, what: str) -> None:
    client, keys = world.driver.client, world.group
    match what:
        case "lock without owner":
            await client.hset(keys.state, mapping={"lease_id": "ghost", "phase": "held"})
        case "confirmed lock without deadline":
            await client.hset(keys.state, mapping={"lease_id": "ghost", "job": "ghost", "confirmed": "1"})
        case "queue entry without record":
            await client.zadd(keys.queue, {"ghost": 1})
        case "waiter record without queue entry":
            await client.hset(keys.waiters, "ghost/job", "ghost")
        case "owner without lease":
            await client.hset(keys.state, "owner", "ghost")
        case "owner whose lease is no number":
            await client.hset(keys.state, mapping={"owner": "ghost", "owner_deadline_ms": "soon"})
        case "swap without plan":
            await client.hset(keys.state, mapping={"swap_id": 5, "swap_step": "prepare", "swap_job": "ghost"})
        case "swap without step":
            await client.hset(keys.state, mapping={"swap_id": 5, "swap_waiter": "ghost"})
        case "swap with a broken plan":
            await client.hset(keys.state, mapping={"swap_id": 5, "swap_step": "commit", "plan": "{"})


@pytest.mark.parametrize(
    "what",
    [
        "lock without owner",
        "confirmed lock without deadline",
        "queue entry without record",
        "waiter record without queue entry",
        "owner without lease",
        "owner whose lease is no number",
        "swap without plan",
        "swap without step",
        "swap with a broken plan",
    ],
)
async def test_a_half_state_does_not_wedge_the_group(world: World, what: str) -> None:
    """L24: planted, then a coordinator is started; it owns the group, and a new hold, and a swap, succeed."""
    await world.open("n1")
    await plant(world, what)
    await world.coordinate()
    await world.until(lambda view: view.state.get("owner") == "c1", "owned")
    await world.load("a")
    await world.ask("b")
    view = await world.view()
    assert view.holder == "b"
    assert view.queue == ()
