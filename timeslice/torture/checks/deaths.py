"""Nothing ends but what was killed, or was done."""

from __future__ import annotations

import signal
from collections.abc import Iterator

from timeslice.torture.checks.grants import ENDS
from timeslice.torture.checks.story import READ_S, SECOND, Harm, Story, Terms, Try, Violation
from timeslice.torture.history import Died


def unmeant_ends(story: Story, terms: Terms) -> Iterator[Violation]:
    """No agent, coordinator or job ends by itself.

    One end is right: a job that touches memory which was moved away from under it dies of SIGBUS, whatever the run
    meant to do. It may be moved away only when its lease is over: it heard so, or the stream tells it, or can't be
    expected to; or it was stopped a moment ago and did not look. And a device whose agent was told to lie may have no
    room for who is let in.
    """
    for death in story.died.values():
        bus = death.code == -signal.SIGBUS
        if (_may_touch_in_vain(story, terms, death)) if bus else death.meant:
            continue
        yield Violation(
            "ends",
            death.at,
            "",
            f"{death.label} ended with {death.code}, and nobody had killed it{': ' * bool(death.detail)}{death.detail}",
        )


def _may_touch_in_vain(story: Story, terms: Terms, death: Died) -> bool:
    return any(
        _is_over(story, body, death.at) or any(_explains(story, terms, harm, body, death) for harm in story.harms)
        for body in story.bodies_in(death.label)
        if not body.lock_only and not body.left
    )


def _is_over(story: Story, body: Try, at: int) -> bool:
    """Whether it heard that its lease is over, or the stream tells it."""
    return body.lost is not None or any(
        event.type == "StateLost" or event.type in ENDS
        for event in story.told_of(body.group, body.token)
        if body.entered and body.entered.at - READ_S * SECOND <= event.at <= at + READ_S * SECOND
    )


def _explains(story: Story, terms: Terms, harm: Harm, body: Try, death: Died) -> bool:
    if not harm.disturbs(body.group) or harm.at > death.at:
        return False
    if harm.fault.harm in {"lie", "late"}:
        return harm.until >= death.at - terms.recovery_s * SECOND
    return story.away(harm, body.who) is not None and harm.until >= death.at - terms.lease_s * SECOND
