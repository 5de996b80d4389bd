"""llm-d's snapshot agent over our Redis: the servicer. What moves device state is agents and coordinators, not this."""

# ruff: noqa: N802 - the methods' names are the interface
from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any, Never

import grpc.aio
from pydantic import ValidationError

from timeslice.client.aio import AsyncClient
from timeslice.client.compat import JobState
from timeslice.errors import TimeSliceError, UsageError, quoted
from timeslice.gateway.faults import code_of, details_of
from timeslice.gateway.moves import QUEUE_S, Mover
from timeslice.gateway.operations import FullError, Kind, Operation, Operations
from timeslice.gateway.proto import snapshot_agent_pb2 as pb
from timeslice.gateway.proto.snapshot_agent_pb2_grpc import SnapshotAgentServiceServicer
from timeslice.gateway.residency import node_status
from timeslice.gateway.selection import check_backend, modes_of
from timeslice.gateway.standin import Order, Registration
from timeslice.gateway.workloads import RECONNECT_S, ConnectedError, StandIn, Workloads
from timeslice.models import brief
from timeslice.names import check_name

log = logging.getLogger("timeslice.gateway")

REGISTER_S = 10.0  # a stream that does not say by then who it is ends
_SETTLE_S = 1.0  # what breaks a stream ends its messages first, and cancels it a moment later

Context = grpc.aio.ServicerContext[Any, Any]

_CODES: dict[type[TimeSliceError], grpc.StatusCode] = {
    ConnectedError: grpc.StatusCode.ALREADY_EXISTS,
    FullError: grpc.StatusCode.RESOURCE_EXHAUSTED,
}
_JOB_STATES = {
    JobState.IDLE: pb.JOB_STATE_IDLE,
    JobState.RUNNING: pb.JOB_STATE_RUNNING,
    JobState.TRANSITIONING: pb.JOB_STATE_TRANSITIONING,
    JobState.SAVED: pb.JOB_STATE_SAVED,
    JobState.FAULTED: pb.JOB_STATE_FAULTED,
}


class SnapshotAgentService(SnapshotAgentServiceServicer):
    """``node`` is the one whose agent moves the workloads that connect here."""

    def __init__(
        self, client: AsyncClient, *, node: str, queue_s: float = QUEUE_S, reconnect_s: float = RECONNECT_S
    ) -> None:
        self._client, self._node = client, node
        self._mover = Mover(client, node, queue_s)
        self._operations = Operations()
        self._workloads = Workloads(client, node, reconnect_s)

    async def close(self) -> None:
        """Give up pending operations, and let go of the stand-ins."""
        await self._operations.close()
        await self._workloads.close()

    async def Snapshot(self, request: pb.SnapshotRequest, context: Context) -> pb.SnapshotResponse:
        """Begin to put a job's state out to host memory."""
        return pb.SnapshotResponse(operation_id=(await self._begin("snapshot", request, context)).id)

    async def Restore(self, request: pb.RestoreRequest, context: Context) -> pb.RestoreResponse:
        """Begin to bring a job's state back."""
        return pb.RestoreResponse(operation_id=(await self._begin("restore", request, context)).id)

    async def _begin(self, kind: Kind, request: pb.SnapshotRequest | pb.RestoreRequest, context: Context) -> Operation:
        move = self._mover.snapshot if kind == "snapshot" else self._mover.restore
        try:
            job, group = check_name("job", request.job_id), check_name("group", request.group)
            check_backend(request.backend_config)
            await self._mover.view(group)
            return self._operations.start(kind, group, job, lambda: move(group, job))
        except TimeSliceError as error:
            await _abort(context, error)

    async def GetOperation(self, request: pb.GetOperationRequest, context: Context) -> pb.GetOperationResponse:
        """How an operation stands."""
        found = self._operations.find(request.operation_id)
        if found is None:
            await context.abort(
                grpc.StatusCode.NOT_FOUND,
                f"no operation {quoted(request.operation_id[:100])}: the gateway was started anew since, or it ended "
                "over an hour ago. Ask for what you need again; that changes nothing if it is done",
            )
        answer = pb.GetOperationResponse(status=_status(found), elapsed_ms=found.elapsed_ms)
        if found.error:
            answer.error = found.error
        if found.moved and found.moved.storage_bytes is not None:
            answer.storage_bytes = found.moved.storage_bytes
        if found.moved and found.moved.device_bytes is not None:
            answer.snapshot_device_bytes = found.moved.device_bytes
        return answer

    async def Status(self, request: pb.StatusRequest, context: Context) -> pb.StatusResponse:  # noqa: ARG002
        """The jobs and accelerators of this node."""
        try:
            told = await node_status(self._client, self._node)
        except TimeSliceError as error:
            await _abort(context, error)
        return pb.StatusResponse(
            job_statuses=[pb.JobStatus(job_id=job, state=_JOB_STATES[state]) for job, state in told.jobs.items()],
            accelerator_statuses=[
                pb.AcceleratorStatus(id=each.id, memory_used_bytes=each.used_bytes, memory_total_bytes=each.total_bytes)
                for each in told.accelerators
            ],
        )

    async def WorkloadChannel(  # type: ignore[override]  # the other form that grpc.aio takes: it writes by itself
        self, request_iterator: AsyncIterator[pb.WorkloadMessage], context: Context
    ) -> None:
        """Stand in for a workload for as long as its stream lasts. The first header says that it is registered."""
        try:
            stand_in = await self._workloads.attach(await _registration(request_iterator))
        except TimeSliceError as error:
            await _abort(context, error)
        ended = False
        try:
            await context.send_initial_metadata((("registered", "1"),))
            ended = await _serve(stand_in, request_iterator, context)
        except UsageError as error:
            await _abort(context, error)
        finally:
            self._workloads.detach(stand_in, ended=ended)
        if stand_in.ended:
            await context.abort(
                grpc.StatusCode.UNAVAILABLE, "the process that stands in for this workload was ended; register again"
            )


