"""What redis-py's errors mean: ask again, or tell the user what to do."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import replace

import redis

from timeslice.addresses import Address, is_loopback, parse_url
from timeslice.errors import RedisUnreachableError, ServerUnsuitableError, TimeSliceError
from timeslice.locks.refusals import answers, is_no_right, no_right, not_now

# All that a call to a server may raise. redis-py's cluster client has a root of its own.
SERVER_ERRORS = (redis.exceptions.RedisError, redis.exceptions.RedisClusterException, OSError)

# Answers that mean "not now": reconnect or wait a little, then ask again. Every call may be repeated. redis-py takes
# the code off the text of those that have a class.
_TRANSIENT = (
    redis.exceptions.ConnectionError,  # also LOADING, and that no sentinel knows a master that is up
    redis.exceptions.TimeoutError,
    redis.exceptions.ReadOnlyError,
    redis.exceptions.OutOfMemoryError,
    redis.exceptions.ClusterError,  # also CLUSTERDOWN, MASTERDOWN, and redirections that lead nowhere
    redis.exceptions.TryAgainError,
    redis.exceptions.RedisClusterException,  # also slots that nobody serves
    OSError,
)
_TRANSIENT_CODES = ("BUSY ", "UNBLOCKED ", "NOREPLICAS ", "MISCONF ")
_NEVER = (redis.exceptions.CrossSlotTransactionError,)
_OF_THE_CONNECTION = (redis.exceptions.AuthenticationError, redis.exceptions.InvalidResponse)
_TLS = ("CERTIFICATE_VERIFY_FAILED", "WRONG_VERSION_NUMBER", "CERTIFICATE_REQUIRED", "UNKNOWN_CA", "NO_CERTIFICATE")
_NO_CLUSTER = "cluster support disabled"
_NOBODY = ("refused", "Connect call failed", "No such file")  # nothing listens there
_REDIS_STARTS = b"+-:$*"  # how every answer of a Redis server begins
_QUESTION = b"PING\r\n\r\n"
_PROBE_S = 0.3


def is_transient(error: BaseException, *, known: bool = False) -> bool:
    """True if asking again later can help. ``known``: this server answered us before, so what it refuses to a whole
    connection is about to be set right: credentials or certificates that are changed, a proxy that starts."""
    error = _root(error)
    if isinstance(error, _NEVER):
        return False
    if _is_refused_connection(error):
        return known
    return isinstance(error, _TRANSIENT) or str(error).startswith(_TRANSIENT_CODES)


def _is_refused_connection(error: BaseException) -> bool:
    return isinstance(error, _OF_THE_CONNECTION) or any(word in str(error) for word in _TLS)


def is_denied_place(error: BaseException) -> bool:
    """Whether the socket is another user's."""
    return "Permission denied" in str(error)  # redis-py keeps the text only


def _root(error: BaseException) -> BaseException:
    """The fault behind "the cluster cannot be connected"."""
    while isinstance(error, redis.exceptions.RedisClusterException):
        behind = error.__cause__ or error.__context__
        if not isinstance(behind, SERVER_ERRORS):
            break
        error = behind
    return error


def explain(error: BaseException, url: str, *, known: bool = False) -> TimeSliceError:
    """Our error for one of redis-py's. ``known`` as for ``is_transient``."""
    told = _explain(error, url)
    if known and isinstance(told, ServerUnsuitableError) and is_transient(error, known=True):
        return RedisUnreachableError(str(told))
    return told


def _explain(error: BaseException, url: str) -> TimeSliceError:
    address = parse_url(url)
    error, where = _root(error), address.shown
    words = str(error).rstrip(".")
    if address.socket and is_denied_place(error):
        return RedisUnreachableError(
            f"the socket at {where} belongs to another user, and you may not open it ({words}). "
            "Run your own server with: timeslice up; or set TIMESLICE_URL to one that you may use."
        )
    if is_no_right(error):
        return ServerUnsuitableError(no_right(words, address))
    if isinstance(error, redis.exceptions.AuthenticationError):
        return ServerUnsuitableError(
            f"Redis at {where} refuses these credentials: {words}. Check TIMESLICE_URL, or TIMESLICE_USERNAME and "
            "TIMESLICE_PASSWORD."
        )
    if any(word in words for word in _TLS):
        return _no_tls(where, words)
    if isinstance(error, redis.exceptions.InvalidResponse):
        return _no_redis(where)
    if isinstance(error, redis.exceptions.OutOfMemoryError):
        return RedisUnreachableError(
            f"Redis at {where} is full and takes no writes ({words}). Raise maxmemory or remove other data."
        )
    if isinstance(error, redis.exceptions.ResponseError) and not is_transient(error):
        return ServerUnsuitableError(_refusal(error, words, address))
    if answers(error):
        return RedisUnreachableError(not_now(words, where))
    hint = "A port with TLS needs rediss://. " if _hung_up(words) and not address.tls and address.hosts else ""
    return RedisUnreachableError(
        f"Redis at {where} does not answer ({words}). Is it running, and is the address right? "
        f"{hint}{_start(words, address)}".rstrip()
    )


