"""What a WorkloadChannel does not take, and how much of it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from tests.agent.rig import NODE
from tests.gateway.snapshot_rig import GROUP, FakeWorkload, serving
from timeslice.gateway import snapshots, workloads
from timeslice.gateway.proto import snapshot_agent_pb2 as pb
from timeslice.gateway.proto.snapshot_agent_pb2_grpc import SnapshotAgentServiceStub
from timeslice.locks import scripts
from timeslice.locks.drivers import SyncDriver
from timeslice.locks.keys import Keys

Code = grpc.StatusCode
OFFLOAD, DISCARD = pb.SUSPEND_MODE_OFFLOAD, pb.SUSPEND_MODE_DISCARD


@pytest.fixture
async def stub(redis_url: str, prefix: str) -> AsyncIterator[SnapshotAgentServiceStub]:
    """A service whose group a scripted agent of its node serves; another group is another node's."""
    driver, keys = SyncDriver(redis_url), Keys(prefix)
    driver.run(scripts.heartbeat(keys.group(GROUP), NODE, 600_000))
    driver.run(scripts.heartbeat(keys.group("elsewhere"), "n2", 600_000))
    driver.run(scripts.configure(keys.group("locked"), {}, mode="lock"))
    driver.close()
    async with serving(redis_url, prefix) as (made, *_):
        yield made


async def refused(stub: SnapshotAgentServiceStub, **message: Any) -> tuple[Code, str]:
    call = stub.WorkloadChannel()
    await call.write(pb.WorkloadMessage(**message))
    return await call.code(), await call.details() or ""


def register(job: str = "a", group: str = GROUP, **capabilities: Any) -> dict[str, Any]:
    told = pb.WorkloadCapabilities(**capabilities)
    return {"register": pb.RegisterWorkload(job_id=job, group=group, capabilities=told)}


@pytest.mark.parametrize(
    ("message", "code", "told"),
    [
        ({}, Code.INVALID_ARGUMENT, "must be `register`"),
        ({"result": pb.CommandResult(command_id="x", ok=True)}, Code.INVALID_ARGUMENT, "must be `register`"),
        (register(""), Code.INVALID_ARGUMENT, "can't name a job"),
        (register("x" * 100_000), Code.INVALID_ARGUMENT, "can't name a job"),
        (register("a/b"), Code.INVALID_ARGUMENT, "can't name a job"),
        (register(group="{g}"), Code.INVALID_ARGUMENT, "can't name a group"),
        (register(tags=["x"] * 10_000), Code.INVALID_ARGUMENT, "tags"),
        (register(tags=["x" * 100_000]), Code.INVALID_ARGUMENT, "tags"),
        (register(supported_modes=[DISCARD]), Code.INVALID_ARGUMENT, "lacks SUSPEND_MODE_OFFLOAD"),
        (register(supported_modes=[OFFLOAD], default_mode=DISCARD), Code.INVALID_ARGUMENT, "default_mode is none of"),
        (register(supported_modes=[77]), Code.INVALID_ARGUMENT, "77 is no SuspendMode"),
        (register(group="nowhere"), Code.NOT_FOUND, "no group nowhere"),
        (register(group="locked"), Code.FAILED_PRECONDITION, "lock-only"),
        (register(group="elsewhere"), Code.FAILED_PRECONDITION, "on a node that does: n2"),
    ],
    ids=[
        *("empty", "a result", "no job", "huge job", "bad job", "bad group", "many tags", "huge tag", "only discard"),
        *("bad default", "unknown mode", "unknown group", "lock-only", "another node's"),
    ],
)
async def test_a_first_message_that_can_not_be_served(
    stub: SnapshotAgentServiceStub, message: dict[str, Any], code: Code, told: str
) -> None:
    """It ends the stream with a status and what to do; however large it was, the answer is small."""
    answer = await refused(stub, **message)
    assert (answer[0], told in answer[1]) == (code, True), answer
    assert len(answer[1]) <= 2003


async def test_a_workload_has_one_stream(stub: SnapshotAgentServiceStub) -> None:
    """A second one is refused while the first lasts, and so is a second `register` on the first."""
    a = FakeWorkload(stub, "a")
    await a.register(OFFLOAD, DISCARD, tags=["weights"])
    code, told = await refused(stub, **register())
    assert (code, "has a WorkloadChannel already" in told) == (Code.ALREADY_EXISTS, True)
    await a.say(**register())
    assert await a.call.code() == Code.INVALID_ARGUMENT
    assert "only `result` may follow" in (await a.call.details() or "")


async def test_many_workloads_are_too_many(stub: SnapshotAgentServiceStub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each needs a process, so their number is bounded; those that are there go on."""
    monkeypatch.setattr(workloads, "STAND_INS_MAX", 2)
    first, second = FakeWorkload(stub, "a"), FakeWorkload(stub, "b")
    await first.register()
    await second.register()
    for number in range(20):
        code, _ = await refused(stub, **register(f"more-{number}"))
        assert code == Code.RESOURCE_EXHAUSTED
    assert not first.call.done()
    await first.finish()
    third = FakeWorkload(stub, "c")
    await third.register()
    await second.close()
    await third.close()


async def test_a_stream_has_to_say_who_it_is(stub: SnapshotAgentServiceStub, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is silent ends."""
    monkeypatch.setattr(snapshots, "REGISTER_S", 0.1)
    call = stub.WorkloadChannel()
    assert await call.code() == Code.INVALID_ARGUMENT
    assert "nothing came within" in (await call.details() or "")


async def test_a_huge_message_ends_its_stream_only(stub: SnapshotAgentServiceStub) -> None:
    """gRPC's own limit; and an answer to no command, however long, is ignored."""
    a = FakeWorkload(stub, "a")
    await a.register()
    await a.say(result=pb.CommandResult(command_id="x" * 1_000_000, error="y" * 1_000_000))
    b = FakeWorkload(stub, "b")
    await b.register()
    await b.say(result=pb.CommandResult(error="y" * 10_000_000))
    assert await b.call.code() == Code.RESOURCE_EXHAUSTED
    await b.close()
    assert not a.call.done()
    await a.close()
