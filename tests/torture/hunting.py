"""Torture runs that look for one mistake: faults are aimed at where it shows, and the run ends when it is found."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from timeslice.torture import run, scene
from timeslice.torture.checker import Report, check
from timeslice.torture.faults import Deed, World, choose
from timeslice.torture.history import Asked, Entered, Line, read
from timeslice.torture.report import TERMS, judge, merge
from timeslice.torture.schedule import Planned
from timeslice.torture.stage import LOCK_GROUP

CALM_S = 10.0
_LOOK_S = 0.5
_WRITTEN_S = 0.3  # lines that are older are on disk
_PATIENCE_S = 4.0  # of a fault that waits for its moment


@dataclass(frozen=True)
class Hunt:
    """``aim``: at whom faults are done, or until when they last. ``lasts_s``: of each fault, else as planned."""

    seconds: float
    kinds: tuple[str, ...]
    seed: int = 1
    aim: Callable[[Aim, World, Planned, float], Deed | None] | None = None
    lasts_s: float | None = None


class Aim:
    """What the processes of a run have written so far."""

    def __init__(self, parts: Path) -> None:
        self._parts = parts

    def inside(self) -> list[Entered]:
        """Bodies of served groups that run."""
        return [line for line in self._last() if isinstance(line, Entered) and line.group != LOCK_GROUP]

    def waiting(self) -> list[Asked]:
        """Tries that wait, the oldest first."""
        return sorted((line for line in self._last() if isinstance(line, Asked)), key=lambda line: line.at)

    def node_of(self, request: str) -> str:
        return next(line.node for line in self._lines() if isinstance(line, Asked) and line.request == request)

    def _last(self) -> Iterable[Line]:
        """The last line of each try; what was read in between is no end."""
        last: dict[str, Line] = {}
        for line in self._lines():
            if (request := getattr(line, "request", None)) is not None and line.kind != "checked":
                last[request] = line
        return last.values()

    def _lines(self) -> Iterable[Line]:
        for path in self._parts.glob("job*.jsonl"):
            yield from read(path)


def at_holder(aim: Aim, world: World, planned: Planned, now: float) -> Deed | None:
    """To a process that is inside."""
    return _to(world, planned, now, [line.who for line in aim.inside()])


def at_waiter(aim: Aim, world: World, planned: Planned, now: float) -> Deed | None:
    """To the process that has waited longest."""
    return _to(world, planned, now, [line.who for line in aim.waiting()])


def until_inside(aim: Aim, world: World, planned: Planned, now: float) -> Deed | None:
    """The stopped agent goes on at a moment when a process on its node is inside."""
    deed = choose(world, planned, now)
    if deed is None or deed.heal is None:
        return deed
    node = next(child.node for child in world.processes.children if child.label == deed.label)
    heal = deed.heal

    def heal_then() -> None:
        until = time.monotonic() + _PATIENCE_S
        while time.monotonic() < until:
            if any(aim.node_of(line.request) == node for line in aim.inside()):
                break
            time.sleep(0.01)
        heal()

    return replace(deed, heal=heal_then)


def _to(world: World, planned: Planned, now: float, labels: list[str]) -> Deed | None:
    fit = [child.label for child in world.processes.having("job")]
    index = next((fit.index(label) for label in labels if label in fit), None)
    return None if index is None else choose(world, replace(planned, pick=(index + 0.5) / len(fit)), now)


def hunt(folder: Path, patch: pytest.MonkeyPatch, what: Hunt, mutant: str, rules: Iterable[str]) -> Report:
    """Run until one of the rules is broken, or to the end."""
    aim = Aim(folder / "parts")
    wanted, looked = set(rules), time.monotonic()

    def aimed(world: World, planned: Planned, now: float) -> Deed | None:
        if what.lasts_s is not None:
            planned = replace(planned, lasts_s=what.lasts_s)
        return what.aim(aim, world, planned, now) if what.aim else choose(world, planned, now)

    def stop_when_found(_: run.Progress) -> None:
        nonlocal looked
        if wanted and time.monotonic() - looked > _LOOK_S:
            known = time.monotonic_ns() - int(_WRITTEN_S * 1e9)
            report = check((line for line in read(folder / "parts") if line.at <= known), TERMS)
            if wanted & {violation.rule for violation in report.violations}:
                raise KeyboardInterrupt
            looked = time.monotonic()

    patch.setattr(run, "choose", aimed)
    patch.setattr(run, "CALM_S", CALM_S)
    patch.setattr(scene, "COORDINATORS", ("c1",))
    options = run.Options(seed=what.seed, seconds=what.seconds, kinds=what.kinds, jobs=4, mutant=mutant)
    run.run_torture(options, folder, say=print, show=stop_when_found)
    return judge(merge(folder))[1]
