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
    found = stops + [_believed(body, touch, stops, terms) for touch in touches(story, body, terms)]
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
class Touch:
    """From an agent's first touch to its last. From ``loosens`` on the job may run: a release has begun."""

    first: Moved
    loosens: float
    end: float

    @property
    def start(self) -> int:
        return self.first.at


def touches(story: Story, body: Try, terms: Terms) -> list[Touch]:
    """What agents did to the body's job on its node.

    A prepare that failed has locked nobody, and neither has one whose agent ended in it. What else an agent had reached
    that was killed is unknown, so the job counts as frozen until the next agent says that it runs, or it enters, which
    needs a confirmed grant.
    """
    assert body.entered is not None
    entered = NEVER if body.heard_at_once(terms) else body.entered.at  # it had waited for a second group, and is none
    found: list[Touch] = []
    first: Moved | None = None
    last: Moved | None = None
    loosens: float = NEVER
    for move in (*story.moves.get((body.group, body.node, body.job), ()), None):
        at = move.at if move else NEVER
        if first is not None and last is not None:
            over = min(_ended_in_prepare(story, last), entered if first.at < entered else NEVER)
            if over <= at:
                found.append(Touch(first, min(loosens, over), over))
                first = None
        if move is None:
            break
        last = move
        if move.stage == "begin" and move.step in {"prepare", "suspend"}:
            first, loosens = first or move, NEVER
        thaws = move.step in {"release", "abort"}
        if thaws and move.stage == "begin":
            loosens = min(loosens, move.at)
        if first is not None and ((thaws and move.stage == "done") or (move.step, move.stage) == ("prepare", "failed")):
            found.append(Touch(first, min(loosens, move.at), move.at))
            first = None
    return found


def _ended_in_prepare(story: Story, move: Moved) -> float:
    """When an agent ended whose last line was the begin of a prepare."""
    return max(story.end_of(move.who), move.at) if (move.step, move.stage) == ("prepare", "begin") else NEVER


def _believed(body: Try, touch: Touch, stops: list[tuple[float, float]], terms: Terms) -> tuple[float, float]:
    """How long the body was frozen by that touch.

    Not at all if it read its memory or ended by itself while it should stand still. Such a line may be written
    ``slack_s`` late, and as late after a stop.
    """
    slack = terms.slack_s * SECOND
    for line in (*body.checked, *([body.left] if body.left else [])):
        stood_still = any(start <= line.at and end >= line.at - slack for start, end in stops)
        if touch.start + slack < line.at < touch.loosens and not stood_still:
            return touch.start, touch.start
    return touch.start, touch.end


def _newest(story: Story, group: str, at: float) -> int:
    """The highest token with which anybody had entered by then."""
    return max((other.token for other in story.bodies_of(group) if other.entered and other.entered.at <= at), default=0)
