"""Commands ``groups`` and ``group create/set/show/delete``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from timeslice.cli.output import (
    Seconds,
    json_option,
    note,
    parse_size,
    print_fields,
    print_json,
    print_table,
    seconds,
    size,
)
from timeslice.cli.session import Session
from timeslice.errors import UnknownGroupError
from timeslice.locks import scripts
from timeslice.locks.view import GroupView, parse_config
from timeslice.names import check_name

F = TypeVar("F", bound=Callable[..., Any])

_TIMEOUT = Seconds(0, 3600, min_open=True)


@click.command(
    epilog="""\b
Examples:
  timeslice groups
  timeslice groups --json | jq -r '.groups[].group'"""
)
@json_option
@click.pass_obj
def groups(session: Session, as_json: bool) -> None:
    """List the groups."""
    views = session.views()
    if as_json:
        print_json({"groups": [_summary(view) for view in views]})
        return
    print_table(
        ("group", "mode", "phase", "order", "nodes", "waiting"),
        [(v.name, v.mode or "undeclared", v.phase, v.config.order, ", ".join(v.nodes), v.waiting) for v in views],
        empty="no groups yet: a group comes into being when an agent serves it or a job holds it",
    )


def _summary(view: GroupView) -> dict[str, Any]:
    return {
        "group": view.name,
        "mode": view.mode or "undeclared",
        "phase": view.phase,
        "nodes": list(view.nodes),
        "waiting": view.waiting,
        "config": view.config.model_dump(),
    }


@click.group(
    epilog="""\b
Examples:
  timeslice group create licences --lock-only
  timeslice group set trainers --suspend-timeout 300
  timeslice group show trainers"""
)
def group() -> None:
    """Create, change, show or delete a group."""


def _settings(command: F) -> F:
    """One option a setting of timeslice.models.GroupConfig. Not given means unchanged."""
    options = (
        click.option("--order", type=int, metavar="N", help="Groups held together are taken from low to high."),
        click.option("--prepare-timeout", type=_TIMEOUT, metavar="SECONDS", help="To drain and lock a job."),
        click.option("--suspend-timeout", type=_TIMEOUT, metavar="SECONDS", help="To bring a job's state out."),
        click.option("--restore-timeout", type=_TIMEOUT, metavar="SECONDS", help="To bring a job's state back."),
        click.option("--host-reserve", type=parse_size, metavar="SIZE", help="Host memory that suspends leave free."),
        click.option(
            "--on-stuck",
            type=click.Choice(["block", "kill"]),
            help="A job that must leave and that no backend can move: wait for a person, or end its processes.",
        ),
        click.option(
            "--mode",
            type=click.Choice(["offload", "discard", ""]),
            help="Keep or drop what leaves of a job that says nothing itself; '' lets its workload decide.",
        ),
        click.option(
            "--tag",
            "tags",
            multiple=True,
            metavar="NAME",
            help="A part that leaves of a job that says nothing itself. May be repeated; '' takes all again.",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


def _checked(name: str, given: dict[str, Any]) -> dict[str, str]:
    """The settings as they are stored; UsageError naming the one that is out of range."""
    stored = {}
    for option, value in given.items():
        if value is None or value == ():
            continue
        if option == "tags":
            if "" in value and len(value) > 1:
                raise click.UsageError("--tag '' takes all again; it can't go with another --tag")
            value = ",".join(check_name("tag", tag) for tag in value if tag)  # noqa: PLW2901
        if option.endswith("_timeout"):
            stored[f"{option}_ms"] = str(round(value * 1000))
        else:
            stored["host_reserve_bytes" if option == "host_reserve" else option] = str(value)
    parse_config(name, stored)
    return stored


@group.command(
    epilog="""\b
Examples:
  timeslice group create licences --lock-only     # a plain lock, no agents
  timeslice group create trainers --order 1"""
)
@click.argument("name", metavar="GROUP")
@click.option("--lock-only", is_flag=True, help="No agent will ever swap state here: it is a plain lock.")
@_settings
@click.pass_obj
def create(session: Session, /, name: str, lock_only: bool, **settings: Any) -> None:
    """Create GROUP. An agent that serves it creates it too, with default settings."""
    keys = session.keys.group(name)
    checked = _checked(name, settings)
    client = session.driver.client
    session.ask(lambda: client.sadd(session.keys.groups, name))  # the index first, so that no group is ever hidden
    session.run(scripts.configure(keys, checked, mode="lock" if lock_only else "served", only_new=True))
    note(f"created {name}" + (" (lock-only)" if lock_only else "; it waits for an agent to serve it"))


@group.command(
    name="set",
    epilog="""\b
Examples:
  timeslice group set trainers --suspend-timeout 300 --restore-timeout 300
  timeslice group set trainers --host-reserve 8G
  timeslice group set trainers --on-stuck kill     # a job that never gives the group up is ended
  timeslice group set samplers --mode discard --tag kv_cache""",
)
@click.argument("name", metavar="GROUP")
@_settings
@click.pass_obj
def set_(session: Session, /, name: str, **settings: Any) -> None:
    """Change settings of GROUP. They count from the next swap on."""
    checked = _checked(name, settings)
    if not checked:
        raise click.UsageError("name at least one setting to change; see --help")
    view = session.view(name)
    session.run(scripts.configure(session.keys.group(name), checked, floor=view.counter))
    note(f"changed {', '.join(checked)} of {name}")


@group.command(
    epilog="""\b
Examples:
  timeslice group show trainers
  timeslice group show trainers --json | jq .config"""
)
@click.argument("name", metavar="GROUP")
@json_option
@click.pass_obj
def show(session: Session, name: str, as_json: bool) -> None:
    """Show the settings of GROUP."""
    view = session.view(name)
    if as_json:
        print_json(_summary(view))
        return
    config = view.config
    print_fields(
        {
            "group": view.name,
            "mode": view.mode or "undeclared",
            "nodes": ", ".join(view.nodes),
            "order": config.order,
            "prepare timeout": seconds(config.prepare_timeout_ms / 1000),
            "suspend timeout": seconds(config.suspend_timeout_ms / 1000),
            "restore timeout": seconds(config.restore_timeout_ms / 1000),
            "host reserve": size(config.host_reserve_bytes),
            "on stuck": config.on_stuck,
            "what leaves": f"{', '.join(config.tags) or 'all'}" + (f" ({config.mode})" if config.mode else ""),
        }
    )


@group.command(
    epilog="""\b
Examples:
  timeslice group delete licences"""
)
@click.argument("name", metavar="GROUP")
@click.pass_obj
def delete(session: Session, name: str) -> None:
    """Delete GROUP with its settings and history. Refused while anybody uses it."""
    client = session.driver.client
    try:
        session.view(name)
        session.run(scripts.delete(session.keys.group(name)))
    except UnknownGroupError:
        session.ask(lambda: client.srem(session.keys.groups, name))  # what a deletion that was cut short left
        raise
    session.ask(lambda: client.srem(session.keys.groups, name))
    note(f"deleted {name}")
