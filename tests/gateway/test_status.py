"""Status: jobs and accelerators of the gateway's node, as its agent tells of them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.agent.knobs import CAPACITY, make
from tests.agent.rig import NODE, until
from tests.gateway.snapshot_rig import GROUP, Place, placed, serving
from timeslice.client.compat import JobState
from timeslice.gateway.proto import snapshot_agent_pb2 as pb
from timeslice.gateway.snapshots import _JOB_STATES


@pytest.fixture
async def place(redis_url: str, prefix: str, tmp_path: Path) -> AsyncIterator[Place]:
    """With a device that can be measured."""
    backends = {GROUP: [f"knobs:folder={tmp_path / 'fake'}"]}
    async with placed(redis_url, prefix, tmp_path, make_backend=make, backends=backends) as made:
        yield made


def states(answer: pb.StatusResponse) -> dict[str, str]:
    return {job.job_id: pb.JobState.Name(job.state) for job in answer.job_statuses}


async def test_jobs_are_told_with_their_states(place: Place) -> None:
    """Registered and nothing loaded, on the device, in host memory."""
    for job in "abc":
        await place.rig.job(job, 0)
    place.rig.fake.load("a", 300)
    place.rig.fake.load("b", 500)
    await place.turn("a")
    await place.turn("b")
    await place.outcome(await place.snapshot("b"))
    await place.restore("a")
    expected = {"a": "JOB_STATE_RUNNING", "b": "JOB_STATE_SAVED", "c": "JOB_STATE_IDLE"}

    async def told() -> bool:
        return states(await place.stub.Status(pb.StatusRequest())) == expected

    await until(told, f"the status is {expected}")


def test_every_state_has_a_name_on_the_wire() -> None:
    """As llm-d spells it."""
    assert {state: pb.JobState.Name(number) for state, number in _JOB_STATES.items()} == {
        state: f"JOB_{state}" for state in JobState
    }


async def test_accelerators_are_told_as_measured(place: Place, redis_url: str) -> None:
    """By the agent of the node. A gateway on a node without an agent tells of all nodes, and names them."""
    await place.rig.job("a", 300)

    async def measured() -> pb.AcceleratorStatus | None:
        answer = await place.stub.Status(pb.StatusRequest())
        (found,) = answer.accelerator_statuses or [None]
        return found if found and found.memory_used_bytes and states(answer) == {"a": "JOB_STATE_RUNNING"} else None

    found = await until(measured, "the device was measured and the job found on it")
    assert (found.memory_used_bytes, found.memory_total_bytes) == (300, CAPACITY)
    async with serving(redis_url, place.rig.prefix, node="elsewhere") as (stub, *_):
        answer = await stub.Status(pb.StatusRequest())
        assert [each.id for each in answer.accelerator_statuses] == [f"{NODE}/{found.id}"]
        assert states(answer) == {"a": "JOB_STATE_RUNNING"}


@pytest.mark.parametrize(
    "memory",
    ["", "no json", "[]", json.dumps({"devices": {"g": [{"device": "d", "total_bytes": -1}]}}), "[" * 100_000],
    ids=["nothing", "no JSON", "a list", "a bad device", "deep"],
)
async def test_a_record_that_can_not_be_read_hides_nothing_else(redis_url: str, prefix: str, memory: str) -> None:
    """A node's record is written by its agent, perhaps of another version; or by a stranger."""
    from timeslice.client.aio import AsyncClient
    from timeslice.gateway.residency import node_status
    from timeslice.locks import scripts

    async with AsyncClient(redis_url, "x", prefix) as client:
        await client.driver.pipe([("SADD", client.keys.groups, GROUP, "no name!")])
        await client.driver.run(scripts.heartbeat(client.keys.group(GROUP), NODE, 60_000))
        await client.driver.run(scripts.register(client.keys.group(GROUP), "a", NODE, 7, "{}"))
        await client.driver.pipe([("HSET", client.keys.node_state(NODE), "memory", memory)])
        told = await node_status(client, NODE)
        assert (told.jobs, told.accelerators) == ({"a": JobState.IDLE}, ())
