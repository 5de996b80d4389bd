"""Leases that a gateway goes on with: its own of a former life, and other gateways'; never anybody else's."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import pytest

from tests.agent.rig import until
from tests.client.world import World
from tests.gateway.conftest import queued
from tests.gateway.test_leases import grant, leases
from timeslice.errors import LeaseLostError, NotHolderError
from timeslice.gateway.holds import refuse_unknown
from timeslice.gateway.leases import Leases
from timeslice.locks import scripts
from timeslice.locks.scripts import Observed, Queued, Request

__all__ = ["leases"]  # a fixture

pytestmark = pytest.mark.usefixtures("clean_environment")


def set_state(world: World, **fields: int) -> None:
    """Change the record of the group, as time would."""
    world.redis.hset(world.group().state, mapping=fields)


@pytest.mark.usefixtures("lock")
async def test_a_client_on_a_node_called_gateway_is_no_gateway(leases: Leases, world: World) -> None:
    """What its process holds is neither renewed, nor yielded by a stranger's call."""
    grant(world, "a", host="gateway.n1")
    await leases.resume()
    assert not leases._client.renewer.of(leases._client)
    with pytest.raises(NotHolderError, match="not through a gateway"):
        await leases.give_up("g", "a")
    assert world.holder() == "a"


@pytest.mark.usefixtures("lock")
async def test_another_gateways_lease_is_its_own_to_renew(leases: Leases, world: World) -> None:
    """Until its job calls here: else leases of a gateway that is gone for good would never end."""
    grant(world, "a", lease_ms=1000, host="gateway@n2")
    await leases.resume()
    async with asyncio.timeout(30):
        await leases.take("g", "b")
    assert world.holder() == "b"


@pytest.mark.usefixtures("lock")
async def test_a_grant_of_which_no_caller_was_told_is_not_taken_over(leases: Leases, world: World) -> None:
    """It came when its gateway had ended: nobody would yield it, and it ends by itself."""
    held = grant(world, "a")
    request = Request("w-b", "b", "gateway@n1", 1, 1)
    assert isinstance(world.run(scripts.acquire(world.group(), request)), Queued)
    world.run(scripts.yield_(world.group(), "w-a", held.token))
    assert world.holder() == "b"
    await leases.resume()
    with pytest.raises(NotHolderError):
        await leases.give_up("g", "b")
    assert world.holder() == "b"


@pytest.mark.usefixtures("lock")
async def test_the_term_goes_on(leases: Leases, world: World) -> None:
    """A lease that is near its end is renewed in time."""
    grant(world, "a")
    set_state(world, deadline_ms=world.view().now_ms + 5000)
    lease = leases._client.adopt(world.view(), "a")
    assert lease
    assert lease.expires_at < time.monotonic() + 6
    await until(lambda: world.view().number("deadline_ms") > world.view().now_ms + 6000, "it is renewed")


@pytest.mark.usefixtures("lock")
async def test_the_maximum_hold_goes_on(leases: Leases, world: World) -> None:
    """A gateway that starts anew gives no job a new hour."""
    grant(world, "a")
    set_state(world, granted_at_ms=world.view().now_ms - 3_601_000)
    await leases.resume()
    await leases.look_after_all()
    assert world.holder() == ""
    assert "LeaseRevoked" in world.event_types()


@pytest.mark.usefixtures("lock")
async def test_what_was_taken_away_is_told_again(leases: Leases, world: World) -> None:
    """Each late yield is told who took the group, not only the first."""
    lease, _ = await leases.take("g", "a")
    world.run(scripts.revoke(world.group(), "a", lease.lease_id, lease.fencing_token, "ops@n9", "a rest"))
    for kind in (LeaseLostError, NotHolderError):
        with pytest.raises(kind, match=r"ops@n9.*a rest"):
            await leases.give_up("g", "a")


@pytest.mark.usefixtures("lock")
async def test_what_is_over_is_forgotten(leases: Leases, monkeypatch: pytest.MonkeyPatch) -> None:
    """A repeated yield is answered like the first, for a while."""
    monkeypatch.setattr("timeslice.gateway.leases.PAST_S", 0.0)
    await leases.take("g", "a")
    for _ in range(2):
        await leases.give_up("g", "a")
    await leases.look_after_all()
    with pytest.raises(NotHolderError, match="nobody does"):
        await leases.give_up("g", "a")


async def test_an_unknown_state_refuses_nobody_while_a_swap_is_under_way(world: World) -> None:
    """Its end may bring the state in order."""
    world.serve("g")
    world.run(scripts.report(world.group(), "n1", world.view().counter, [Observed("z", "faulted", 0)]))
    view = world.view()
    refuse_unknown(replace(view, state={**view.state, "swap_id": "7"}))


@pytest.mark.usefixtures("lock")
async def test_only_its_own_lease_is_ended(leases: Leases, world: World) -> None:
    """One that was yielded elsewhere is over; the job's next one has a maximum hold of its own."""
    lease, _ = await leases.take("g", "a")
    world.run(scripts.yield_(world.group(), lease.lease_id, lease.fencing_token))
    grant(world, "a", host="n7")
    for hold in leases._held.values():
        hold.until = 0.0
    await leases.look_after_all()
    assert world.holder() == "a"
    taking = asyncio.create_task(leases.take("g", "b"))
    await queued(world, "b")
    taking.cancel()
    await asyncio.wait({taking})
