"""A gateway as a Redis user with a client's rights."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.agent.rig import until
from tests.client.world import World
from tests.gateway.conftest import MakeGateway, queued
from tests.security.conftest import GROUP, OTHER, Users, guarded, users
from timeslice.gateway.proto.snapshot_agent_pb2 import StatusRequest
from timeslice.gateway.proto.snapshot_agent_pb2_grpc import SnapshotAgentServiceStub
from timeslice.locks import scripts
from timeslice.locks.scripts import Granted, Request

__all__ = ["guarded", "users"]  # fixtures


async def test_it_needs_the_rights_of_a_client(make_gateway: MakeGateway, users: Users, prefix: str) -> None:
    """To take, to yield, to go on with leases, to look, and to end what was held for too long; for the accelerators in
    a node's status the one more that docs/gateway.md names."""
    world = World(users.server.url, prefix)
    world.run(scripts.configure(world.group(GROUP), {}, mode="lock"))
    world.redis.sadd(world.keys.groups, GROUP)
    url = users.url("client", everything=True)
    first = (await make_gateway(url=url, prefix=prefix)).caller()
    await first.acquire("a", GROUP)
    waiting = first.acquire("b", GROUP)
    await queued(world, "b", group=GROUP)
    await first.yield_("a", GROUP)
    await waiting
    await first.status(GROUP)
    await make_gateway(url=url, prefix=prefix, max_hold_s=0.1)
    await until(lambda: "LeaseRevoked" in world.event_types(GROUP), "the second one ends it")
    assert users.refusals() == []
    page = (Path(__file__).parent.parent.parent / "docs" / "gateway.md").read_text()
    (more,) = re.findall(r"ACL SETUSER timeslice-client '(.*)'", page)
    world.serve("h")
    granted = more.replace("~ts:", f"~{prefix}:")
    users.admin.execute_command("ACL", "SETUSER", "timeslice-client", granted)  # type: ignore[no-untyped-call]
    assert (await SnapshotAgentServiceStub(first.channel).Status(StatusRequest())).accelerator_statuses == []
    assert users.refusals() == []
    world.close()


@pytest.mark.parametrize("why", ["another tenant's", "spoilt"])
async def test_a_group_that_can_not_be_read_stops_no_gateway(
    make_gateway: MakeGateway, users: Users, prefix: str, why: str
) -> None:
    """It starts, and goes on with the leases of the groups that its user may read."""
    world = World(users.server.url, prefix)
    for group in (GROUP, OTHER):
        world.run(scripts.configure(world.group(group), {}, mode="lock"))
        world.redis.sadd(world.keys.groups, group, "a-group-before-all-others")
    if why == "spoilt":
        world.redis.hset(world.group("a-group-before-all-others").config, "order", "first")
    request = Request("w-a", "a", "gateway@n1", 1, 1)
    assert isinstance(world.run(scripts.acquire(world.group(GROUP), request)), Granted)
    url = users.url("client", everything=why == "spoilt")
    caller = (await make_gateway(url=url, prefix=prefix)).caller()
    assert (await caller.acquire("a", GROUP)).success
    assert world.event_types(GROUP).count("LeaseGranted") == 1
    assert (await caller.yield_("a", GROUP)).success
    world.close()
