"""The gateway as a process: one gRPC server over our Redis."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import math
import ssl
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import grpc
import grpc.aio

from timeslice.errors import UsageError
from timeslice.gateway.holds import GatewayClient
from timeslice.gateway.leases import Leases
from timeslice.gateway.orchestrator import Orchestrator
from timeslice.gateway.proto.snapshot_agent_pb2_grpc import add_SnapshotAgentServiceServicer_to_server
from timeslice.gateway.proto.timeslice_orchestrator_pb2_grpc import add_TimeSliceOrchestratorServiceServicer_to_server
from timeslice.gateway.snapshots import SnapshotAgentService
from timeslice.locks.loader import load_all
from timeslice.locks.outages import unless_stopped
from timeslice.names import check_name

log = logging.getLogger("timeslice.gateway")

MAX_WAITS = 256  # each may take two connections to Redis, and processes often may open 1024 files
_OTHERS = 256  # calls at a time that do not wait for a group
_STOP_S = 2.0  # how long calls under way may take to be answered
_PING_MS = 1000  # callers may ping so often


@dataclass(frozen=True, kw_only=True)
class Tls:
    """PEM files. With ``client_ca`` only callers with a certificate of that authority are answered."""

    cert: Path
    key: Path
    client_ca: Path | None = None


@dataclass(frozen=True, kw_only=True)
class GatewayOptions:
    """What a gateway is started with. No two that run may have the same node. UsageError for what can't be."""

    url: str
    node: str
    prefix: str = "ts"
    listen: str = "127.0.0.1:50051"
    tls: Tls | None = None
    insecure: bool = False  # answer on any address without TLS
    max_hold_s: float = 3600.0
    max_waits: int = MAX_WAITS
    keepalive_s: float = 30.0

    def __post_init__(self) -> None:
        check_name("node", self.node)
        if not (self.tls or self.insecure or _is_loopback(self.listen)):
            raise UsageError(
                f"{self.listen} can be reached from other machines, and whoever reaches a gateway may take and yield "
                "any group: give --tls-cert, --tls-key and --tls-client-ca, or --insecure where a network is trusted"
            )


async def run_gateway(
    options: GatewayOptions, *, ready: Callable[[int], None] | None = None, stop: asyncio.Event
) -> None:
    """Answer until ``stop`` is set. ``ready`` is given the port. Waits then end, leases are left to their terms.

    A server that is away is waited for, also at the start. Raises, at start only, UsageError for an address or a
    certificate that can't be used.
    """
    load_all()  # with all files open that it may have, leases must still be renewed
    client = GatewayClient(options.url, options.prefix, options.node)
    leases = Leases(client, options.max_hold_s, options.max_waits)
    snapshots = SnapshotAgentService(client, node=options.node)
    server = grpc.aio.server(
        options=_channel_options(options.keepalive_s), maximum_concurrent_rpcs=options.max_waits + _OTHERS
    )
    add_TimeSliceOrchestratorServiceServicer_to_server(Orchestrator(leases), server)
    add_SnapshotAgentServiceServicer_to_server(snapshots, server)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(leases.stop)
        stack.push_async_callback(snapshots.close)
        port = _listen(server, options)
        client.driver.patience_s = math.inf
        if not await unless_stopped(leases.resume(), stop):
            return
        client.driver.patience_s = client.patience
        await server.start()
        watching = asyncio.create_task(leases.watch(), name="watch over leases")
        stack.callback(watching.cancel)
        how = "with TLS" if options.tls else "without TLS"
        log.info("answering on %s:%d, %s", options.listen.rpartition(":")[0], port, how)
        if not options.tls and not _is_loopback(options.listen):
            log.warning("whoever reaches this address may take and yield any group")
        if ready:
            ready(port)
        await stop.wait()
        # New calls are refused from now on; those that wait are told so by the end of their waits.
        ending = asyncio.create_task(server.stop(_STOP_S))
        await leases.end_waits()
        await ending


def _channel_options(keepalive_s: float) -> list[tuple[str, int]]:
    answer_ms = round(min(keepalive_s, 20.0) * 1000)
    return [
        # A second gateway on the same port would take half of the callers.
        ("grpc.so_reuseport", 0),
        # A caller that vanished is noticed while it waits, however long that takes.
        ("grpc.keepalive_time_ms", round(keepalive_s * 1000)),
        ("grpc.keepalive_timeout_ms", answer_ms),
        ("grpc.http2.ping_timeout_ms", answer_ms),  # the longer of both counts; by default a minute
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        # Callers do the same; gRPC would cut them off for it.
        ("grpc.http2.min_ping_interval_without_data_ms", _PING_MS),
    ]


def _listen(server: grpc.aio.Server, options: GatewayOptions) -> int:
    try:
        if options.tls:
            return server.add_secure_port(options.listen, _credentials(options.tls))
        return server.add_insecure_port(options.listen)
    except RuntimeError as error:
        raise UsageError(f"can't listen on {options.listen}: {error}. Is another gateway running there?") from error


def _credentials(tls: Tls) -> grpc.ServerCredentials:
    """UsageError for files that can't be used: gRPC itself would only fail each caller's handshake."""
    try:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(tls.cert, tls.key)
        if tls.client_ca:
            context.load_verify_locations(tls.client_ca)
        ca = tls.client_ca.read_bytes() if tls.client_ca else None
        pair = (tls.key.read_bytes(), tls.cert.read_bytes())
    except OSError as error:  # ssl.SSLError is one
        files = ", ".join(str(each) for each in (tls.cert, tls.key, tls.client_ca) if each)
        raise UsageError(f"the TLS files {files} can't be used: {error}") from error
    return grpc.ssl_server_credentials([pair], root_certificates=ca, require_client_auth=ca is not None)


def _is_loopback(listen: str) -> bool:
    """Of ``host:port``. UsageError for anything else."""
    host, colon, port = listen.rpartition(":")
    if not (colon and host and port.isdigit() and int(port) < 65536) or (":" in host and not host.startswith("[")):
        raise UsageError(f"{listen!r} is no address to listen on: write for example 127.0.0.1:50051 or [::]:50051")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
