"""A lease is lost only for a reason."""

from __future__ import annotations

from collections.abc import Iterator

from timeslice.torture.checks.story import SECOND, Story, Terms, Try, Violation


def lost_for_nothing(story: Story, terms: Terms) -> Iterator[Violation]:
    """No holder that runs and can reach the server loses its lease; a clock that steps is no reason.

    Two things are one, in the last two lease terms: lost data; and what stopped the holder or kept it from the server,
    all in all for a third of a term. A renewal is due in each third, so that two have to fail before a lease ends, and
    the terms' lease may be somewhat longer than this one's.
    """
    for body in story.bodies:
        if body.lost is not None and not _has_reason(story, terms, body, body.lost.at):
            yield Violation(
                "leases",
                body.lost.at,
                body.group,
                f"job {body.job} ({body.who}) lost its lease (token {body.token}) although nothing was done to it that "
                f"takes so long",
            )


def _has_reason(story: Story, terms: Terms, body: Try, lost_at: int) -> bool:
    since = lost_at - 2 * terms.lease_s * SECOND
    away: list[tuple[float, float]] = []
    for harm in story.harms_to(body.group):
        if harm.at > lost_at or harm.until < since:
            continue
        if harm.loses:
            return True
        if (span := story.away(harm, body.who)) is not None:
            away.append(span)
    total, covered = 0.0, since
    for start, end in sorted(away):
        total += max(0.0, min(end, lost_at) - max(start, covered))
        covered = max(covered, end)
    return total >= terms.lease_s / 3 * SECOND
