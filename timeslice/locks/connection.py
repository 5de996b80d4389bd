"""Redis clients as the protocol needs them: no hidden retries, no decoding, one protocol version."""

from __future__ import annotations

import redis
import redis.asyncio
from redis.backoff import NoBackoff
from redis.retry import Retry

from timeslice.errors import RedisUnreachableError, ServerUnsuitableError, TimeSliceError, UsageError

CONNECT_TIMEOUT_S = 3.0
REPLY_TIMEOUT_S = 5.0
BLOCK_MARGIN_S = 10.0  # a blocked read's socket waits this much longer than the server was told to

# Answers that mean "not now": reconnect or wait a little, then ask again. Every call may be repeated.
_TRANSIENT = ("LOADING", "BUSY", "READONLY", "MASTERDOWN", "UNBLOCKED", "CLUSTERDOWN", "TRYAGAIN", "OOM", "NOREPLICAS")


def connect(url: str, *, block_s: float = 0.0, single: bool = False) -> redis.Redis:
    """A client of our own, whatever the caller's own client was told. ``block_s``: the longest blocking read."""
    try:
        return redis.Redis.from_url(
            url,
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


def connect_async(url: str, *, block_s: float = 0.0, single: bool = False) -> redis.asyncio.Redis:
    """As ``connect``, for asyncio."""
    try:
        return redis.asyncio.Redis.from_url(
            url,
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


def is_transient(error: Exception) -> bool:
    """True if asking again later can help."""
    if isinstance(error, redis.exceptions.AuthenticationError | redis.exceptions.InvalidResponse):
        return False
    if isinstance(error, redis.exceptions.ConnectionError | redis.exceptions.TimeoutError | OSError):
        return True
    return isinstance(error, redis.exceptions.ResponseError) and str(error).startswith(_TRANSIENT)


def explain(error: Exception, where: str) -> TimeSliceError:
    """Our error for one of redis-py's. ``where`` is the address without its password."""
    if isinstance(error, redis.exceptions.AuthenticationError | redis.exceptions.NoPermissionError):
        return ServerUnsuitableError(f"Redis at {where} refuses these credentials: {error}. Check TIMESLICE_URL.")
    if isinstance(error, redis.exceptions.InvalidResponse):
        return ServerUnsuitableError(
            f"what answers at {where} speaks no Redis. Set TIMESLICE_URL to the Redis server that timeslice uses."
        )
    if str(error).startswith("OOM"):
        return RedisUnreachableError(
            f"Redis at {where} is full and takes no writes ({error}). Raise maxmemory or remove other data."
        )
    return RedisUnreachableError(
        f"Redis at {where} does not answer ({error}). Is it running, and is the address right? "
        "Start one for this machine with: timeslice up"
    )
