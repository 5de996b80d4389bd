"""Command ``events``: the audit trail of the groups, and their news as they come."""

from __future__ import annotations

import heapq
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import click

from timeslice.cli.output import clean, json_option, note, print_json, seconds, size
from timeslice.cli.session import Session
from timeslice.events import Event, UnknownEvent, decode
from timeslice.locks.scripts import text
from timeslice.locks.scripts.base import in_words

_PAUSE_S = 0.5  # between two looks at all groups, whose streams may live on different servers
_BATCH = 500


@click.command(
    epilog="""\b
Examples:
  timeslice events --last 20
  timeslice events trainers --follow
  timeslice events --json | jq -r 'select(.event == "LeaseGranted") | .waited_ms'"""
)
@click.argument("group", required=False)
@click.option("--follow", "-f", is_flag=True, help="Go on printing events as they happen, until interrupted.")
@click.option(
    "--last",
    type=click.IntRange(0, 1_000_000),
    default=50,
    show_default=True,
    metavar="N",
    help="How many old events a group.",
)
@json_option
@click.pass_obj
def events(session: Session, group: str | None, follow: bool, last: int, as_json: bool) -> None:
    """Show what happened in GROUP, or in all groups, oldest first.

    With --json one object a line.
    """
    if group is not None:
        session.view(group)
    names = [group] if group is not None else session.group_names()
    seen: dict[str, str] = {}
    old = [_last(session, name, last, seen) for name in names]
    shown = 0
    for event in heapq.merge(*old, key=lambda each: each.at_ms):
        _print(event, as_json=as_json)
        shown += 1
    if not shown and not follow:
        note("no events yet")
    try:
        while follow:
            for event in _news(session, [group] if group is not None else session.group_names(), seen):
                _print(event, as_json=as_json)
            time.sleep(_PAUSE_S)
    except KeyboardInterrupt:
        return  # how following ends


def _entries(reply: Any, name: str) -> list[Event]:
    return [
        decode(name, text(entry_id), {text(key): text(value) for key, value in fields.items()})
        for entry_id, fields in reply
    ]


def _last(session: Session, name: str, count: int, seen: dict[str, str]) -> list[Event]:
    """The newest ``count`` events in the order they happened; notes in ``seen`` where the news begin."""
    key, client = session.keys.group(name).events, session.driver.client
    reply = session.ask(lambda: client.xrevrange(key, count=max(count, 1)))
    found = _entries(reply, name)
    seen[name] = found[0].id if found else "0-0"
    return found[::-1] if count else []


def _news(session: Session, names: list[str], seen: dict[str, str]) -> Iterator[Event]:
    for name in names:
        key, client = session.keys.group(name).events, session.driver.client
        while True:
            after = seen.get(name, "0-0")
            found = _entries(session.ask(lambda: client.xrange(key, f"({after}", count=_BATCH)), name)  # noqa: B023
            if not found:
                break
            seen[name] = found[-1].id
            yield from found


def document(event: Event) -> dict[str, Any]:
    """An event as ``--json`` tells it, but for the schema number."""
    known = {"fields": event.fields} if isinstance(event, UnknownEvent) else event.details()
    return {"id": event.id, "group": event.group, "at_ms": event.at_ms, "event": event.name, **known}


def _print(event: Event, *, as_json: bool) -> None:
    if as_json:
        print_json(document(event), line=True)
        return
    fields = event.fields if isinstance(event, UnknownEvent) else event.details()
    at = datetime.fromtimestamp(event.at_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]
    told = "  ".join(_field(name, value) for name, value in fields.items() if value not in {"", None})
    click.echo(f"{at}Z  {event.group}  {clean(event.name or '?')}  {clean(told) if told else ''}".rstrip())


def _field(name: str, value: object) -> str:
    if isinstance(value, int) and name.endswith("_ms") and name != "from_ms":
        return f"{name.removesuffix('_ms')}={seconds(value / 1000)}"
    if isinstance(value, float) and name == "seconds":
        return f"{name}={seconds(value)}"
    if isinstance(value, int) and (name.endswith("bytes") or name == "saved"):
        return f"{name}={size(value)}"
    return f"{name}={in_words(value) if name == 'reason' else value}"
