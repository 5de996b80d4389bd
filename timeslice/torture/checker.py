"""Judges a history: from its lines alone, without the system it is about. Pure.

Each rule is a function of its own in ``checks/``, with the reason why it raises no false alarm.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from timeslice.torture.checks.content import wrong_content
from timeslice.torture.checks.deaths import unmeant_ends
from timeslice.torture.checks.devices import beside_a_body, not_there
from timeslice.torture.checks.grants import granted_twice
from timeslice.torture.checks.leases import begun_without, lost_for_nothing
from timeslice.torture.checks.order import overtaken
from timeslice.torture.checks.overlap import overlaps
from timeslice.torture.checks.recovery import late_recoveries, recoveries
from timeslice.torture.checks.residency import moved_holders, not_out, not_restored, two_on_device
from timeslice.torture.checks.story import Story, Terms, Violation
from timeslice.torture.checks.tokens import falling_tokens
from timeslice.torture.checks.waiting import lost_waiters
from timeslice.torture.history import Line, Took

__all__ = ["RULES", "Report", "Terms", "Violation", "check"]

Rule = Callable[[Story, Terms], Iterator[Violation]]
RULES: tuple[Rule, ...] = (
    overlaps,
    falling_tokens,
    granted_twice,
    not_restored,
    not_out,
    two_on_device,
    moved_holders,
    overtaken,
    lost_waiters,
    lost_for_nothing,
    begun_without,
    beside_a_body,
    not_there,
    wrong_content,
    late_recoveries,
    unmeant_ends,
)


@dataclass(frozen=True)
class Report:
    """What a history shows. ``faults`` are those that came about. ``recoveries``: seconds from the healing of a fault
    to the next entry of a group in which somebody waited."""

    grants: int
    swaps: int
    faults: int
    violations: list[Violation]
    recoveries: list[float]

    @property
    def recovery_p95_s(self) -> float | None:
        """None when nobody waited at any fault."""
        ordered = sorted(self.recoveries)
        return ordered[math.ceil(0.95 * len(ordered)) - 1] if ordered else None


def check(lines: Iterable[Line], terms: Terms) -> Report:
    """Judge the lines of a run, in any order of files. Violations come in the order of time."""
    story = Story(lines)
    found = [violation for rule in RULES for violation in rule(story, terms)]
    return Report(
        grants=len(story.bodies),
        swaps=sum(event.type == "SwapFinished" for events in story.told.values() for event in events),
        faults=sum(isinstance(line, Took) for line in story.lines),
        violations=sorted(found, key=lambda violation: violation.at),
        recoveries=[each.seconds for each in recoveries(story, terms)],
    )
