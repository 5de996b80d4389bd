"""Torture runs that look for one mistake: faults are aimed at where it shows, and the run ends when it is found."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from timeslice.locks.keys import Keys
from timeslice.models import Command
from timeslice.torture import run, scene
from timeslice.torture.checker import Report, check
from timeslice.torture.faults import Deed, World, choose
from timeslice.torture.history import Asked, Checked, Entered, GaveUp, Left, Line, Lost, read_so_far
from timeslice.torture.report import TERMS, judge, merge
from timeslice.torture.schedule import Planned
from timeslice.torture.stage import LOCK_GROUP

CALM_S = 6.0
_LOOK_S = 0.5
_WRITTEN_S = 1.0  # lines that are older are on disk, but for those of a process that was stopped or slow
_IN_A_ROW = 3  # looks in a row that have to find it: a line that came late may explain what one look takes for a fault
_PATIENCE_S = 3.0  # of a fault that waits for its moment
_TURN_S = 15.0  # until the turn of one that does not move is over, and another's begins

Choose = Callable[["Aim", World, Planned, float], Deed | None]


def unaimed(_: Aim, world: World, planned: Planned, now: float) -> Deed | None:
    """To whom it comes."""
    return choose(world, planned, now)


@dataclass(frozen=True)
class Hunt:
    """``aim`` says to whom faults are done; ``lasts_s``: each of them, else as planned."""

    seconds: float
    kinds: tuple[str, ...]
    aim: Choose = unaimed
    lasts_s: float | None = None


class Aim:
    """What the processes of a run have written so far."""

    def __init__(self, parts: Path) -> None:
        self._parts = parts

    def inside(self) -> list[Asked]:
        """Tries whose bodies run in a served group and have used the device."""
        return [asked for asked, last in self._tries() if isinstance(last, Checked)]

    def waiting(self) -> list[Asked]:
        """Tries that wait, the oldest first."""
        return [asked for asked, last in self._tries() if last is asked]

    def soon(self, look: Callable[[], list[Asked]], patience_s: float = _PATIENCE_S) -> list[Asked]:
        """What a look gives, as soon as it gives anything."""
        until = time.monotonic() + patience_s
        while not (found := look()) and time.monotonic() < until:
            time.sleep(0.01)
        return found

    def _tries(self) -> list[tuple[Asked, Line]]:
        """Of served groups, with the last line of each."""
        found: dict[str, tuple[Asked, Line]] = {}
        for path in self._parts.glob("job*.jsonl"):
            for line in read_so_far(path):
                if isinstance(line, Asked) and line.group != LOCK_GROUP:
                    found[line.request] = (line, line)
                elif isinstance(line, Entered | Checked | Lost | Left | GaveUp) and line.request in found:
                    found[line.request] = (found[line.request][0], line)
        return sorted(found.values(), key=lambda pair: pair[0].at)


def at_holder(aim: Aim, world: World, planned: Planned, now: float) -> Deed | None:
    """To a process that is inside."""
    return _to(world, planned, now, aim.soon(aim.inside))


def at_waiter(aim: Aim, world: World, planned: Planned, now: float) -> Deed | None:
    """To the process that has waited longest for a group for which others wait, too. It ends when a process that came
    later is inside there: the first one's turn is over by then."""

    def first() -> list[Asked]:
        found = aim.waiting()
        wanted = [asked.group for asked in found]
        return [asked for asked in found if wanted.count(asked.group) > 1]

    tries = aim.soon(first)
    deed = _to(world, planned, now, tries)
    if deed is None or deed.heal is None:
        return deed
    stopped, heal = tries[0], deed.heal

    def heal_in_time() -> None:
        def later() -> list[Asked]:
            return [asked for asked in aim.inside() if asked.group == stopped.group and asked.at > stopped.at]

        aim.soon(later, _TURN_S)
        heal()

    return replace(deed, heal=heal_in_time)


def as_flush(_: Aim, world: World, planned: Planned, now: float) -> Deed | None:
    """Whatever was planned, the server loses its data: more often than a run would have it."""
    return choose(world, replace(planned, kind="flush"), now)


def stray_order(aim: Aim, world: World, planned: Planned, now: float) -> Deed | None:
    """A coordinator that was deposed long ago orders a holder out."""
    found = aim.soon(aim.inside)
    if not found:
        return None
    body = found[0]
    order = Command(
        id=f"1/{body.node}/prepare/1.{planned.id}",
        group=body.group,
        node=body.node,
        swap=1,
        epoch=1,
        step="prepare",
        out=(body.job,),
        into=None,
        suspend_timeout_ms=6000,
        restore_timeout_ms=6000,
    )
    agent = next(each for each in world.processes.children if (each.role, each.node) == ("agent", body.node))

    def send() -> None:
        with world.fleet.client(world.fleet.names()[0]) as client:
            client.xadd(Keys().commands(body.node), {"body": order.model_dump_json()})

    return Deed(harm="stray", label=agent.label, groups=(body.group,), do=send, took=lambda: True, heal=lambda: None)


def _to(world: World, planned: Planned, now: float, tries: list[Asked]) -> Deed | None:
    fit = [child.label for child in world.processes.having("job")]
    index = next((fit.index(each.who) for each in tries if each.who in fit), None)
    return None if index is None else choose(world, replace(planned, pick=(index + 0.5) / len(fit), amount=1.0), now)


def hunt(folder: Path, patch: pytest.MonkeyPatch, what: Hunt, mutant: str, rules: Iterable[str]) -> Report:
    """Run until one of the rules is broken, or to the end."""
    aim = Aim(folder / "parts")
    wanted, looked, found = set(rules), time.monotonic(), 0

    def aimed(world: World, planned: Planned, now: float) -> Deed | None:
        if what.lasts_s is not None:
            planned = replace(planned, lasts_s=what.lasts_s)
        return what.aim(aim, world, planned, now)

    def stop_when_found(_: run.Progress) -> None:
        nonlocal looked, found
        if wanted and time.monotonic() - looked > _LOOK_S:
            known = time.monotonic_ns() - int(_WRITTEN_S * 1e9)
            report = check((line for line in read_so_far(folder / "parts") if line.at <= known), TERMS)
            found = found + 1 if wanted & {violation.rule for violation in report.violations} else 0
            if found == _IN_A_ROW:
                raise KeyboardInterrupt
            looked = time.monotonic()

    patch.setattr(run, "choose", aimed)
    if mutant:  # what it loses is not found by waiting for long
        patch.setattr(run, "CALM_S", CALM_S)
    patch.setattr(scene, "COORDINATORS", ("c1",))
    options = run.Options(seed=1, seconds=what.seconds, kinds=what.kinds, mutant=mutant)
    run.run_torture(options, folder, say=print, show=stop_when_found)
    return judge(merge(folder))[1]
