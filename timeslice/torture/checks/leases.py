"""A lease is lost only for a reason."""

from __future__ import annotations

from collections.abc import Iterator

from timeslice.torture.checks.story import SECOND, Harm, Story, Terms, Try, Violation


def lost_for_nothing(story: Story, terms: Terms) -> Iterator[Violation]:
    """No holder that runs and can reach the server loses its lease; a clock that steps is no reason.

    Whatever stopped the holder or kept it from the server in the last two lease terms is one, and so is lost data.
    """
    for body in story.bodies:
        if body.lost is None:
            continue
        since = body.lost.at - 2 * terms.lease_s * SECOND
        if not any(_explains(story, harm, body) and harm.until >= since for harm in story.harms_to(body.group)):
            yield Violation(
                "leases",
                body.lost.at,
                body.group,
                f"job {body.job} ({body.who}) lost its lease (token {body.token}) although nothing was done to it",
            )


def _explains(story: Story, harm: Harm, body: Try) -> bool:
    assert body.lost is not None
    return harm.at <= body.lost.at and harm.fault.harm != "clock" and story.hinders(harm, body.who)
