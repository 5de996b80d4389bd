"""After each fault the groups go on, and how soon."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

from timeslice.torture.checks.bodies import stretches
from timeslice.torture.checks.story import READ_S, SECOND, Harm, Story, Terms, Violation
from timeslice.torture.checks.waiting import end_of_wait

Span = tuple[float, float]

_MOST_TERMS = 3  # of recovery: longer nobody stays out, whatever happens meanwhile


@dataclass(frozen=True)
class Recovery:
    """How a group took a fault, and those that came while it lasted. ``seconds``: the longest time from the fault to
    the first entry after it was healed in which somebody waited and nobody got in. Turns of bodies are left out."""

    harm: Harm
    group: str
    seconds: float


def recoveries(story: Story, terms: Terms) -> Iterator[Recovery]:
    """One for each fault and group that it may have disturbed, if somebody waited and was let in after it.

    Faults that began and were healed before that entry are the same disturbance, and count once.
    """
    for group in story.groups:
        gaps = list(_gaps(story, terms, group))
        ends = [gap.end for gap in gaps]
        covered = -1.0
        for harm in sorted(story.harms_to(group), key=lambda each: each.at):
            start = max(float(harm.at), covered)
            after = bisect_right(ends, harm.until)
            last = gaps[after] if after < len(gaps) else None
            if harm.until <= covered or last is None or not last.entered:
                continue
            covered = last.end
            waited = max(gap.idle_from(start) for gap in gaps[bisect_right(ends, start) : after + 1])
            if waited:
                yield Recovery(harm, group, waited / SECOND)


def late_recoveries(story: Story, terms: Terms) -> Iterator[Violation]:
    """Where somebody waits, somebody gets in within ``recovery_s`` after the last fault that may keep him out; and
    within some such terms, whatever faults come.

    While a body is in it is its turn, and nobody's fault.
    """
    for group in story.groups:
        for gap in _gaps(story, terms, group):
            if gap.idle_from(gap.start) <= terms.recovery_s * SECOND:
                continue
            healed = [harm.until for harm in story.harms_to(group) if gap.has(harm) and _keeps_out(story, harm, group)]
            since = max([gap.start, *healed])
            spans = ((since, terms.recovery_s), (gap.start, _MOST_TERMS * terms.recovery_s))
            for start, most in spans:
                if (idle := gap.idle_from(start)) > most * SECOND:
                    yield Violation(
                        "recovery",
                        int(gap.end),
                        group,
                        f"somebody waited and nobody was in for {idle / SECOND:.1f} s, and it should have been at most "
                        f"{most:g} s",
                    )
                    break


@dataclass(frozen=True)
class _Gap:
    """From one entry to the next. ``idle``: when somebody waited and nobody was in. ``entered`` False: the history
    ends first."""

    start: float
    end: float
    idle: tuple[Span, ...]
    entered: bool

    def idle_from(self, start: float) -> float:
        return sum(max(0.0, end - max(begin, start)) for begin, end in self.idle)

    def has(self, harm: Harm) -> bool:
        return harm.at < self.end and harm.until > self.start


def _gaps(story: Story, terms: Terms, group: str) -> Iterator[_Gap]:
    if not story.lines:
        return
    bodies = story.bodies_of(group)
    over = float(story.lines[-1].at)
    tries = [found for found in story.tries.values() if found.group == group and found.asked]
    waits = _merged((found.asked.at, min(end_of_wait(story, found), over)) for found in tries if found.asked)
    inside = _merged((each.start, each.end) for body in bodies for each in stretches(story, body, terms))
    idle = [part for span in waits for part in _without(span, inside)]
    idle_starts, idle_ends = [start for start, _ in idle], [end for _, end in idle]
    times = [float(body.entered.at) for body in bodies if body.entered]
    starts, ends = [float(story.lines[0].at), *times], [*times, over]
    for number, (start, end) in enumerate(zip(starts, ends, strict=True)):
        within = idle[bisect_right(idle_ends, start) : bisect_left(idle_starts, end)]
        cut = tuple((max(one, start), min(other, end)) for one, other in within)
        yield _Gap(start, end, cut, entered=number < len(times))


def _merged(spans: Iterable[Span]) -> list[Span]:
    found: list[Span] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found


def _without(span: Span, others: list[Span]) -> Iterator[Span]:
    """What of a span none of the others covers, which are in order and disjoint."""
    rest, end = span
    for other_start, other_end in islice(others, bisect_right(others, rest, key=lambda other: other[1]), None):
        if other_start >= end:
            break
        if other_start > rest:
            yield rest, other_start
        rest = other_end
    if rest < end:
        yield rest, end


def _keeps_out(story: Story, harm: Harm, group: str) -> bool:
    """Whether a fault may keep a waiter of the group out: one that is done to a job which waits for it or holds it, to
    the coordinator that drives its swaps, to an agent, the server or a link."""
    born = story.born.get(harm.fault.label)
    if born is None:
        return True
    if born.role == "job":
        return any(
            found.group == group
            and found.who == harm.fault.label
            and found.asked is not None
            and found.asked.at <= harm.until
            and min(line.at if line else story.end_of(found.who) for line in (found.left, found.gave_up)) >= harm.at
            for found in story.tries.values()
        )
    return born.role != "coordinator" or _drives(story, harm, group)


def _drives(story: Story, harm: Harm, group: str) -> bool:
    """Whether that coordinator is the owner that the group's stream told of, at some time of the fault, or may be."""
    name = harm.fault.label.rpartition(".")[0]
    owner: str | None = None
    for event in story.told.get(group, ()):
        if event.at > harm.until + READ_S * SECOND:
            break
        if event.at > harm.at and _is_named(name, owner):
            return True
        if event.type == "OwnerChanged":
            owner = event.fields.get("owner", "")
    return _is_named(name, owner)


def _is_named(name: str, owner: str | None) -> bool:
    """Unknown is anybody; a coordinator's label ends with its name."""
    return owner is None or name == owner or name.endswith(f"-{owner}")
