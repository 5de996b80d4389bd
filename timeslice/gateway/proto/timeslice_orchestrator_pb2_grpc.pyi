from collections.abc import AsyncIterator as _AsyncIterator

import grpc.aio as _aio

from timeslice.gateway.proto import timeslice_orchestrator_pb2 as _m

class TimeSliceOrchestratorServiceStub:
    def __init__(self, channel: _aio.Channel) -> None: ...
    Acquire: _aio.UnaryUnaryMultiCallable[_m.AcquireRequest, _m.AcquireResponse]
    Yield: _aio.UnaryUnaryMultiCallable[_m.YieldRequest, _m.YieldResponse]
    ListGroups: _aio.UnaryUnaryMultiCallable[_m.ListGroupsRequest, _m.ListGroupsResponse]
    GetGroupStatus: _aio.UnaryUnaryMultiCallable[_m.GetGroupStatusRequest, _m.GetGroupStatusResponse]

class TimeSliceOrchestratorServiceServicer:
    async def Acquire(self, request: _m.AcquireRequest, context: _aio.ServicerContext[_m.AcquireRequest, _m.AcquireResponse]) -> _m.AcquireResponse: ...
    async def Yield(self, request: _m.YieldRequest, context: _aio.ServicerContext[_m.YieldRequest, _m.YieldResponse]) -> _m.YieldResponse: ...
    async def ListGroups(self, request: _m.ListGroupsRequest, context: _aio.ServicerContext[_m.ListGroupsRequest, _m.ListGroupsResponse]) -> _m.ListGroupsResponse: ...
    async def GetGroupStatus(self, request: _m.GetGroupStatusRequest, context: _aio.ServicerContext[_m.GetGroupStatusRequest, _m.GetGroupStatusResponse]) -> _m.GetGroupStatusResponse: ...

def add_TimeSliceOrchestratorServiceServicer_to_server(servicer: TimeSliceOrchestratorServiceServicer, server: _aio.Server) -> None: ...