def _start(words: str, address: Address) -> str:
    """Where nothing listens on this machine, a server of one's own may be what is missing."""
    here = address.kind == "standalone" and all(is_loopback(host) for host, _ in address.hosts)
    return "Start one for this machine with: timeslice up" if here and any(each in words for each in _NOBODY) else ""


def _hung_up(words: str) -> bool:
    return "reset by peer" in words or "closed" in words


def _refusal(error: BaseException, words: str, address: Address) -> str:
    hosts = replace(address, username=None, password=None, master="").shown.partition("://")[2]
    if isinstance(error, redis.exceptions.AskError) and address.kind != "cluster":  # also MOVED
        scheme = "rediss+cluster" if address.tls else "redis+cluster"
        slot, _, other = words.partition(" ")
        return (
            f"Redis at {address.shown} is a node of a cluster (it sends us to {other} for slot {slot}). "
            f"Use {scheme}://{hosts}"
        )
    if _NO_CLUSTER in words:
        scheme = "rediss" if address.tls else "redis"
        return f"Redis at {address.shown} is no cluster ({words}). Use {scheme}://{hosts.partition(',')[0]}"
    if "unknown command" in words and any(f"'{each}'" in words for each in ("TIME", "EVALSHA", "EVALSHA_RO")):
        scheme = "rediss+sentinel" if address.tls else "redis+sentinel"
        return (
            f"Redis at {address.shown} is a sentinel, by the look of it ({words}). "
            f"Use {scheme}://{hosts}/NAME, with the name of the master that it watches"
        )
    return f"Redis at {address.shown} refuses what timeslice sends: {words}. Run: timeslice doctor"


def _no_tls(where: str, words: str) -> ServerUnsuitableError:
    if "CERTIFICATE_VERIFY_FAILED" in words:
        advice = "For a private certificate authority add ?ssl_ca_certs=/path/of/ca.pem to the URL"
    elif "CERTIFICATE" in words or "UNKNOWN_CA" in words:
        advice = "The server wants a certificate of yours: add ?ssl_certfile=...&ssl_keyfile=... to the URL"
    else:
        advice = "The port speaks no TLS: use the server's TLS port, or redis:// instead of rediss://"
    return ServerUnsuitableError(f"no TLS connection to {where}: {words}. {advice}")


def _no_redis(where: str) -> ServerUnsuitableError:
    return ServerUnsuitableError(
        f"what answers at {where} speaks no Redis. Set TIMESLICE_URL to the Redis server that timeslice uses."
    )


def speaks_otherwise(url: str) -> ServerUnsuitableError | None:
    """An error that says so, if what listens there is no Redis, or has no TLS though the URL says so.

    For servers that closed the connection, or hung. A gRPC server greets at once; others complain of a question that
    they don't understand.
    """
    address = parse_url(url)
    for host in address.hosts:
        try:
            with socket.create_connection(host, timeout=_PROBE_S) as probe:
                first = _first_byte(probe)
        except OSError:
            continue
        if said := _judge(first, address):
            return said
    return None


def _first_byte(probe: socket.socket) -> bytes:
    """Empty if the server hangs up."""
    try:
        return probe.recv(1)
    except TimeoutError:
        probe.sendall(_QUESTION)
        return probe.recv(1)


async def speaks_otherwise_async(url: str) -> ServerUnsuitableError | None:
    """As ``speaks_otherwise``, for asyncio."""
    address = parse_url(url)
    for host in address.hosts:
        try:
            async with asyncio.timeout(_PROBE_S):
                reader, writer = await asyncio.open_connection(*host)
        except OSError:
            continue
        try:
            first = await _first_byte_async(reader, writer)
        except OSError:
            continue
        finally:
            writer.close()
        if said := _judge(first, address):
            return said
    return None


async def _first_byte_async(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    try:
        async with asyncio.timeout(_PROBE_S):
            return await reader.read(1)
    except TimeoutError:
        writer.write(_QUESTION)
        async with asyncio.timeout(_PROBE_S):
            return await reader.read(1)


def is_denial(error: ServerUnsuitableError) -> bool:
    """Whether it was one command or key that was refused, and not the server or the credentials as a whole."""
    cause = error.__cause__
    return cause is not None and (is_no_right(cause) or "unknown command" in str(cause))


def _judge(first: bytes, address: Address) -> ServerUnsuitableError | None:
    if not first:
        return None  # it hung up, as servers do that are going down, too
    if first not in _REDIS_STARTS:
        return _no_redis(address.shown)
    return _no_tls(address.shown, "it answers without") if address.tls else None
