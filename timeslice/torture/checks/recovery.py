"""After each fault the groups go on, and how soon."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from timeslice.torture.checks.bodies import stretches
from timeslice.torture.checks.story import SECOND, Harm, Story, Terms, Try, Violation, seconds
from timeslice.torture.checks.waiting import end_of_wait


@dataclass(frozen=True)
class Recovery:
    """How long a group took after a fault. ``entered`` False: so long that nobody was in when the waiting ended."""

    harm: Harm
    group: str
    start: float
    seconds: float
    entered: bool


def recoveries(story: Story, terms: Terms) -> Iterator[Recovery]:
    """For each fault and each group that it may have disturbed and for which somebody waited when it was healed: the
    seconds until the next entry.

    Time that is not the fault's is left out: while a body is in it is its turn, and after a later fault the clock
    starts anew. A group that was entered while another fault was not healed yet tells nothing.
    """
    for group in story.groups:
        bodies = story.bodies_of(group)
        inside = [(each.start, each.end) for body in bodies for each in stretches(story, body, terms)]
        tries = [found for found in story.tries.values() if found.group == group and found.asked]
        harms = list(story.harms_to(group))
        for harm in harms:
            if (found := _recovery(story, harm, group, bodies, inside, tries, harms)) is not None:
                yield found


def _recovery(
    story: Story,
    harm: Harm,
    group: str,
    bodies: list[Try],
    inside: list[tuple[float, float]],
    tries: list[Try],
    harms: list[Harm],
) -> Recovery | None:
    waiting = [found for found in tries if found.asked and found.asked.at <= harm.until < end_of_wait(story, found)]
    if not waiting:
        return None
    entries = (body.entered.at for body in bodies if body.entered and body.entered.at > harm.until)
    entry = next(entries, None)
    waited = max(end_of_wait(story, found) for found in waiting)
    until = min(waited, story.lines[-1].at) if entry is None else entry
    start = harm.until
    for other in harms:
        if start < other.until and other.at < until:
            start = min(other.until, until)
            if other.until > until:
                return None  # not healed yet
    for begin, end in sorted(inside):
        if begin < until and end > start:
            start = min(max(start, end), until)
    return Recovery(harm, group, start, seconds(start, until), entry is not None)


def late_recoveries(story: Story, terms: Terms) -> Iterator[Violation]:
    """Nobody who waits has to wait longer than ``recovery_s`` after a fault was healed."""
    told: set[tuple[str, int]] = set()  # one delay is one violation, however many faults had led to it
    for found in recoveries(story, terms):
        if found.seconds <= terms.recovery_s or (found.group, int(found.start)) in told:
            continue
        told.add((found.group, int(found.start)))
        yield Violation(
            "recovery",
            int(found.start + terms.recovery_s * SECOND),
            found.group,
            f"after fault {found.harm.fault.id} ({found.harm.fault.harm} {found.harm.fault.label}) nobody was in for "
            f"{found.seconds:.1f} s although somebody waited",
        )
