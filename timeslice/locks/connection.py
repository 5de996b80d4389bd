"""Redis clients as the protocol needs them: no hidden retries, no decoding, one protocol version."""

from __future__ import annotations

import asyncio
from typing import Any

import redis
import redis.asyncio
from redis.backoff import NoBackoff
from redis.retry import Retry

from timeslice.errors import RedisUnreachableError, ServerUnsuitableError, TimeSliceError, UsageError

CONNECT_TIMEOUT_S = 3.0
REPLY_TIMEOUT_S = 5.0
_OURS = {
    *("decode_responses", "protocol", "socket_connect_timeout", "socket_timeout", "retry_on_timeout"),
    *("health_check_interval", "single_connection_client"),
}
BLOCK_MARGIN_S = 10.0  # a blocked read's socket waits this much longer than the server was told to

# Answers that mean "not now": reconnect or wait a little, then ask again. Every call may be repeated. redis-py takes
# the code off the text of those that have a class.
_TRANSIENT = (
    redis.exceptions.ConnectionError,  # also LOADING
    redis.exceptions.TimeoutError,
    redis.exceptions.ReadOnlyError,
    redis.exceptions.OutOfMemoryError,
    redis.exceptions.ClusterDownError,  # also MASTERDOWN
    redis.exceptions.TryAgainError,
    OSError,
)
_TRANSIENT_CODES = ("BUSY ", "UNBLOCKED ", "NOREPLICAS ", "MISCONF ")


def _with_our_options(url: str) -> str:
    """The URL without those of redis-py's options that are ours to set; else they would win."""
    address, mark, query = url.partition("?")
    kept = [part for part in query.split("&") if part.partition("=")[0] not in _OURS]
    return address + mark + "&".join(kept)


def connect(url: str, *, block_s: float = 0.0, single: bool = False) -> redis.Redis:
    """A client of our own, whatever the caller's own client was told. ``block_s``: the longest blocking read."""
    try:
        return redis.Redis.from_url(
            _with_our_options(url),
            decode_responses=False,
            protocol=2,
            retry=Retry(NoBackoff(), 0),
            socket_connect_timeout=CONNECT_TIMEOUT_S,
            socket_timeout=block_s + BLOCK_MARGIN_S if block_s else REPLY_TIMEOUT_S,
            health_check_interval=0,
            single_connection_client=single,
        )
    except ValueError as error:
        raise UsageError(f"the Redis URL can't be read: {error}") from error


class _Cancellable:
    """Sends with ``asyncio.timeout``. redis-py does it with ``asyncio.wait_for``, which loses a cancellation that comes
    when the data has just been sent (before Python 3.12): the task would go on as if nobody had cancelled it."""

    socket_timeout: float | None

    async def send_packed_command(self, command: Any, check_health: bool = True) -> None:
        limit, self.socket_timeout = self.socket_timeout, None
        try:
            async with asyncio.timeout(limit):
                await super().send_packed_command(command, check_health)  # type: ignore[misc]
        finally:
            self.socket_timeout = limit


def connect_async(url: str, *, block_s: float = 0.0, single: bool = False) -> redis.asyncio.Redis:
    """As ``connect``, for asyncio."""
    try:
        client = redis.asyncio.Redis.from_url(
            _with_our_options(url),
            decode_responses=False,
            protocol=2,
            retry=redis.asyncio.retry.Retry(NoBackoff(), 0),
            socket_connect_timeout=CONNECT_TIMEOUT_S,
            socket_timeout=block_s + BLOCK_MARGIN_S if block_s else REPLY_TIMEOUT_S,
            health_check_interval=0,
            single_connection_client=single,
        )
    except ValueError as error:
        raise UsageError(f"the Redis URL can't be read: {error}") from error
    pool = client.connection_pool
    pool.connection_class = type("Connection", (_Cancellable, pool.connection_class), {})
    return client


def is_transient(error: Exception) -> bool:
    """True if asking again later can help."""
    if isinstance(error, redis.exceptions.AuthenticationError | redis.exceptions.InvalidResponse):
        return False
    return isinstance(error, _TRANSIENT) or str(error).startswith(_TRANSIENT_CODES)


def explain(error: Exception, where: str) -> TimeSliceError:
    """Our error for one of redis-py's. ``where`` is the address without its password."""
    words = str(error).rstrip(".")
    if where.startswith("unix") and "Permission denied" in words:  # redis-py keeps the text only
        return RedisUnreachableError(
            f"the socket at {where} belongs to another user, and you may not open it ({words}). "
            "Run your own server with: timeslice up; or set TIMESLICE_URL to one that you may use."
        )
    if isinstance(error, redis.exceptions.AuthenticationError | redis.exceptions.NoPermissionError):
        return ServerUnsuitableError(f"Redis at {where} refuses these credentials: {words}. Check TIMESLICE_URL.")
    if isinstance(error, redis.exceptions.InvalidResponse):
        return ServerUnsuitableError(
            f"what answers at {where} speaks no Redis. Set TIMESLICE_URL to the Redis server that timeslice uses."
        )
    if isinstance(error, redis.exceptions.OutOfMemoryError):
        return RedisUnreachableError(
            f"Redis at {where} is full and takes no writes ({words}). Raise maxmemory or remove other data."
        )
    if isinstance(error, redis.exceptions.ResponseError) and not is_transient(error):
        return ServerUnsuitableError(f"Redis at {where} refuses what timeslice sends: {words}. Run: timeslice doctor")
    return RedisUnreachableError(
        f"Redis at {where} does not answer ({words}). Is it running, and is the address right? "
        "Start one for this machine with: timeslice up"
    )
