"""Tokens strictly rise in a group, also over data loss and failover."""

from __future__ import annotations

from collections.abc import Iterator

from timeslice.torture.checks.bodies import freezes
from timeslice.torture.checks.story import Story, Terms, Try, Violation


def falling_tokens(story: Story, terms: Terms) -> Iterator[Violation]:
    """Each grant has a higher token than every one before it.

    Seen from two sides. The event stream is written by the scripts that grant, so its order is the order of grants,
    without exception. The bodies' own lines are written later: a process that is frozen between its grant and its first
    line may write after somebody who was granted later, and so may one that waited for a second group meanwhile and
    hears at once that the first is lost. Only the others are held to it.
    """
    for group in story.groups:
        yield from _in_stream(story, group)
        yield from _in_bodies(story, terms, group)


def _in_stream(story: Story, group: str) -> Iterator[Violation]:
    highest, whose = 0, ""
    for event in story.told[group]:
        if event.type not in {"LeaseGranted", "LeaseReinstalled"}:
            continue
        token, waiter = int(event.fields.get("token", "0")), event.fields.get("waiter", "")
        again = event.type == "LeaseReinstalled" or (token == highest and waiter == whose)
        if token <= highest and not again:
            yield Violation(
                "tokens",
                event.at,
                group,
                f"token {token} was granted to job {event.fields.get('job')} after token {highest}",
            )
        if token > highest:
            highest, whose = token, waiter


def _in_bodies(story: Story, terms: Terms, group: str) -> Iterator[Violation]:
    newest: Try | None = None
    for body in story.bodies_of(group):
        assert body.entered is not None
        if newest is None or body.token > newest.token:
            newest = body
        elif body.token == newest.token or not (_stood_still(story, body) or body.heard_at_once(terms)):
            yield Violation(
                "tokens",
                body.entered.at,
                group,
                f"job {body.job} ({body.who}) entered with token {body.token} after job {newest.job} "
                f"({newest.who}) had entered with token {newest.token}",
            )


def _stood_still(story: Story, body: Try) -> bool:
    """Whether the process was frozen between its question and its entry."""
    assert body.entered is not None
    asked, entered = body.asked.at if body.asked else 0, body.entered.at
    return any(start <= entered and end >= asked for start, end in freezes(story, body))
