"""Gateways in the test's own loop, and callers with nothing but the generated stubs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any, TypeAlias

import grpc
import grpc.aio
import pytest

from tests.agent.rig import until
from tests.client.world import World
from timeslice.gateway.proto import timeslice_orchestrator_pb2 as pb
from timeslice.gateway.proto.timeslice_orchestrator_pb2_grpc import TimeSliceOrchestratorServiceStub
from timeslice.gateway.server import GatewayOptions, run_gateway
from timeslice.locks import scripts

Code = grpc.StatusCode
Acquiring: TypeAlias = "grpc.aio.UnaryUnaryCall[pb.AcquireRequest, pb.AcquireResponse]"


class Caller:
    """A client with a channel of its own, as a stranger would write it from the .proto file."""

    def __init__(self, target: str, credentials: grpc.ChannelCredentials | None = None) -> None:
        self.channel = (
            grpc.aio.secure_channel(target, credentials) if credentials else grpc.aio.insecure_channel(target)
        )
        self.stub = TimeSliceOrchestratorServiceStub(self.channel)

    def acquire(self, job: str, group: str = "g", *, timeout: float | None = 30.0) -> Acquiring:
        return self.stub.Acquire(pb.AcquireRequest(job_id=job, group_id=group), timeout=timeout)

    async def yield_(self, job: str, group: str = "g") -> pb.YieldResponse:
        return await self.stub.Yield(pb.YieldRequest(job_id=job, group_id=group), timeout=30.0)

    async def status(self, group: str = "g") -> pb.GetGroupStatusResponse:
        return await self.stub.GetGroupStatus(pb.GetGroupStatusRequest(group_id=group), timeout=30.0)


class Gateway:
    """One that runs in this loop."""

    def __init__(self, options: GatewayOptions) -> None:
        self.options = options
        self.callers: list[Caller] = []
        self._stop = asyncio.Event()
        self._port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(run_gateway(options, ready=self._port.set_result, stop=self._stop))

    async def ready(self) -> None:
        self._task.add_done_callback(lambda _: self._port.done() or self._port.cancel())
        await asyncio.wait({self._port})
        if self._port.cancelled():
            self._task.result()  # it did not come so far: raises why

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self._port.result()}"

    def caller(self, credentials: grpc.ChannelCredentials | None = None) -> Caller:
        self.callers.append(Caller(self.target, credentials))
        return self.callers[-1]

    async def end(self) -> None:
        self._stop.set()
        await self._task

    async def stop(self) -> None:
        """End it, and its callers."""
        await self.end()
        for caller in self.callers:
            await caller.channel.close()


MakeGateway: TypeAlias = Callable[..., Coroutine[Any, Any, Gateway]]


@pytest.fixture
def world(redis_url: str, prefix: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """A look at the session's server under this test's prefix."""
    made = World(redis_url, prefix)
    yield made
    made.close()


@pytest.fixture
async def make_gateway(world: World, prefix: str) -> AsyncIterator[MakeGateway]:
    """Start gateways; take GatewayOptions' arguments. They end with the test."""
    started: list[Gateway] = []

    async def make(**changes: Any) -> Gateway:
        options = {"url": world.url, "prefix": prefix, "node": "n1", "listen": "127.0.0.1:0", **changes}
        made = Gateway(GatewayOptions(**options))
        await made.ready()
        started.append(made)
        return made

    yield make
    for each in started:
        await each.stop()


@pytest.fixture
async def gateway(make_gateway: MakeGateway) -> Gateway:
    return await make_gateway()


@pytest.fixture
def caller(gateway: Gateway) -> Caller:
    return gateway.caller()


@pytest.fixture
def declare(world: World) -> Callable[[str], None]:
    """Make a lock-only group."""

    def make(group: str) -> None:
        world.run(scripts.configure(world.group(group), {}, mode="lock"))
        world.redis.sadd(world.keys.groups, group)

    return make


@pytest.fixture
def lock(declare: Callable[[str], None]) -> None:
    """The group ``g``, lock-only."""
    declare("g")


async def queued(world: World, *jobs: str, group: str = "g") -> None:
    """Wait until these jobs wait, in this order."""
    await until(lambda: world.queue(group) == list(jobs), f"{jobs} wait for {group}")


async def refused(call: Coroutine[Any, Any, Any] | Acquiring) -> tuple[Code, str]:
    """The status of a call that fails, and its words."""
    with pytest.raises(grpc.aio.AioRpcError) as told:
        await call
    return told.value.code(), told.value.details() or ""
