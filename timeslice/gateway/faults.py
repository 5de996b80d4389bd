"""What went wrong, in the status codes of gRPC."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import grpc
import grpc.aio

from timeslice.errors import (
    AcquireTimeoutError,
    CancelledByOperatorError,
    DeadlockError,
    GroupModeError,
    LeaseLostError,
    LeaseUncertainError,
    NotHolderError,
    RedisUnreachableError,
    RefusedError,
    ServerUnsuitableError,
    TimeSliceError,
    UnknownGroupError,
    UnknownJobError,
    UnknownNodeError,
    UsageError,
)
from timeslice.gateway.operations import FullError

S = TypeVar("S")
A = TypeVar("A")
R = TypeVar("R")
Method = Callable[[S, A, "grpc.aio.ServicerContext[A, R]"], Coroutine[Any, Any, R]]

log = logging.getLogger("timeslice.gateway")

_DETAILS_MAX = 2000  # bytes; each may take three on the wire, where 8 KiB are sure to pass


class UnavailableError(TimeSliceError):
    """It can't be had now, through no fault of the caller's: ask again later."""


_CODES: tuple[tuple[type[TimeSliceError] | tuple[type[TimeSliceError], ...], grpc.StatusCode], ...] = (
    ((UnknownGroupError, UnknownJobError, UnknownNodeError), grpc.StatusCode.NOT_FOUND),
    (FullError, grpc.StatusCode.RESOURCE_EXHAUSTED),  # before its kind
    ((GroupModeError, RefusedError), grpc.StatusCode.FAILED_PRECONDITION),
    (UsageError, grpc.StatusCode.INVALID_ARGUMENT),
    ((NotHolderError, LeaseLostError), grpc.StatusCode.PERMISSION_DENIED),
    ((UnavailableError, RedisUnreachableError, ServerUnsuitableError), grpc.StatusCode.UNAVAILABLE),
    (LeaseUncertainError, grpc.StatusCode.UNAVAILABLE),
    (AcquireTimeoutError, grpc.StatusCode.DEADLINE_EXCEEDED),
    ((DeadlockError, CancelledByOperatorError), grpc.StatusCode.ABORTED),
)


def code_of(error: TimeSliceError) -> grpc.StatusCode:
    """The status that tells a caller of this error."""
    return next((code for kinds, code in _CODES if isinstance(error, kinds)), grpc.StatusCode.INTERNAL)


def details_of(error: TimeSliceError) -> str:
    """Its message, cut in the middle to what the headers of an answer have room for: callers wrote some of it."""
    told, half = str(error).encode(), _DETAILS_MAX // 2
    short = told if len(told) <= _DETAILS_MAX else told[:half] + b"..." + told[-half:]
    return short.decode(errors="ignore")


def answering(method: Method[S, A, R]) -> Method[S, A, R]:
    """Turn a TimeSliceError of an rpc into its status, with the message as details."""

    @functools.wraps(method)
    async def answer(self: S, request: A, context: grpc.aio.ServicerContext[A, R]) -> R:
        try:
            return await method(self, request, context)
        except TimeSliceError as error:
            log.debug("%s: %s", getattr(method, "__name__", ""), error)
            await context.abort(code_of(error), details_of(error))

    return answer
