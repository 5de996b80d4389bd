"""Command ``gateway``: the door for clients that speak gRPC."""

from __future__ import annotations

import logging
from pathlib import Path

import click

from timeslice import logs
from timeslice.addresses import redact_url
from timeslice.cli.daemons import log_options, run_daemon
from timeslice.cli.output import Seconds
from timeslice.cli.session import Session
from timeslice.errors import UsageError
from timeslice.names import check_name
from timeslice.settings import default_node

logger = logging.getLogger("timeslice")

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command(
    epilog="""\b
Examples:
  timeslice --url redis://redis:6379 gateway
  timeslice gateway --listen 0.0.0.0:50051 --tls-cert tls.crt --tls-key tls.key --tls-client-ca ca.crt
  timeslice gateway --max-hold 7200          # a caller that vanished blocks a group for two hours at most"""
)
@click.option("--listen", default="127.0.0.1:50051", show_default=True, metavar="HOST:PORT", help="Where to answer.")
@click.option("--tls-cert", type=_FILE, help="PEM file with the certificate of this server.")
@click.option("--tls-key", type=_FILE, help="PEM file with its key.")
@click.option("--tls-client-ca", type=_FILE, help="Answer only callers with a certificate of this authority.")
@click.option("--insecure", is_flag=True, help="Answer without TLS on an address that others can reach.")
@click.option(
    "--max-hold",
    type=Seconds(1, 30 * 86_400),
    default=3600.0,
    show_default=True,
    metavar="SECONDS",
    help="Take a group away from a job that has not yielded it after so long.",
)
@click.option(
    "--max-waits",
    type=click.IntRange(1, 100_000),
    default=256,
    show_default=True,
    metavar="NUMBER",
    help="Refuse to let more calls wait; each may take two connections to Redis.",
)
@click.option(
    "--keepalive",
    type=Seconds(1, 3600),
    default=30.0,
    show_default=True,
    metavar="SECONDS",
    help="Ping callers that often; one that does not answer waits no longer.",
)
@click.option("--node", metavar="NAME", help="Of this node. Default: TIMESLICE_NODE, else the host name.")
@log_options
@click.pass_obj
def gateway(
    session: Session,
    listen: str,
    tls_cert: Path | None,
    tls_key: Path | None,
    tls_client_ca: Path | None,
    insecure: bool,
    max_hold: float,
    max_waits: int,
    keepalive: float,
    node: str | None,
    log_level: str,
    log_json: bool,
) -> None:
    """Run a gateway, which answers the gRPC clients of llm-d's time-slicing.

    Callers have no heartbeat: the gateway holds a group for them until they yield it, all processes of their job that
    agents know have ended, or --max-hold is over. See docs/gateway.md.
    """
    try:
        from timeslice.gateway.server import GatewayOptions, Tls, run_gateway
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in {"grpc", "google"}:
            raise
        install = "pip install 'timeslice-rl[grpc]', or in a checkout: pip install '.[grpc]'"
        raise UsageError(f"the gateway needs gRPC; run: {install}") from error

    if (tls_cert is None) != (tls_key is None) or (tls_client_ca and not tls_cert):
        raise click.UsageError("TLS needs both --tls-cert and --tls-key")
    logs.set_up(as_json=log_json, level=log_level)
    name = check_name("node", node) if node else default_node()
    options = GatewayOptions(
        url=session.url,
        prefix=session.prefix,
        node=name,
        listen=listen,
        tls=Tls(cert=tls_cert, key=tls_key, client_ca=tls_client_ca) if tls_cert and tls_key else None,
        insecure=insecure,
        max_hold_s=max_hold,
        max_waits=max_waits,
        keepalive_s=keepalive,
    )
    logger.info("gateway of node %s: talking to %s", name, redact_url(session.url))
    run_daemon(
        f"gateway of node {name}",
        lambda ready, stop: run_gateway(options, ready=lambda _: ready(), stop=stop),
    )
