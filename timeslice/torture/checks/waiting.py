"""No waiter is lost."""

from __future__ import annotations

from collections.abc import Iterator

from timeslice.torture.checks.story import NEVER, SECOND, Story, Terms, Try, Violation, seconds


def lost_waiters(story: Story, terms: Terms) -> Iterator[Violation]:  # noqa: ARG001 - all rules are called alike
    """Each try ends: it is entered, or raises, or dies with its process; at the latest ``Calm.seconds`` after the last
    fault was healed, or after the question if that came later.

    While faults come nothing is due, so a try without an end is judged by the calm alone; a run that was cut short
    before its time says nothing.
    """
    if story.calm is None:
        return
    term = story.calm.seconds
    over: float = story.ended.at if story.ended else (story.lines[-1].at if story.lines else 0)
    for found in story.tries.values():
        if found.asked is None:
            continue
        due = max(story.calm.at, found.asked.at) + term * SECOND
        end = end_of_wait(story, found)
        if end > due and over >= due:
            late = "never was" if end == NEVER else f"was after {seconds(found.asked.at, end):.1f} s"
            yield Violation(
                "waiting",
                int(due),
                found.group,
                f"job {found.job} ({found.who}) asked and was due within {term:g} s of calm; it {late} in",
            )


def end_of_wait(story: Story, found: Try) -> float:
    """When a try stopped waiting; NEVER if it did not."""
    ends = [line.at for line in (found.entered, found.gave_up) if line]
    return min([*ends, story.end_of(found.who)])
