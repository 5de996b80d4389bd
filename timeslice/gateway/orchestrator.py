"""llm-d's orchestrator service: acquire and yield groups, and see how they stand."""

from __future__ import annotations

import asyncio
import logging
from typing import TypeAlias

from grpc.aio import ServicerContext

from timeslice.client.compat import group_status
from timeslice.errors import AcquireTimeoutError
from timeslice.gateway.faults import answering
from timeslice.gateway.leases import Leases
from timeslice.gateway.proto import timeslice_orchestrator_pb2 as pb
from timeslice.gateway.proto.timeslice_orchestrator_pb2_grpc import TimeSliceOrchestratorServiceServicer
from timeslice.names import check_name

log = logging.getLogger("timeslice.gateway")

_Acquiring: TypeAlias = ServicerContext[pb.AcquireRequest, pb.AcquireResponse]
_Yielding: TypeAlias = ServicerContext[pb.YieldRequest, pb.YieldResponse]
_Listing: TypeAlias = ServicerContext[pb.ListGroupsRequest, pb.ListGroupsResponse]
_Asking: TypeAlias = ServicerContext[pb.GetGroupStatusRequest, pb.GetGroupStatusResponse]


class Orchestrator(TimeSliceOrchestratorServiceServicer):
    """Who reaches it may take and yield groups in any job's name: callers are told apart by job id alone."""

    def __init__(self, leases: Leases) -> None:
        self._leases = leases

    @answering
    async def Acquire(self, request: pb.AcquireRequest, context: _Acquiring) -> pb.AcquireResponse:  # noqa: N802
        group, job = request.group_id, request.job_id
        limit_s = _patience_s(context.time_remaining())
        try:
            async with asyncio.timeout(limit_s):
                lease, new = await self._leases.take(group, job)
        except TimeoutError as error:
            raise AcquireTimeoutError(
                f"group {group}: job {job} was not granted within {limit_s:.3g} s, which is a little less than the "
                f"call's deadline; it has left the queue. Ask again, and longer. See: timeslice queue {group}",
                group=group,
                job=job,
            ) from error
        log.debug("group %s: job %s from %s %s it", group, job, context.peer(), "takes" if new else "has")
        return pb.AcquireResponse(
            success=True,
            waited_ms=round(lease.grant.waited_s * 1000) if new else 0,
            context_restored=new and lease.grant.how == "restored",
        )

    @answering
    async def Yield(self, request: pb.YieldRequest, context: _Yielding) -> pb.YieldResponse:  # noqa: N802
        group, job = request.group_id, request.job_id
        done = await self._leases.give_up(group, job)
        log.debug("group %s: job %s from %s yields it, %d waiting", group, job, context.peer(), done.pending)
        return pb.YieldResponse(success=True, pending_waiters=done.pending, snapshot_deferred=done.kept)

    @answering
    async def ListGroups(self, request: pb.ListGroupsRequest, context: _Listing) -> pb.ListGroupsResponse:  # noqa: N802, ARG002
        return pb.ListGroupsResponse(group_ids=await self._leases.groups())

    @answering
    async def GetGroupStatus(  # noqa: N802
        self,
        request: pb.GetGroupStatusRequest,
        context: _Asking,  # noqa: ARG002
    ) -> pb.GetGroupStatusResponse:
        status = group_status(await self._leases.look(check_name("group", request.group_id)))
        group = pb.GroupStatus(
            group_id=status.group_id,
            group_state=str(status.group_state),
            state_timestamp=status.state_timestamp,
            locking_job=status.locking_job,
            active_job=status.active_job,
            waiter_queue_depth=status.waiter_queue_depth,
            loaded_job=status.loaded_job,
        )
        states = [
            pb.SnapshotAgentJobState(
                agent=each.agent,
                job_state=str(each.job_state),
                job_id=each.job_id,
            )
            for each in status.agent_job_states
        ]
        return pb.GetGroupStatusResponse(group=group, agent_job_states=states)


def _patience_s(left_s: float | None) -> float | None:
    """How long to wait for a caller that waits for ``left_s``: a little less, for a grant that arrives after it has
    gone would block the group. gRPC tells deadlines rounded up, by up to a hundredth."""
    return None if left_s is None else left_s - min(left_s / 10, 0.25 + left_s / 50)
