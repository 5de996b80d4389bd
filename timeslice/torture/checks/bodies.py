"""When a body really runs: from its confirmed grant to the earliest of stop, loss, end and freeze."""

from __future__ import annotations

from dataclasses import dataclass

from timeslice.torture.checks.story import NEVER, SECOND, Story, Terms, Try
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
    for freeze, thaw in freezes(story, body, terms):
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


def freezes(story: Story, body: Try, terms: Terms) -> list[tuple[float, float]]:
    """Merged intervals in which the body's process stands still, or may. What an agent says of it is not believed
    against the body's own lines."""
    stops = _stops(story, body)
    moved = _moves(story, story.moves.get((body.group, body.node, body.job), []))
    found = stops + [_believed(body, freeze, stops, terms) for freeze in moved]
    merged: list[tuple[float, float]] = []
    for start, end in sorted(found):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def _stops(story: Story, body: Try) -> list[tuple[float, float]]:
    return [(harm.at, harm.until) for harm in story.harms if harm.fault.harm == "stop" and harm.fault.label == body.who]


@dataclass(frozen=True)
class _Touch:
    """From an agent's first touch to its last. From ``loosens`` on the job may run: a release has begun."""

    start: float
    loosens: float
    end: float


def _moves(story: Story, moves: list[Moved]) -> list[_Touch]:
    """A prepare that failed has locked nobody, and neither has one whose agent ended in it. What else an agent had
    reached that was killed is unknown, so the job counts as frozen until the next agent says that it runs."""
    found: list[_Touch] = []
    since: Moved | None = None
    loosens: float = NEVER
    last: Moved | None = None
    for move in moves:
        if since is not None and last is not None and (ended := _ended_in_prepare(story, last)) < move.at:
            found.append(_Touch(since.at, ended, ended))
            since = None
        last = move
        if move.stage == "begin" and move.step in {"prepare", "suspend"}:
            since, loosens = (move, NEVER) if since is None else (since, NEVER)
        thaws = move.step in {"release", "abort"}
        if thaws and move.stage == "begin":
            loosens = min(loosens, move.at)
        if since is not None and ((thaws and move.stage == "done") or (move.step, move.stage) == ("prepare", "failed")):
            found.append(_Touch(since.at, min(loosens, move.at), move.at))
            since = None
    if since is not None and last is not None:
        ended = _ended_in_prepare(story, last)
        found.append(_Touch(since.at, min(loosens, ended), ended))
    return found


def _ended_in_prepare(story: Story, move: Moved) -> float:
    """When an agent ended whose last line was the begin of a prepare."""
    return max(story.end_of(move.who), move.at) if (move.step, move.stage) == ("prepare", "begin") else NEVER


def _believed(body: Try, touch: _Touch, stops: list[tuple[float, float]], terms: Terms) -> tuple[float, float]:
    """How long the body was frozen by that touch.

    Not beyond its own entry, which needs a confirmed grant, nor at all if it read its memory or ended by itself while
    it should stand still. Such a line may be written ``slack_s`` late, and as late after a stop.
    """
    assert body.entered is not None
    if touch.start < body.entered.at:
        late = body.heard_at_once(terms)  # it had waited for a second group, and is none
        return touch.start, touch.end if late else min(touch.end, body.entered.at)
    slack = terms.slack_s * SECOND
    for line in (*body.checked, *([body.left] if body.left else [])):
        stood_still = any(start <= line.at and end >= line.at - slack for start, end in stops)
        if touch.start + slack < line.at < touch.loosens and not stood_still:
            return touch.start, touch.start
    return touch.start, touch.end


def _newest(story: Story, group: str, at: float) -> int:
    """The highest token with which anybody had entered by then."""
    return max((other.token for other in story.bodies_of(group) if other.entered and other.entered.at <= at), default=0)
