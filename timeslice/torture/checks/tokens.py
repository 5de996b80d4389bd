"""Tokens strictly rise in a group, also over data loss and failover."""

from __future__ import annotations

from collections.abc import Iterator

from timeslice.torture.checks.bodies import freezes
from timeslice.torture.checks.story import READ_S, SECOND, Story, Terms, Try, Violation
from timeslice.torture.history import Told


def falling_tokens(story: Story, terms: Terms) -> Iterator[Violation]:
    """Each grant has a higher token than every one before it.

    Seen from two sides. The event stream is written by the scripts that grant, so its order is the order of grants,
    without exception; after a failover the new master's stream is read from its beginning. The bodies' own lines are
    written later: a process that is frozen between its grant and its first line may write after somebody who was
    granted later, and so may one that waited for a second group meanwhile and hears at once that the first is lost.
    Only the others are held to it.

    After data loss a holder's renewal puts its lease back. That must not be an older one than any that has been used:
    the newer one's agents and clients know better. In a lock-only group nobody does, so there an older one may come
    back until its holder's next renewal is due, and no later.

    One fall is no violation: nobody keeps the highest token of a lock-only group that no living process has used. If
    its server's clock was ahead, and then its data is lost, tokens begin anew at the true time.
    """
    for group in story.groups:
        yield from _in_stream(story, terms, group)
        yield from _in_bodies(story, terms, group)


def _in_stream(story: Story, terms: Terms, group: str) -> Iterator[Violation]:
    highest, whose, restarts = 0, "", _restarts(story, group)
    bodies = story.bodies_of(group)
    used_tokens, told = (
        {body.token for body in bodies},
        {int(event.fields.get("token", "0")) for event in story.told[group]},
    )
    untold = [body for body in bodies if body.token not in told]
    used: list[int] = []  # those that were granted before and entered
    read = (0, 0)
    for event in story.told[group]:
        while restarts and restarts[0] < event.at:
            highest = 0
            used.clear()
            restarts.pop(0)
        if (place := _place(event)) < read:  # from here on it is the stream of another server, from its beginning
            highest = 0
        read = place
        if event.type not in {"LeaseGranted", "LeaseReinstalled"}:
            continue
        token, waiter = int(event.fields.get("token", "0")), event.fields.get("waiter", "")
        if event.type == "LeaseReinstalled":
            # What a new master wrote is told late, after what the old one granted meanwhile; its own time tells.
            written_ms = place[0]
            before = [*used, *(body.token for body in untold if _before(body, event))]
            newest = max((each for each in before if each <= written_ms), default=0)
            if token < newest and not _may_come_back(story, terms, event, token):
                yield _violation(event, f"token {token} was put back for", newest)
        elif token < highest or (token == highest and waiter != whose):
            yield _violation(event, f"token {token} was granted to", highest)
        if token > highest:
            highest, whose = token, waiter
        if token in used_tokens:
            used.append(token)


def _violation(event: Told, what: str, highest: int) -> Violation:
    return Violation("tokens", event.at, event.group, f"{what} job {event.fields.get('job')} after token {highest}")


def _place(event: Told) -> tuple[int, int]:
    written_ms, _, number = event.entry.partition("-")
    return int(written_ms), int(number)


def _before(body: Try, event: Told) -> bool:
    """Whether it was in before that, for certain: what the reader tells has happened up to ``READ_S`` earlier."""
    return body.entered is not None and body.entered.at < event.at - READ_S * SECOND


def _may_come_back(story: Story, terms: Terms, event: Told, token: int) -> bool:
    """Whether it is a lock-only lease, put back by the first renewal after data loss."""
    for body in story.bodies_of(event.group):
        if body.token == token and body.lock_only:
            return any(
                loss.at
                <= event.at
                <= READ_S * SECOND
                + story.calm_from(event.group, body.who, loss.until, terms.lease_s / 3 + terms.slack_s)
                for loss in story.losses(event.group)
            )
    return False


def _in_bodies(story: Story, terms: Terms, group: str) -> Iterator[Violation]:
    newest: Try | None = None
    restarts = _restarts(story, group)
    for body in story.bodies_of(group):
        assert body.entered is not None
        while restarts and restarts[0] < body.entered.at:
            newest = None
            restarts.pop(0)
        if newest is None or body.token > newest.token or body.shares(newest):
            newest = body
        elif body.token == newest.token or not (_stood_still(story, body, terms) or body.heard_at_once(terms)):
            yield Violation(
                "tokens",
                body.entered.at,
                group,
                f"job {body.job} ({body.who}) entered with token {body.token} after job {newest.job} "
                f"({newest.who}) had entered with token {newest.token}",
            )


def _restarts(story: Story, group: str) -> list[int]:
    """When a lock-only group lost data that came from a clock which was ahead."""
    if not any(body.lock_only for body in story.bodies_of(group)):
        return []
    clocks = [harm.at for harm in story.harms_to(group) if harm.fault.harm == "clock"]
    return sorted(loss.at for loss in story.losses(group) if clocks and min(clocks) < loss.at)


def _stood_still(story: Story, body: Try, terms: Terms) -> bool:
    """Whether the process was frozen between its question and its entry."""
    assert body.entered is not None
    asked, entered = body.asked.at if body.asked else 0, body.entered.at
    return any(start <= entered and end >= asked for start, end in freezes(story, body, terms))
