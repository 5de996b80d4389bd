"""Redis clients as the protocol needs them: no hidden retries, no decoding, one protocol version.

One server, sentinels or a cluster: redis-py's own client for each. All answer to the same methods, as far as this
project uses them: plain commands with their keys, one at a time. Pipelines are the drivers' business.
"""

from __future__ import annotations

import asyncio
import functools
import os
from typing import Any

import redis
import redis.asyncio
import redis.asyncio.cluster
import redis.asyncio.sentinel
import redis.cluster
import redis.sentinel
from redis.backoff import NoBackoff
from redis.retry import Retry

from timeslice.addresses import OVERRIDDEN, Address, parse_url
from timeslice.errors import UsageError
from timeslice.locks.sentinels import AsyncSentinels, Sentinels

CONNECT_TIMEOUT_S = 3.0
REPLY_TIMEOUT_S = 5.0
SENTINEL_TIMEOUT_S = 1.0  # each: the others know as much
BLOCK_MARGIN_S = 3.0  # a blocked read's socket waits this much longer than the server was told to
_UNLIMITED = 2**31
_FLAGS = ("ssl_check_hostname", "socket_keepalive")
_FILES = ("ssl_ca_certs", "ssl_ca_path", "ssl_certfile", "ssl_keyfile")
_BOOLEANS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


def connect(url: str, *, block_s: float = 0.0, reply_s: float = REPLY_TIMEOUT_S) -> redis.Redis:
    """A client of our own, whatever the caller's own client was told. ``block_s``: the longest blocking read.

    For a cluster it asks at once who has which slot, and raises redis-py's errors when nobody tells.
    """
    address = parse_url(url)
    options = _options(address, block_s, reply_s)
    match address.kind:
        case "standalone":
            client = redis.Redis(**_place(address), **_greeting(address), retry=Retry(NoBackoff(), 0), **options)
        case "sentinel":
            client = _behind_sentinels(address, options)
        case "cluster":
            return _cluster(address, options)
    pool = client.connection_pool
    pool.connection_class = _interruptible(pool.connection_class)
    return client


def _cluster(address: Address, options: dict[str, Any]) -> redis.Redis:
    nodes = [redis.cluster.ClusterNode(*host) for host in address.hosts]  # type: ignore[no-untyped-call]
    options.pop("db", None)
    options["redis_connect_func"] = _greet_a_node if address.tls else _adopt
    cluster: Any = redis.cluster.RedisCluster(
        startup_nodes=nodes, retry=Retry(NoBackoff(), 0), require_full_coverage=False, **options
    )
    return cluster  # type: ignore[no-any-return]


def connect_async(url: str, *, block_s: float = 0.0) -> redis.asyncio.Redis:
    """As ``connect``, for asyncio; nothing is asked before the first command."""
    address = parse_url(url)
    options = _options(address, block_s, REPLY_TIMEOUT_S)
    retry = redis.asyncio.retry.Retry(NoBackoff(), 0)
    match address.kind:
        case "standalone":
            client = redis.asyncio.Redis(**_place(address), retry=retry, **options)
        case "sentinel":
            asked = AsyncSentinels(address.hosts, sentinel_kwargs=_sentinel_options(address, options))  # type: ignore[no-untyped-call]
            client = asked.master_for(address.master, retry=retry, **options)
        case "cluster":
            return _cluster_async(address, options)
    pool = client.connection_pool
    pool.connection_class = _cancellable(pool.connection_class)
    return client


def _cluster_async(address: Address, options: dict[str, Any]) -> redis.asyncio.Redis:
    nodes = [redis.asyncio.cluster.ClusterNode(*host) for host in address.hosts]
    options.pop("db", None)
    late = {name: options.pop(name) for name in ("ssl_ca_path", "ssl_password") if name in options}
    cluster: Any = redis.asyncio.RedisCluster(
        startup_nodes=nodes,
        retry=redis.asyncio.retry.Retry(NoBackoff(), 0),
        require_full_coverage=False,
        reinitialize_steps=0,  # a redirection is no reason to close what others wait on
        **options,
    )
    # Every node that is found later is made with these; the first ones exist already.
    cluster.connection_kwargs |= late
    cluster.connection_kwargs["connection_class"] = _cancellable(cluster.connection_kwargs["connection_class"])
    for node in cluster.startup_nodes:
        node.connection_class = cluster.connection_kwargs["connection_class"]
        node.connection_kwargs |= late
    return cluster  # type: ignore[no-any-return]


