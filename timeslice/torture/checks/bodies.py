"""When a body really runs: from its confirmed grant to the earliest of stop, loss, end and freeze."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from typing import cast

from timeslice.torture.checks.story import NEVER, SECOND, Story, Terms, Try
from timeslice.torture.history import Moved


@dataclass(frozen=True)
class Stretch:
    """A stretch of time in which a body runs."""

    body: Try
    start: float
    end: float


def stretches(story: Story, body: Try, terms: Terms) -> list[Stretch]:
    """As ``_stretches``; worked out once, for all rules."""
    key = (stretches, body.who, body.request, terms)
    if (known := story.memo.get(key)) is None:
        known = story.memo[key] = _stretches(story, body, terms)
    return cast("list[Stretch]", known)


def _stretches(story: Story, body: Try, terms: Terms) -> list[Stretch]:
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
        if start < NEVER and story.newest_token(body.group, start) > body.token:
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
    return [(harm.at, harm.until) for harm in story.stops_of(body.who)]


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
    """What agents did to the body's job on its node, from its question to its end.

    A prepare that failed has locked nobody, and neither has one whose agent ended in it. What else an agent had reached
    that was killed is unknown, so the job counts as frozen until the next agent says that it runs, or it enters, which
    needs a confirmed grant.
    """
    assert body.entered is not None
    entered = NEVER if body.heard_at_once(terms) else body.entered.at  # it had waited for a second group, and is none
    since = body.asked.at if body.asked else 0
    until = min([story.end_of(body.who), *(line.at for line in (body.left, body.lost) if line)])
    moves = story.moves.get((body.group, body.node, body.job), [])
    first = bisect_left(moves, since, key=_at)
    last = bisect_right(moves, max(until, since), key=_at)
    starts = _starts(story, (body.group, body.node, body.job))
    return _scan(story, moves[starts[first] : last + 1] if moves else [], entered)


def _starts(story: Story, place: tuple[str, str, str]) -> list[int]:
    """For each move of a job, and for the end: the index of the one with which the touch began that it belongs to.

    A touch lasts at most to the move that ends it, whoever enters meanwhile: whoever looks from its beginning on sees
    all that matters.
    """
    key = (_starts, place)
    if (known := story.memo.get(key)) is None:
        found: list[int] = []
        open_: int | None = None
        for index, move in enumerate(story.moves.get(place, ())):
            found.append(index if open_ is None else open_)
            if _begins(move):
                open_ = index if open_ is None else open_
            elif _closes(move):
                open_ = None
        known = story.memo[key] = [*found, len(found) if open_ is None else open_]
    return cast("list[int]", known)


def _begins(move: Moved) -> bool:
    return move.stage == "begin" and move.step in {"prepare", "suspend"}


def _closes(move: Moved) -> bool:
    thaws = move.step in {"release", "abort"}
    return (thaws and move.stage == "done") or (move.step, move.stage) == ("prepare", "failed")


def _scan(story: Story, moves: list[Moved], entered: float) -> list[Touch]:
    found: list[Touch] = []
    first: Moved | None = None
    last: Moved | None = None
    loosens: float = NEVER
    for move in (*moves, None):
        at = move.at if move else NEVER
        if first is not None and last is not None:
            over = min(_ended_in_prepare(story, last), entered if first.at < entered else NEVER)
            if over <= at:
                found.append(Touch(first, min(loosens, over), over))
                first = None
        if move is None:
            break
        last = move
        if _begins(move):
            first, loosens = first or move, NEVER
        if move.step in {"release", "abort"} and move.stage == "begin":
            loosens = min(loosens, move.at)
        if first is not None and _closes(move):
            found.append(Touch(first, min(loosens, move.at), move.at))
            first = None
    return found


def _at(line: Moved) -> int:
    return line.at


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
