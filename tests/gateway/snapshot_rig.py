"""Everything that a snapshot agent's answer needs, for real: agent, coordinator, the service behind a channel."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc.aio

from tests.agent.rig import NODE, Rig, until
from timeslice.agent import procfs
from timeslice.backends.registry import get_backend
from timeslice.client.aio import AsyncClient
from timeslice.coordinator.service import CoordinatorOptions, run_coordinator
from timeslice.gateway.proto import snapshot_agent_pb2 as pb
from timeslice.gateway.proto.snapshot_agent_pb2_grpc import (
    SnapshotAgentServiceStub,
    add_SnapshotAgentServiceServicer_to_server,
)
from timeslice.gateway.snapshots import SnapshotAgentService
from timeslice.locks import flows, scripts

RECONNECT_S = 60.0
GROUP = "g"


class FakeWorkload:
    """A client's end of a WorkloadChannel. It answers each command with ``error``, and nothing while ``silent``."""

    def __init__(self, stub: SnapshotAgentServiceStub, job: str) -> None:
        self.job, self.error, self.silent = job, "", False
        self.commands: list[pb.AgentCommand] = []
        self.call = stub.WorkloadChannel()
        self._answering: asyncio.Task[None] | None = None

    async def register(self, *modes: int, tags: Sequence[str] = (), group: str = GROUP) -> None:
        """Returns when the gateway says that it is registered; raises grpc.aio.AioRpcError."""
        capabilities = pb.WorkloadCapabilities(supported_modes=[pb.SuspendMode.Name(m) for m in modes], tags=tags)
        await self.say(register=pb.RegisterWorkload(job_id=self.job, group=group, capabilities=capabilities))
        self._answering = asyncio.create_task(self._answer())
        if "registered" not in [key for key, _ in await self.call.initial_metadata() or ()]:
            await self._answering  # it was refused: raise that

    async def say(self, **message: Any) -> None:
        await self.call.write(pb.WorkloadMessage(**message))

    async def answer(self, command: pb.AgentCommand, error: str = "") -> None:
        await self.say(result=pb.CommandResult(command_id=command.command_id, ok=not error, error=error))

    def kinds(self) -> list[str | None]:
        return [command.WhichOneof("command") for command in self.commands]

    async def told(self, *kinds: str) -> None:
        await until(lambda: self.kinds() == list(kinds), f"job {self.job} was told {kinds}")

    async def finish(self) -> None:
        """As a workload that says good-bye."""
        await self.call.done_writing()
        await self.call.code()

    async def close(self) -> None:
        self.call.cancel()
        if self._answering:
            await asyncio.gather(self._answering, return_exceptions=True)

    async def _answer(self) -> None:
        async for command in self.call:
            self.commands.append(command)
            if not self.silent:
                await self.answer(command, self.error)


