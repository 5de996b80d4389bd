"""Commands ``coordinator`` and ``agent``: the two daemons, in the foreground."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from timeslice import logs
from timeslice.addresses import redact_url
from timeslice.cli.output import Seconds, json_option, parse_device_size, parse_size
from timeslice.cli.session import Session
from timeslice.names import check_name
from timeslice.settings import default_node
from timeslice.web import EVERYWHERE

F = TypeVar("F", bound=Callable[..., Any])
Daemon = Callable[[Callable[[], None], asyncio.Event], Awaitable[None]]

logger = logging.getLogger("timeslice")


def log_options(command: F) -> F:
    """How much a daemon logs, and how."""
    command = click.option("--log-json", is_flag=True, help="Log one JSON object a line.")(command)
    level = click.option(
        "--log-level", type=click.Choice(logs.LEVELS), default="info", show_default=True, help="Least level to log."
    )
    return level(command)


def _http_options(command: F) -> F:
    host = click.option(
        "--http-host", default=EVERYWHERE, show_default=True, metavar="HOST", help="Address to listen on."
    )
    port = click.option(
        "--http-port",
        type=click.IntRange(1, 65535),
        metavar="PORT",
        help="Answer there whether a job is ready (/jobs/JOB/ready), with metrics (/metrics) and health (/healthz).",
    )
    return port(host(command))


def run_daemon(name: str, daemon: Daemon) -> None:
    """Run until SIGINT or SIGTERM. The second of them does not wait for a clean end."""

    async def body() -> None:
        loop, stop = asyncio.get_running_loop(), asyncio.Event()

        def end(number: signal.Signals) -> None:
            logger.info("%s: %s received, stopping", name, number.name)
            for each in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(each)
            stop.set()

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, end, number)
        await daemon(lambda: logger.info("%s: ready", name), stop)
        logger.info("%s: stopped", name)

    asyncio.run(body())


@click.command(
    epilog="""\b
Examples:
  timeslice --url redis://redis:6379 coordinator
  timeslice coordinator --name coordinator-1 --http-port 9400 --log-json"""
)
@click.option("--name", metavar="NAME", help="Of this coordinator. Default: node, process id and random digits.")
@_http_options
@log_options
@click.pass_obj
def coordinator(
    session: Session, name: str | None, http_host: str, http_port: int | None, log_level: str, log_json: bool
) -> None:
    """Run a coordinator, which drives the swaps of the groups it owns.

    Several may run: each owns its share of the groups, and the others take over within ten seconds when one ends.
    """
    from timeslice.coordinator.service import CoordinatorOptions, run_coordinator, unique_name

    logs.set_up(as_json=log_json, level=log_level)
    chosen = check_name("coordinator", name) if name else unique_name()
    options = CoordinatorOptions(
        url=session.url, prefix=session.prefix, name=chosen, http_host=http_host, http_port=http_port
    )
    logger.info("coordinator %s: talking to %s", chosen, redact_url(session.url))
    run_daemon(f"coordinator {chosen}", lambda ready, stop: run_coordinator(options, ready=ready, stop=stop))


def parse_group_size(text: str) -> tuple[str, int]:
    """``GROUP=SIZE``: a type of click options."""
    name, equals, amount = text.partition("=")
    if not equals:
        raise click.BadParameter(f"{text!r} names no size; write for example {name or 'trainers'}=256M")
    return check_name("group", name), parse_device_size(amount)


def parse_backend(text: str) -> tuple[str | None, str]:
    """``[GROUP=]NAME[:KEY=VALUE,...]``: a type of click options. None stands for all groups."""
    head, equals, rest = text.partition("=")
    if equals and ":" not in head:
        return check_name("group", head), rest
    return None, text


def parse_devices(text: str) -> tuple[str, tuple[str, ...]]:
    """``GROUP=DEVICE[,DEVICE...]``: a type of click options."""
    name, equals, rest = text.partition("=")
    devices = tuple(each.strip() for each in rest.split(",") if each.strip())
    if not equals or not devices:
        raise click.BadParameter(f"{text!r} names no device; write for example {name or 'trainers'}=0,1 or =all")
    return check_name("group", name), devices


def default_state_dir(node: str) -> Path:
    """Where an agent keeps what must survive it: the highest token it saw, and what it was doing."""
    if os.getuid() == 0:
        return Path("/var/lib/timeslice") / node
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "timeslice" / node


@click.command(
    epilog="""\b
