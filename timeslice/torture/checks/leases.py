"""A lease is lost only for a reason."""

from __future__ import annotations

from collections.abc import Iterator

from timeslice.torture.checks.grants import ENDS
from timeslice.torture.checks.story import SECOND, Story, Terms, Try, Violation, seconds
from timeslice.torture.history import Told


def lost_for_nothing(story: Story, terms: Terms) -> Iterator[Violation]:
    """No holder that runs and can reach the server loses its lease; a clock that steps is no reason.

    Two things are one, in the last two lease terms: lost data; and what stopped the holder or kept it from the server,
    all in all for a third of a term. A renewal is due in each third, so that two have to fail before a lease ends, and
    the terms' lease may be somewhat longer than this one's. A third is an order to take it away, which the stream
    tells. And all ranks of a gang lose its lease when one of them ends, or can't be heard of.
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


def begun_without(story: Story, terms: Terms) -> Iterator[Violation]:
    """No body begins without all its leases.

    Who asks for several groups may lose the first while it waits for the last: by the server's own clock it ended
    before the last was granted, and the client asks for all after that. Where the client was told of it, that may be in
    the moment in which it enters, so that only a loss of ``slack_s`` before counts, of a process that was not stopped.
    """
    yield from _ended_before(story)
    for body in story.bodies:
        if body.lost is None or body.entered is None:
            continue
        since = body.lost.at + terms.slack_s * SECOND
        stopped = any(harm.at <= body.entered.at and harm.until >= body.lost.at for harm in story.stops_of(body.who))
        if since < body.entered.at and not stopped:
            yield Violation(
                "begun",
                body.entered.at,
                body.group,
                f"job {body.job} ({body.who}) began its body {seconds(body.lost.at, body.entered.at):.1f} s after it "
                f"was told that its lease (token {body.token}) is lost",
            )


def _ended_before(story: Story) -> Iterator[Violation]:
    clocks = [harm for harm in story.harms if harm.fault.harm == "clock"]
    for body in story.bodies:
        assert body.entered is not None
        others = _together(story, body)
        grants = [
            _written(event)
            for each in others
            for event in story.told_of(each.group, each.token)
            if event.type == "LeaseGranted"
        ]
        if not grants or any(harm.at <= body.entered.at and harm.until >= _asked(body) for harm in clocks):
            continue
        own = [event for event in story.told_of(body.group, body.token) if event.type != "StateLost"]
        ends = [_written(event) for event in own if event.type in ENDS]
        back = any(event.type == "LeaseReinstalled" for event in own)
        if ends and not back and min(ends) < max(grants):
            yield Violation(
                "begun",
                body.entered.at,
                body.group,
                f"job {body.job} ({body.who}) began its body although its lease (token {body.token}) had ended "
                f"{max(grants) - min(ends)} ms before the last of its groups was granted",
            )


def _together(story: Story, body: Try) -> list[Try]:
    """Bodies of other groups that began with the same hold: a process waits for one hold at a time."""
    assert body.entered is not None
    return [
        other
        for other in story.bodies_near(body)
        if other.entered and _asked(other) < body.entered.at and _asked(body) < other.entered.at
    ]


def _asked(body: Try) -> int:
    return body.asked.at if body.asked else 0


def _written(event: Told) -> int:
    # Not its id, where it tells the time: after a clock that went back ids stay where they were.
    return int(event.fields.get("at_ms") or event.entry.partition("-")[0])


def _has_reason(story: Story, terms: Terms, body: Try, lost_at: int) -> bool:
    since = lost_at - 2 * terms.lease_s * SECOND
    if any(event.type == "LeaseRevoked" for event in story.told_of(body.group, body.token)):
        return True
    partners = story.partners(body)
    if any(since <= story.end_of(partner) <= lost_at for partner in partners):
        return True
    away: list[tuple[float, float]] = []
    for harm in story.harms_to(body.group):
        if harm.at > lost_at or harm.until < since:
            continue
        if harm.loses:
            return True
        spans = [story.away(harm, who) for who in (body.who, *partners)]
        away += [span for span in spans if span is not None]
    total, covered = 0.0, since
    for start, end in sorted(away):
        total += max(0.0, min(end, lost_at) - max(start, covered))
        covered = max(covered, end)
    return total >= terms.lease_s / 3 * SECOND
