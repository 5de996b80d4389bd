"""When a body really runs: from its confirmed grant to the earliest of stop, loss, end and freeze."""

from __future__ import annotations

from dataclasses import dataclass

from timeslice.torture.checks.story import NEVER, Story, Terms, Try
from timeslice.torture.history import Moved


@dataclass(frozen=True)
class Stretch:
    """A stretch of time in which a body runs."""

    body: Try
    start: float
    end: float


def stretches(story: Story, body: Try, terms: Terms) -> list[Stretch]:
    """The times in which ``body`` counts as inside.

    It counts from Entered to the earliest of Left, Lost and the end of its process. In between it does not count while
    it is frozen: by a stop of its process until that is continued, or by an agent's prepare until its release. After
    the thaw it counts again, at once if nobody was granted since. Else it is stale, and has ``slack_s`` of undisturbed
    time to hear of it: its renewal is long overdue, so it is sent at once.
    """
    if body.entered is None:
        return []
    start: float = body.entered.at
    end = min(line.at if line else NEVER for line in (body.left, body.lost))
    end = min(end, story.end_of(body.who))
    found = []
    for freeze, thaw in freezes(story, body):
        if thaw <= start or freeze >= end:
            continue
        if freeze > start:
            found.append(Stretch(body, start, freeze))
        start = max(thaw, start)
        if start < NEVER and _newest(story, body.group, start) > body.token:
            start = story.calm_from(body.group, body.who, start, terms.slack_s)
    if start < end:
        found.append(Stretch(body, start, end))
    return found


def freezes(story: Story, body: Try) -> list[tuple[float, float]]:
    """Merged intervals in which the body's process stands still, or may."""
    found: list[tuple[float, float]] = [
        (harm.at, harm.until) for harm in story.harms if harm.fault.harm == "stop" and harm.fault.label == body.who
    ]
    found += _moves(story.moves.get((body.group, body.node, body.job), ()))
    merged: list[tuple[float, float]] = []
    for start, end in sorted(found):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def _moves(moves: list[Moved] | tuple[()]) -> list[tuple[float, float]]:
    """From an agent's first touch to its last. A prepare that failed has locked nobody; what an agent that was killed
    had reached is unknown, so the job counts as frozen until the next agent says that it runs."""
    found: list[tuple[float, float]] = []
    since: float | None = None
    for move in moves:
        if move.stage == "begin" and move.step in {"prepare", "suspend"}:
            since = move.at if since is None else since
        thaws = move.step in {"release", "abort"} and move.stage == "done"
        if since is not None and (thaws or (move.step == "prepare" and move.stage == "failed")):
            found.append((since, move.at))
            since = None
    if since is not None:
        found.append((since, NEVER))
    return found


def _newest(story: Story, group: str, at: float) -> int:
    """The highest token with which anybody had entered by then."""
    return max((other.token for other in story.bodies_of(group) if other.entered and other.entered.at <= at), default=0)
