"""Command ``up``: the whole system in the foreground, with a live line about it."""

from __future__ import annotations

import os
import shlex
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import click

from timeslice import logs
from timeslice.cli.output import clean, note, parse_device_size, print_json, seconds, size
from timeslice.cli.report import elapsed, plan_of
from timeslice.cli.session import Session
from timeslice.errors import TimeSliceError, UsageError
from timeslice.locks.view import GroupView
from timeslice.names import check_name
from timeslice.settings import Settings
from timeslice.up import LocalStack

DEFAULT_GROUPS = ("samplers", "trainers")
_LOOK_S = 0.5


def _group(text: str) -> tuple[str, int | None]:
    name, equals, amount = text.partition("=")
    return check_name("group", name), parse_device_size(amount) if equals else None


@click.command(
    epilog="""\b
Examples:
  timeslice up                                  # groups samplers and trainers
  timeslice up --port 7379 --data ~/timeslice   # reachable by TCP, keeps queues and settings
  timeslice up --group critics=512M"""
)
@click.option("--port", type=click.IntRange(1, 65535), metavar="PORT", help="Listen on 127.0.0.1:PORT too.")
@click.option(
    "--http-port",
    type=click.IntRange(1, 65535),
    metavar="PORT",
    help="Answer on 127.0.0.1:PORT whether a job is ready (/jobs/JOB/ready), with metrics (/metrics).",
)
@click.option(
    "--data",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Keep the server's data there, written within a second.",
)
@click.option(
    "--group",
    "more",
    multiple=True,
    type=_group,
    metavar="NAME[=SIZE]",
    help="Serve one more group, or give samplers or trainers another size; repeatable.",
)
@click.option(
    "--device-size",
    type=parse_device_size,
    default="256M",
    show_default=True,
    metavar="SIZE",
    help="Of each group's emulated device.",
)
@click.option("--json", "as_json", is_flag=True, help="When ready print one line of JSON instead of the export line.")
@click.pass_context
def up(
    ctx: click.Context,
    port: int | None,
    http_port: int | None,
    data: Path | None,
    more: tuple[tuple[str, int | None], ...],
    device_size: int,
    as_json: bool,
) -> None:
    """Run server, coordinator and agent on this machine, until Ctrl-C.

    The server listens on a unix socket that only you can open. Your commands and programs find it by themselves;
    the line printed on stdout is for other places, such as containers. The devices are emulated: size-limited
    memory, so that everything can be tried without an accelerator.
    """
    assert ctx.parent is not None
    if ctx.parent.params.get("url"):
        raise UsageError(
            "`timeslice up` starts a server of its own. For the one at --url run: timeslice coordinator, "
            "and on each node: timeslice agent"
        )
    session: Session = ctx.obj
    groups = dict.fromkeys(DEFAULT_GROUPS, device_size) | {
        name: device_size if amount is None else amount for name, amount in more
    }
    logs.set_up(level="warning")
    stop = threading.Event()
    stack = LocalStack(groups, prefix=session.prefix, data=data, port=port, http_port=http_port)
    _stop_on_signals(stop, stack)
    try:
        stack.start()
        _announce(stack, as_json=as_json)
        _watch(stack, session.prefix, stop)
    finally:
        stack.stop()


def _stop_on_signals(stop: threading.Event, stack: LocalStack) -> None:
    def handle(number: int, _: object) -> None:
        if stop.is_set():
            stack.kill()
            os._exit(128 + number)
        stop.set()
        os.write(2, b"stopping; once more to force it\n")  # a print may be under way in the code interrupted here

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, handle)


def _announce(stack: LocalStack, *, as_json: bool) -> None:
    if as_json:
        print_json(
            {
                "url": stack.url,
                "tcp_url": stack.server.tcp_url,
                "pid": os.getpid(),
                "node": stack.node,
                "device": "emulated",
                "groups": [{"group": name, "device_bytes": amount} for name, amount in stack.groups.items()],
            },
            line=True,
        )
    else:
        click.echo(f"export TIMESLICE_URL={shlex.quote(stack.url)}")
        sys.stdout.flush()
    devices = ", ".join(f"{name} {size(amount)}" for name, amount in stack.groups.items())
    tcp = f" and {stack.server.tcp_url}" if stack.server.tcp_url else ""
    note(f"ready at {stack.url}{tcp}; emulated devices: {devices}. Ctrl-C stops it.")
    if (other := Settings().url) and other != stack.url:
        note("TIMESLICE_URL is set in this shell and names another server; unset it to use this one")


def _watch(stack: LocalStack, prefix: str, stop: threading.Event) -> None:
    """Show the groups until stopped: one live line on a terminal, else a line for each change."""
    with Session(stack.url, prefix) as session:
        if not sys.stderr.isatty():
            before = ""
            while not stop.wait(_LOOK_S):
                stack.check()
                if (line := _line(session, stack, _state)) != before:
                    note(line)
                    before = line
            return
        from rich.console import Console
        from rich.text import Text

        with Console(stderr=True, highlight=False).status(Text("starting")) as live:
            logs.set_up(level="warning")  # through the live display now, so that neither overwrites the other
            while not stop.wait(_LOOK_S):
                stack.check()
                live.update(Text(_line(session, stack, _state_and_time), no_wrap=True, overflow="ellipsis"))
        logs.set_up(level="warning")


def _line(session: Session, stack: LocalStack, describe: Callable[[GroupView], str]) -> str:
    try:
        session.driver.patience_s = _LOOK_S  # the next look comes soon, and sees if the server has ended
        views = session.views(stack.groups)
    except TimeSliceError as error:
        return f"no answer from the server: {error}"
    return " | ".join(f"{view.name}: {describe(view)}" for view in views)


def _state(view: GroupView) -> str:
    """What a group does, in a few words that change only when that changes."""
    what = view.phase
    if view.holder:
        label = view.state.get("label")
        what = clean(f"{view.holder} ({label})" if label else view.holder)
    elif view.phase == "swapping":
        plan = plan_of(view)
        out = f"{', '.join(plan.out)} " if plan and plan.out else ""
        what = f"swapping {out}-> {clean(view.state.get('swap_job') or 'nobody')}"
    elif view.reason:
        what = f"{view.phase}: {clean(view.reason)}"
    return f"{what}, {view.waiting} waiting" if view.waiting else what


def _state_and_time(view: GroupView) -> str:
    since = elapsed(view, "granted_at_ms" if view.holder else "since_ms")
    return f"{_state(view)} {seconds(since)}" if since else _state(view)
