"""Callers that ping, as those behind proxies do."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio
import pytest

from tests.client.world import World
from tests.gateway.conftest import Gateway, queued
from timeslice.gateway.proto import timeslice_orchestrator_pb2 as pb
from timeslice.gateway.proto.timeslice_orchestrator_pb2_grpc import TimeSliceOrchestratorServiceStub

PINGING = [
    ("grpc.keepalive_time_ms", 1100),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.use_local_subchannel_pool", 1),
]


@pytest.mark.slow
@pytest.mark.timing  # gRPC cuts a connection off after its third ping
@pytest.mark.usefixtures("clean_environment", "lock")
async def test_callers_may_ping(gateway: Gateway, world: World) -> None:
    """Neither one that waits, nor one that is idle, is cut off for its pings."""
    await gateway.caller().acquire("a")
    async with (
        grpc.aio.insecure_channel(gateway.target, options=PINGING) as waits,
        grpc.aio.insecure_channel(gateway.target, options=PINGING) as idles,
    ):
        waiting = TimeSliceOrchestratorServiceStub(waits).Acquire(pb.AcquireRequest(job_id="b", group_id="g"))
        await TimeSliceOrchestratorServiceStub(idles).ListGroups(pb.ListGroupsRequest())
        await queued(world, "b")
        state = idles.get_state()
        assert state == grpc.ChannelConnectivity.READY
        cut_off = [
            asyncio.create_task(idles.wait_for_state_change(state)),
            asyncio.create_task(waiting.code()),
        ]
        done, _ = await asyncio.wait(cut_off, timeout=7, return_when=asyncio.FIRST_COMPLETED)
        assert not done
        for each in cut_off:
            each.cancel()
        waiting.cancel()