def disconnect(client: Any) -> None:
    """Close a client of ``connect``, with the questions that it has for sentinels."""
    client.close()
    if sentinels := getattr(getattr(client, "connection_pool", None), "sentinel_manager", None):
        sentinels.close()


async def disconnect_async(client: Any) -> None:
    """As ``disconnect``, for ``connect_async``."""
    await client.aclose()
    if sentinels := getattr(getattr(client, "connection_pool", None), "sentinel_manager", None):
        await sentinels.aclose()


def _behind_sentinels(address: Address, options: dict[str, Any]) -> redis.Redis:
    asked = _sentinel_options(address, options) | _greeting(address)
    sentinels: Any = Sentinels(address.hosts, sentinel_kwargs=asked)  # type: ignore[no-untyped-call]
    retry = Retry(NoBackoff(), 0)
    client: redis.Redis = sentinels.master_for(address.master, retry=retry, **_greeting(address), **options)
    return client


def _greeting(address: Address) -> dict[str, Any]:
    """TLS sends something of its own after the handshake. redis-py's pool takes it for an answer to somebody else, and
    refuses the connection (8.1, without asyncio), so that it has to be read before the pool looks."""
    return {"redis_connect_func": _connect_and_greet} if address.tls else {}


def _connect_and_greet(connection: Any) -> None:
    connection.on_connect()
    _greet(connection)


def _adopt(connection: Any) -> None:
    """Make a cluster's connection one of ours: redis-py's client for clusters takes no class from us."""
    kind: Any = type(connection)
    if not issubclass(kind, _Interruptible):
        connection.__class__ = _interruptible(kind)
        connection._command_packer = _TextPacker(connection._command_packer)  # noqa: SLF001


def _greet_a_node(connection: Any) -> None:
    _adopt(connection)
    _greet(connection)


def _greet(connection: Any) -> None:
    connection.send_command("PING", check_health=False)
    connection.read_response()


def _place(address: Address) -> dict[str, Any]:
    if address.socket:
        return {"unix_socket_path": address.socket}
    ((host, port),) = address.hosts
    return {"host": host, "port": port}


def _options(address: Address, block_s: float, reply_s: float) -> dict[str, Any]:
    given = {name: value for name, value in address.options if name not in OVERRIDDEN}
    options: dict[str, Any] = {
        **{name: value for name, value in given.items() if not name.startswith("sentinel_")},
        "username": address.username,
        "password": address.password,
        "db": address.db or 0,
        "decode_responses": False,
        "protocol": 2,
        "socket_connect_timeout": min(reply_s, CONNECT_TIMEOUT_S),
        "socket_timeout": block_s + BLOCK_MARGIN_S if block_s else reply_s,
        "health_check_interval": 0,
        "driver_info": None,  # to introduce itself is one more right that a user would need, and a round trip
        # Each waiter blocks a connection: a limit that the user set is for calls.
        "max_connections": _UNLIMITED if block_s else int(given.get("max_connections", _UNLIMITED)),
    }
    for name in _FLAGS:
        if name in given:
            if given[name].lower() not in _BOOLEANS:
                raise UsageError(f"{address.shown}: the option {name} must be true or false, not {given[name]!r}")
            options[name] = _BOOLEANS[given[name].lower()]
    if address.tls:
        _check_files(address, given)
        options["ssl"] = True
    return options


