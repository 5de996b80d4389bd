"""In a group no two bodies at once."""

from __future__ import annotations

from collections.abc import Iterator

from timeslice.torture.checks.bodies import Stretch, stretches
from timeslice.torture.checks.story import Story, Terms, Try, Violation, seconds


def overlaps(story: Story, terms: Terms) -> Iterator[Violation]:
    """No two bodies of a group run at the same time, not even two of one job, but the ranks of a gang under its lease.

    Two things are no violation in a lock-only group, which has no agent that would stop the older one. A lease that
    ended by itself ends on two machines: the older one's loss may be written ``slack_s`` later than the younger one's
    entry. And a server that lost its data has forgotten the older lease: DESIGN section 2, "Not promised".
    """
    for group in story.groups:
        open_: list[Stretch] = []
        found = [stretch for body in story.bodies_of(group) for stretch in stretches(story, body, terms)]
        told: set[frozenset[int]] = set()
        for stretch in sorted(found, key=lambda each: each.start):
            open_ = [other for other in open_ if other.end > stretch.start]
            for other in open_:
                pair = frozenset((id(other.body), id(stretch.body)))
                if other.body is stretch.body or other.body.shares(stretch.body):
                    continue
                if pair in told or _excused(story, terms, other, stretch):
                    continue
                told.add(pair)
                yield _violation(group, other, stretch)
            open_.append(stretch)


def _violation(group: str, older: Stretch, younger: Stretch) -> Violation:
    both = seconds(younger.start, min(older.end, younger.end))
    return Violation(
        "overlap",
        int(younger.start),
        group,
        f"job {younger.body.job} (token {younger.body.token}, {younger.body.who}) was in together with job "
        f"{older.body.job} (token {older.body.token}, {older.body.who}) for {both:.3f} s",
    )


def _excused(story: Story, terms: Terms, one: Stretch, other: Stretch) -> bool:
    older, younger = sorted((one.body, other.body), key=lambda body: body.entered.at if body.entered else 0)
    if not (older.lock_only and younger.lock_only):
        return False
    until = min(one.end, other.end)
    if older.lost is not None and seconds(max(one.start, other.start), until) <= terms.slack_s:
        return True
    return _forgotten(story, terms, older, younger, until)


def _forgotten(story: Story, terms: Terms, older: Try, younger: Try, until: float) -> bool:
    """Between data loss and the older one's next renewal, due within a third of its lease, two may be in."""
    assert older.entered is not None
    assert younger.entered is not None
    for loss in story.losses(older.group):
        if older.entered.at > loss.until or younger.entered.at < loss.at:
            continue
        if until <= story.calm_from(older.group, older.who, loss.until, terms.lease_s / 3 + terms.slack_s):
            return True
    return False