class Place:
    """One group on one node, served by a gateway that a test calls over a real channel."""

    def __init__(self, rig: Rig, stub: SnapshotAgentServiceStub, service: SnapshotAgentService, address: str) -> None:
        self.rig, self.stub, self.service, self.address = rig, stub, service, address
        self.workloads: list[FakeWorkload] = []

    async def workload(self, job: str, *, error: str = "", silent: bool = False) -> FakeWorkload:
        made = FakeWorkload(self.stub, job)
        made.error, made.silent = error, silent
        self.workloads.append(made)
        await made.register()
        return made

    async def hold(self, job: str, process: subprocess.Popen[str] | None = None) -> str:
        """Take the group as a client elsewhere would, or by this process, and return the lease id."""
        request = replace(self.rig.request(job), host="elsewhere")
        if process and (found := procfs.look_at(process.pid)):
            request = replace(request, host=self.rig.node, pid=process.pid, start=found.start)
        await self.rig.driver.drive(flows.acquire(self.rig.group, request, timeout_s=100))
        return request.waiter

    async def turn(self, job: str) -> None:
        """Hold and yield. A job without a workload has a process of its own, which ends with its turn: else nobody
        could tell where its state is."""
        speaks = job in {workload.job for workload in self.workloads}
        process = None if speaks else await self.rig.job(job)
        lease = await self.hold(job, process)
        await self.rig.driver.run(scripts.yield_(self.rig.group, lease, None))
        if process:
            process.kill()
            process.wait()

    async def configure(self, **milliseconds: int) -> None:
        settings = {f"{name}_timeout_ms": str(value) for name, value in milliseconds.items()}
        await self.rig.driver.run(scripts.configure(self.rig.group, settings))

    async def residency(self, job: str) -> str:
        view = await self.rig.view()
        return view.jobs[job].residency if job in view.jobs else "absent"

    async def snapshot(self, job: str, **more: Any) -> str:
        return (await self.stub.Snapshot(pb.SnapshotRequest(job_id=job, group=GROUP, **more))).operation_id

    async def restore(self, job: str, **more: Any) -> str:
        return (await self.stub.Restore(pb.RestoreRequest(job_id=job, group=GROUP, **more))).operation_id

    async def operation(self, operation_id: str) -> pb.GetOperationResponse:
        return await self.stub.GetOperation(pb.GetOperationRequest(operation_id=operation_id))

    async def outcome(self, operation_id: str, deadline_s: float = 30.0) -> pb.GetOperationResponse:
        """How it ended."""

        async def ended() -> pb.GetOperationResponse | None:
            found = await self.operation(operation_id)
            return None if found.status == pb.OPERATION_STATUS_PENDING else found

        found: pb.GetOperationResponse = await until(ended, f"operation {operation_id} ends", deadline_s)
        return found


@asynccontextmanager
async def serving(
    url: str, prefix: str, node: str = NODE, **options: float
) -> AsyncIterator[tuple[SnapshotAgentServiceStub, SnapshotAgentService, str]]:
    """The service alone, and its address: a port of its own."""
    client = AsyncClient(url, "gateway", prefix)
    service = SnapshotAgentService(client, node=node, **{"reconnect_s": RECONNECT_S, **options})
    server = grpc.aio.server()
    add_SnapshotAgentServiceServicer_to_server(service, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        async with grpc.aio.insecure_channel(address) as channel:
            yield SnapshotAgentServiceStub(channel), service, address
    finally:
        await server.stop(0)
        for stand_in in list(service._workloads._known.values()):
            if stand_in:  # else it would stay for RECONNECT_S
                service._workloads._stay(stand_in)
                service._workloads._end(stand_in, said_good_bye=True)
        await service.close()
        await client.close()


@asynccontextmanager
async def placed(
    url: str, prefix: str, folder: Path, *, reconnect_s: float = RECONNECT_S, agent_runs: bool = True, **agent: Any
) -> AsyncIterator[Place]:
    """All of it; ends with every workload. The agent asks workloads by their channels, unless told otherwise. With
    ``agent_runs`` false a test starts agents itself."""
    rig = Rig(url, prefix, folder)
    stop = asyncio.Event()
    async with AsyncExitStack() as stack:
        stack.push_async_callback(rig.close)
        if agent_runs:
            await stack.enter_async_context(rig.agent(**{"make_backend": get_backend, "backends": {}, **agent}))
        options = CoordinatorOptions(url=url, prefix=prefix, name="c1", lease_ms=3000)
        coordinator = asyncio.create_task(run_coordinator(options, stop=stop))
        stack.push_async_callback(asyncio.wait, {coordinator})
        stack.callback(stop.set)
        place = Place(rig, *await stack.enter_async_context(serving(url, prefix, reconnect_s=reconnect_s)))

        async def driven() -> bool:
            return bool((await rig.view()).state.get("owner"))

        if agent_runs:
            await until(driven, "a coordinator drives the group")
        try:
            yield place
        finally:
            for workload in place.workloads:
                await workload.close()