def _check_files(address: Address, given: dict[str, str]) -> None:
    for name in _FILES:
        if name in given:
            try:
                with open(given[name], "rb") if name != "ssl_ca_path" else os.scandir(given[name]):  # noqa: PTH123
                    pass
            except OSError as error:
                raise UsageError(
                    f"{address.shown}: {name} names {given[name]}, which can't be read ({error.strerror})"
                ) from error
    if (level := given.get("ssl_cert_reqs", "required")) not in {"none", "optional", "required"}:
        raise UsageError(f"{address.shown}: ssl_cert_reqs must be none, optional or required, not {level!r}")


def _sentinel_options(address: Address, options: dict[str, Any]) -> dict[str, Any]:
    given = dict(address.options)
    tls = {name: value for name, value in options.items() if name.startswith("ssl")}
    limit = min(options["socket_connect_timeout"], SENTINEL_TIMEOUT_S)
    return tls | {
        "username": given.get("sentinel_username"),
        "password": given.get("sentinel_password"),
        "protocol": 2,
        "retry": None,
        "socket_timeout": limit,
        "socket_connect_timeout": limit,
    }


class _TextPacker:
    """Packs a command of which every argument is text. hiredis writes numbers by calling Python, which runs signal
    handlers: one that raises there ends the process by a segmentation fault."""

    def __init__(self, packer: Any) -> None:
        self._packer = packer

    def pack(self, *args: Any) -> Any:
        return self._packer.pack(*[str(arg) if type(arg) in _NUMBERS else arg for arg in args])


_NUMBERS = (int, float)


class _Interruptible:
    """May be interrupted at any instruction, by a signal's handler that raises. One that was left half-made is made
    anew, and so is one with an answer under way, which the next command would read as its own."""

    _sock: Any
    _made = True
    _owed = False

    def _construct_command_packer(self, packer: Any) -> Any:
        return _TextPacker(super()._construct_command_packer(packer))  # type: ignore[misc]

    def connect(self) -> None:
        self._begin_anew()
        super().connect()  # type: ignore[misc]

    def _begin_anew(self) -> None:
        if not self._made or self._owed:
            self.disconnect()

    def connect_check_health(self, *args: Any, **options: Any) -> None:
        self._begin_anew()
        self._made = False
        super().connect_check_health(*args, **options)  # type: ignore[misc]
        self._made = True

    def disconnect(self, *args: Any, **options: Any) -> None:
        super().disconnect(*args, **options)  # type: ignore[misc]
        self._owed = False

    def send_packed_command(self, command: Any, check_health: bool = True) -> None:
        if not self._sock:
            self.connect_check_health(check_health=False)
        self._owed = True
        super().send_packed_command(command, check_health)  # type: ignore[misc]

    def read_response(self, disable_decoding: bool = False, **options: Any) -> Any:
        # As all of redis-py's connections do but those behind sentinels: close when the reading is interrupted.
        options["disconnect_on_error"] = True
        try:
            answer = super().read_response(disable_decoding, **options)  # type: ignore[misc]
        except redis.exceptions.ResponseError:
            self._owed = False
            raise
        self._owed = False
        return answer


@functools.cache
def _interruptible(connection_class: Any) -> Any:
    return type("Connection", (_Interruptible, connection_class), {})


class _Cancellable:
    """Sends with ``asyncio.timeout``. redis-py does it with ``asyncio.wait_for``, which loses a cancellation that comes
    when the data has just been sent (before Python 3.12): the task would go on as if nobody had cancelled it."""

    socket_timeout: float | None
    _writer: asyncio.StreamWriter | None

    async def send_packed_command(self, command: Any, check_health: bool = True) -> None:
        limit, self.socket_timeout = self.socket_timeout, None
        try:
            async with asyncio.timeout(limit):
                await super().send_packed_command(command, check_health)  # type: ignore[misc]
        except (TypeError, RuntimeError) as error:
            # Since Python 3.12 a transport that was closed a moment ago is written to, and falls over itself.
            if self._writer and not self._writer.transport.is_closing():
                raise
            raise redis.exceptions.ConnectionError("the connection was closed in this moment") from error
        finally:
            self.socket_timeout = limit


def _cancellable(connection_class: type[Any]) -> type[Any]:
    return type("Connection", (_Cancellable, connection_class), {})