Examples:
  timeslice --url redis://redis:6379 agent --group trainers
  timeslice agent --group trainers --backend process    # stops a job's processes while another one runs
  timeslice agent --device trainers=0,1 --device samplers=2
  timeslice agent --emulate trainers=256M --emulate samplers=256M     # no accelerator needed
  timeslice agent --check                               # which backends would work on this machine?"""
)
@click.option("--group", "groups", multiple=True, metavar="GROUP", help="A group that this node serves; repeatable.")
@click.option("--node", metavar="NAME", help="Of this node. Default: TIMESLICE_NODE, else the host name.")
@click.option(
    "--state-dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="Where to keep tokens and the journal. Default: /var/lib/timeslice/NODE for root, "
    "else ~/.local/state/timeslice/NODE.",
)
@click.option(
    "--emulate",
    multiple=True,
    type=parse_group_size,
    metavar="GROUP=SIZE",
    help="Serve GROUP with an emulated device of SIZE; repeatable.",
)
@click.option(
    "--device",
    "devices",
    multiple=True,
    type=parse_devices,
    metavar="GROUP=DEVICE[,...]",
    help="Serve GROUP with real devices: UUIDs of GPUs or MIG instances, numbers as nvidia-smi has them, or all; "
    "repeatable. Default: an agent that serves one group, and emulates none, takes all there are.",
)
@click.option(
    "--backend",
    "backends",
    multiple=True,
    type=parse_backend,
    metavar="[GROUP=]NAME[:KEY=VALUE,...]",
    help="A snapshot backend to use, first choice first; repeatable. Default: channel, which moves only jobs that "
    "register a workload, and behind it arena on an emulated device, cuda on a real one where it works.",
)
@click.option(
    "--host-budget", type=parse_size, metavar="SIZE", help="Host memory for suspended jobs. Default: what is free."
)
@click.option(
    "--idle-after",
    type=Seconds(0, 86_400),
    default=60.0,
    show_default=True,
    metavar="SECONDS",
    help="Complain of a holder that has been on none of the group's devices for so long; 0: never.",
)
@_http_options
@click.option("--leave", is_flag=True, help="When stopped, take the node out of its groups.")
@click.option(
    "--check",
    is_flag=True,
    help="Only say which backends would work on this machine, and what the others lack; needs no Redis and no group. "
    "Exit code 1 if one that --backend names would not work, or a device that --device names is not there.",
)
@json_option
@log_options
@click.pass_obj
def agent(
    session: Session,
    groups: tuple[str, ...],
    node: str | None,
    state_dir: Path | None,
    emulate: tuple[tuple[str, int], ...],
    devices: tuple[tuple[str, tuple[str, ...]], ...],
    backends: tuple[tuple[str | None, str], ...],
    host_budget: int | None,
    idle_after: float,
    http_host: str,
    http_port: int | None,
    leave: bool,
    check: bool,
    as_json: bool,
    log_level: str,
    log_json: bool,
) -> None:
    """Run the node agent beside this node's accelerators.

    It serves its groups until it is stopped. Its node then stays in them, and jobs wait until it runs again: nobody
    may take a device whose state is not known. To take the node out use --leave, or timeslice node forget.
    """
    from timeslice.agent.service import AgentOptions, run_agent

    assigned: dict[str, tuple[str, ...]] = {}
    for owner, words in devices:
        assigned[owner] = (*assigned.get(owner, ()), *words)
    name = check_name("node", node) if node else default_node()
    if check:
        from timeslice.cli.check_backends import check as check_backends

        raise SystemExit(check_backends(name, assigned, [spec for _, spec in backends], as_json=as_json))
    if as_json:
        raise click.UsageError("--json goes with --check")
    named = (*(check_name("group", each) for each in groups), *(group for group, _ in emulate), *assigned)
    served = tuple(dict.fromkeys(named))
    if not served:
        raise click.UsageError("name a group to serve: --group GROUP, --device GROUP=DEVICE or --emulate GROUP=SIZE")
    chosen: dict[str, list[str]] = {}
    for group, spec in backends:
        if group is not None and group not in served:
            raise click.UsageError(f"--backend {group}={spec}: this agent does not serve {group}; add --group {group}")
        for each in served if group is None else (group,):
            chosen.setdefault(each, []).append(spec)
    logs.set_up(as_json=log_json, level=log_level)
    options = AgentOptions(
        url=session.url,
        prefix=session.prefix,
        node=name,
        groups=served,
        state_dir=state_dir or default_state_dir(name),
        emulate=dict(emulate),
        backends=chosen,
        devices=assigned,
        host_budget_bytes=host_budget,
        idle_after_s=idle_after,
        http_host=http_host,
        http_port=http_port,
        leave=leave,
    )
    logger.info("agent of node %s: serving %s over %s", name, ", ".join(served), redact_url(session.url))
    run_daemon(f"agent of node {name}", lambda ready, stop: run_agent(options, ready=ready, stop=stop))
