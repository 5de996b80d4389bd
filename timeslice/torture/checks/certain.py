"""What is certain of jobs' device state, swept along a history."""

from __future__ import annotations

import enum
from typing import Self

from timeslice.torture.checks.story import SECOND, Story
from timeslice.torture.history import Born, Checked, Died, Fault, Line, Moved, OnDevice

NOTICED_S = 1.0


class Sign(enum.Enum):
    """The last certain thing known of a job on a node. Between the begin and the end of a step nothing is certain."""

    IN = "on the device"
    OUT = "moved out"
    LOCKED = "locked"
    UNKNOWN = "unknown"


_AFTER = {
    ("suspend", "begin"): Sign.UNKNOWN,
    ("suspend", "done"): Sign.OUT,
    ("suspend", "failed"): Sign.UNKNOWN,
    ("restore", "begin"): Sign.UNKNOWN,
    ("restore", "done"): Sign.LOCKED,
    ("restore", "failed"): Sign.OUT,  # its saved copy is intact
    ("release", "begin"): Sign.UNKNOWN,
    ("release", "done"): Sign.IN,
    ("release", "failed"): Sign.UNKNOWN,
    ("abort", "begin"): Sign.UNKNOWN,
    ("abort", "done"): Sign.IN,
    ("abort", "failed"): Sign.UNKNOWN,
}

Place = tuple[str, str, str]  # group, node, job


class Certain:
    """Goes forward through the lines of a story, once.

    When a process of a job begins or ends on a node, nothing is certain of that job there: its memory went with it.
    An end that nobody caused is written down some time after it: when it came, after the process was last seen to run,
    is unknown. Where that is unknown, too, it came up to ``NOTICED_S`` before.
    A line of the job itself, or of a look, may be written a moment after what it tells; so it is a sign only of a job
    that no agent has touched yet. A backend that was told to lie says that it did what it did not do, and one that
    has not heard yet that a process ended brings back what is no more: what it measured before it said so tells.
    """

    def __init__(self, story: Story) -> None:
        self._story = story
        self._lines = iter(story.lines)
        self._next: Line | None = next(self._lines, None)
        self._signs: dict[Place, Sign] = {}
        self._begun: dict[Place, str] = {}  # the step that is under way
        self._measured: dict[Place, bool] = {}  # in that step: whether the job is on the device
        self._now = 0
        self._lies = [harm for harm in story.harms if harm.fault.harm == "lie"]

    def at(self, time: int) -> Self:
        """Go on to ``time``, which may not lie before the last one."""
        while self._next is not None and self._next.at <= time:
            self._take(self._next)
            self._next = next(self._lines, None)
        self._now = time
        return self

    def of(self, group: str, node: str, job: str) -> Sign:
        return self._signs.get((group, node, job), Sign.UNKNOWN)

    def residents(self, group: str, node: str) -> list[str]:
        """Jobs that are on that device for certain."""
        return sorted(
            job
            for (its_group, its_node, job), sign in self._signs.items()
            if (its_group, its_node) == (group, node)
            and sign in {Sign.IN, Sign.LOCKED}
            and not self._is_ending(its_node, job)
        )

    def _is_ending(self, node: str, job: str) -> bool:
        return any(
            (death.ran or death.at - NOTICED_S * SECOND) <= self._now <= death.at
            for label in self._story.processes_of(node, job)
            if (death := self._story.died.get(label))
        )

    def _take(self, line: Line) -> None:
        match line:
            case Moved() if (line.step, line.stage) in _AFTER:
                self._move(line, (line.group, line.node, line.job))
            case Checked():
                found = self._story.tries[line.who, line.request]
                self._signs.setdefault((line.group, found.node, line.job), Sign.IN)
            case OnDevice():
                for place in self._begun:
                    if place[:2] == (line.group, line.node):
                        self._measured[place] = place[2] in line.jobs
                for job in line.jobs:
                    self._signs.setdefault((line.group, line.node, job), Sign.IN)
            case Born(label=label) | Died(label=label):
                self._forget(label)
            case Fault():
                for label in line.killed:
                    self._forget(label)
            case _:
                pass

    def _move(self, move: Moved, place: Place) -> None:
        there = self._measured.pop(place, True)
        if move.stage == "begin":
            self._begun[place] = move.step
        elif self._begun.pop(place, "") != move.step:
            self._signs[place] = Sign.UNKNOWN  # it was about a process that has ended meanwhile
            return
        sign = _AFTER[move.step, move.stage]
        vain = sign in {Sign.IN, Sign.LOCKED} and not there
        self._signs[place] = Sign.UNKNOWN if vain or self._may_lie(move) else sign

    def _forget(self, label: str) -> None:
        born = self._story.born.get(label)
        if born is not None and born.role == "job":
            for place in {*self._signs, *self._begun}:
                if place[1:] == (born.node, born.job):
                    self._signs.pop(place, None)
                    self._begun.pop(place, None)
                    self._measured.pop(place, None)

    def _may_lie(self, move: Moved) -> bool:
        return any(harm.disturbs(move.group) and harm.at <= move.at <= harm.until for harm in self._lies)
