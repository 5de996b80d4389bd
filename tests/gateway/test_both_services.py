"""llm-d's two services together, as one gateway serves them: who acquires is moved by the workload's own hand."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc.aio

from tests.agent.rig import NODE
from tests.gateway.snapshot_rig import GROUP, FakeWorkload, placed
from timeslice.gateway.proto import timeslice_orchestrator_pb2 as orchestrator
from timeslice.gateway.proto.snapshot_agent_pb2_grpc import SnapshotAgentServiceStub
from timeslice.gateway.proto.timeslice_orchestrator_pb2_grpc import TimeSliceOrchestratorServiceStub
from timeslice.gateway.server import GatewayOptions, run_gateway


async def test_two_jobs_alternate_by_acquire_and_yield(redis_url: str, prefix: str, tmp_path: Path) -> None:
    """Neither has a Redis client: each is granted after the other's state is out and its own is back."""
    async with placed(redis_url, prefix, tmp_path):
        port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        stop = asyncio.Event()
        options = GatewayOptions(url=redis_url, prefix=prefix, node=NODE, listen="127.0.0.1:0")
        gateway = asyncio.create_task(run_gateway(options, ready=port.set_result, stop=stop))
        async with grpc.aio.insecure_channel(f"127.0.0.1:{await port}") as channel:
            jobs = TimeSliceOrchestratorServiceStub(channel)
            workloads = {job: FakeWorkload(SnapshotAgentServiceStub(channel), job) for job in "ab"}
            restored = []
            for workload in workloads.values():
                await workload.register()
            for job in "abab":
                asked = orchestrator.AcquireRequest(job_id=job, group_id=GROUP)
                restored.append((await jobs.Acquire(asked)).context_restored)
                await jobs.Yield(orchestrator.YieldRequest(job_id=job, group_id=GROUP))
            assert restored == [False, False, True, True]
            assert workloads["a"].kinds() == ["snapshot", "restore", "snapshot"]
            assert workloads["b"].kinds() == ["snapshot", "restore"]
            for workload in workloads.values():
                await workload.finish()
        stop.set()
        await gateway
