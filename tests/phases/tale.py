"""What a group's events tell of phases."""

from __future__ import annotations

from typing import TypeVar

from tests.client.world import World
from tests.support.jobs import wait_until
from timeslice.events import Event, PhaseBegan, PhaseEnded, PhaseMeasured, decode
from timeslice.locks.scripts import text

E = TypeVar("E", bound=Event)


def events(world: World, kind: type[E], group: str = "g") -> list[E]:
    entries = world.redis.xrange(world.group(group).events)
    found = [decode(group, text(at), {text(k): text(v) for k, v in fields.items()}) for at, fields in entries]
    return [event for event in found if isinstance(event, kind)]


def told(world: World, kind: type[E], count: int, group: str = "g") -> list[E]:
    """Wait for so many events of the kind."""
    wait_until(lambda: len(events(world, kind, group)) >= count, f"{count} {kind.__name__}")
    return events(world, kind, group)


def story(world: World, group: str = "g") -> list[str]:
    """The events about phases, in order."""
    kinds = {PhaseBegan: "began", PhaseEnded: "ended", PhaseMeasured: "measured"}
    return [
        f"{kinds[type(event)]} {getattr(event, 'phase', '') or getattr(event, 'label', '')}"
        for event in events(world, Event, group)
        if type(event) in kinds
    ]