async def _registration(messages: AsyncIterator[pb.WorkloadMessage]) -> Registration:
    """The first message. UsageError when it says anything but who this is."""
    try:
        async with asyncio.timeout(REGISTER_S):
            first = await anext(messages, None)
    except TimeoutError:
        raise UsageError(f"nothing came within {REGISTER_S:g} s; the first message must be `register`") from None
    if first is None or first.WhichOneof("message") != "register":
        raise UsageError("the first message of a WorkloadChannel must be `register`")
    asked = first.register
    try:
        return Registration(
            group=check_name("group", asked.group),
            job=check_name("job", asked.job_id),
            modes=modes_of(asked.capabilities),
            tags=tuple(asked.capabilities.tags),
        )
    except ValidationError as error:
        raise UsageError(f"register: {brief(error)}") from None


async def _serve(stand_in: StandIn, messages: AsyncIterator[pb.WorkloadMessage], context: Context) -> bool:
    """Pass orders and answers on. True: the workload has closed the stream itself. UsageError for what is no answer."""
    listening = asyncio.create_task(_listen(messages, stand_in))
    passing = asyncio.create_task(_pass_on(stand_in, context))
    try:
        await asyncio.wait({listening, passing}, return_when=asyncio.FIRST_COMPLETED)
        if not listening.done():
            return False
        listening.result()
        await asyncio.sleep(_SETTLE_S)
        return True
    finally:
        listening.cancel()
        passing.cancel()
        await asyncio.gather(listening, passing, return_exceptions=True)


async def _listen(messages: AsyncIterator[pb.WorkloadMessage], stand_in: StandIn) -> None:
    """Take answers until the workload closes the stream."""
    async for message in messages:
        if message.WhichOneof("message") != "result":
            raise UsageError("this WorkloadChannel is registered; only `result` may follow")
        stand_in.answer(message.result.command_id, ok=message.result.ok, error=message.result.error)


async def _pass_on(stand_in: StandIn, context: Context) -> None:
    async for order in stand_in.orders():
        await context.write(_command(order))


def _command(order: Order) -> pb.AgentCommand:
    tags = list(order.tags)
    if order.action == "restore":
        return pb.AgentCommand(command_id=order.id, restore=pb.RestoreCommand(tags=tags))
    mode = pb.SUSPEND_MODE_DISCARD if order.mode == "discard" else pb.SUSPEND_MODE_OFFLOAD
    return pb.AgentCommand(command_id=order.id, snapshot=pb.SnapshotCommand(mode=mode, tags=tags))


def _status(operation: Operation) -> pb.OperationStatus:
    if operation.ended is None:
        return pb.OPERATION_STATUS_PENDING
    return pb.OPERATION_STATUS_FAILED if operation.error else pb.OPERATION_STATUS_COMPLETE


async def _abort(context: Context, error: TimeSliceError) -> Never:
    await context.abort(_CODES.get(type(error)) or code_of(error), details_of(error))
