"""A history put in order: tries, bodies, faults, ends of processes, moves and events."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate

from timeslice.torture.history import (
    Asked,
    Born,
    Calm,
    Checked,
    Cramped,
    Died,
    Ended,
    Entered,
    Fault,
    GaveUp,
    Healed,
    Left,
    Line,
    Lost,
    Moved,
    OnDevice,
    Silent,
    Surveyed,
    Told,
)

SECOND = 1_000_000_000  # ns
NEVER = math.inf
READ_S = 1.5  # by then the reader of the event stream has read what the scripts told, if nothing hinders it
BACK_S = 1.0  # to notice that the server answers again, and to connect

_NEAR = 4  # bodies of one process: no hold has more groups
LOSSES = frozenset({"flush", "wipe", "failover"})  # after these the server may know less than before


@dataclass(frozen=True)
class Terms:
    """What the run promised; seconds.

    ``recovery_s``: where somebody waits, somebody is in within so long after a fault. ``exclusive``: a device holds one
    job. ``slack_s``: what a runnable process on a busy machine may need to act on what it was told.
    """

    lease_s: float = 30.0
    waiter_ttl_s: float = 15.0
    recovery_s: float = 60.0
    slack_s: float = 0.5
    exclusive: bool = True


@dataclass(frozen=True)
class Violation:
    """A promise that was broken. ``at`` is on the history's clock (ns)."""

    rule: str
    at: int
    group: str
    message: str


@dataclass(frozen=True)
class Harm:
    """A fault with its end; ``until`` is NEVER when it was not healed."""

    fault: Fault
    until: float

    @property
    def at(self) -> int:
        return self.fault.at

    @property
    def loses(self) -> bool:
        return self.fault.harm in LOSSES

    def disturbs(self, group: str) -> bool:
        return not self.fault.groups or group in self.fault.groups


@dataclass
class Try:
    """One try to hold, from the question to the end of its body."""

    asked: Asked | None
    who: str
    job: str
    group: str
    request: str
    node: str = ""
    entered: Entered | None = None
    left: Left | None = None
    lost: Lost | None = None
    gave_up: GaveUp | None = None
    checked: list[Checked] = field(default_factory=list)
    cramped: Cramped | None = None

    @property
    def lock_only(self) -> bool:
        return self.asked is not None and self.asked.lock_only

    @property
    def ranks(self) -> int:
        return self.asked.ranks if self.asked else 1

    @property
    def token(self) -> int:
        return self.entered.token if self.entered else 0

    def shares(self, other: Try) -> bool:
        """Whether they are ranks of one gang, which hold one lease together."""
        return self.ranks > 1 and (self.job, self.token) == (other.job, other.token) and self.who != other.who

    def heard_at_once(self, terms: Terms) -> bool:
        """Whether it was told that its lease is over before it was in, or as soon as it was."""
        if self.entered is None or self.lost is None:
            return False
        return self.lost.at <= self.entered.at + terms.slack_s * SECOND


class Story:
    """Everything that a rule looks up. Lines may come in any order of files; each file's own order is kept."""

    def __init__(self, lines: Iterable[Line]) -> None:
        self.lines: list[Line] = sorted(lines, key=lambda line: line.at)
        self.tries: dict[tuple[str, str], Try] = {}
        self.born: dict[str, Born] = {}
        self.died: dict[str, Died] = {}
        self.ends: dict[str, int] = {}  # label -> from when on its process may have been at its end
        self.moves: dict[tuple[str, str, str], list[Moved]] = defaultdict(list)  # (group, node, job) -> in order
        self.devices: list[OnDevice] = []
        self.surveys: list[Surveyed] = []
        self.silences: dict[str, list[Silent]] = defaultdict(list)  # group -> in order of their ends
        self.told: dict[str, list[Told]] = defaultdict(list)  # group -> in the stream's order
        self.calm: Calm | None = None
        self.ended: Ended | None = None
        faults: dict[int, Fault] = {}
        healed: dict[int, int] = {}
        seen: set[tuple[str, str]] = set()
        spoke: dict[str, int] = {}  # label -> when it wrote its last line so far
        for line in self.lines:
            spoke[line.who] = line.at
            match line:
                case Asked() | Entered() | Checked() | Cramped() | Lost() | Left() | GaveUp():
                    self._of_try(line)
                case Born():
                    self.born[line.label] = line
                case Died():
                    self.died[line.label] = line
                    self._end(line.label, max(line.ran, spoke.get(line.label, 0)) if line.ran else line.at)
                case Fault():
                    faults[line.id] = line
                    for label in line.killed:
                        self._end(label, line.at)
                case Healed():
                    healed[line.id] = line.at
                case Moved():
                    self.moves[line.group, line.node, line.job].append(line)
                case OnDevice():
                    self.devices.append(line)
                case Surveyed():
                    self.surveys.append(line)
                case Silent():
                    self.silences[line.group].append(line)
                case Told() if (line.group, line.entry) not in seen:  # a reader that reconnects may read it again
                    seen.add((line.group, line.entry))
                    self.told[line.group].append(line)
                case Calm():
                    self.calm = line
                case Ended():
                    self.ended = line
                case _:
                    pass
        self.harms = [Harm(fault, healed.get(number, NEVER)) for number, fault in faults.items()]
        self.bodies = sorted((found for found in self.tries.values() if found.entered), key=_entered_at)
        self._by_group: dict[str, list[Try]] = defaultdict(list)
        self._by_who: dict[str, list[Try]] = defaultdict(list)
        for body in self.bodies:
            self._by_group[body.group].append(body)
            self._by_who[body.who].append(body)
        self._newest = {group: _highest(bodies) for group, bodies in self._by_group.items()}
        self._by_token: dict[tuple[str, str], list[Told]] = defaultdict(list)
        self._resets: dict[str, list[Told]] = defaultdict(list)
        for group, events in self.told.items():
            for event in events:
                if event.type == "StateLost":
                    self._resets[group].append(event)
                if token := event.fields.get("token"):
                    self._by_token[group, token].append(event)
        self._labels: dict[tuple[str, str], list[str]] = defaultdict(list)
        for label, born in self.born.items():
            self._labels[born.node, born.job].append(label)
        self._stops: dict[str, list[Harm]] = defaultdict(list)
        for harm in self.harms:
            if harm.fault.harm == "stop":
                self._stops[harm.fault.label].append(harm)
        self._terms_of: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
        for group, events in self.told.items():
            self._note_terms(group, events)
        self.memo: dict[object, object] = {}  # what rules have worked out, for each other

    def _note_terms(self, group: str, events: list[Told]) -> None:
        """From when to when each node is one of the group."""
        for event in events:
            terms = self._terms_of[group, event.fields.get("node", "")]
            if event.type == "NodeJoined" and not (terms and terms[-1][1] == NEVER):
                terms.append((event.at, NEVER))
            elif event.type == "NodeLeft" and terms:
                terms[-1] = (terms[-1][0], event.at)

    def _of_try(self, line: Asked | Entered | Checked | Cramped | Lost | Left | GaveUp) -> None:
        key = (line.who, line.request)
        found = self.tries.setdefault(key, Try(None, line.who, line.job, line.group, line.request))
        match line:
            case Asked():
                found.asked, found.node = line, line.node
            case Entered():
                found.entered = line
            case Checked():
                found.checked.append(line)
            case Cramped():
                found.cramped = line
            case Lost():
                found.lost = found.lost or line
            case Left():
                found.left = line
            case GaveUp():
                found.gave_up = line

    def _end(self, label: str, at: int) -> None:
        self.ends[label] = min(at, self.ends.get(label, at))

    @property
    def groups(self) -> list[str]:
        return sorted({found.group for found in self.tries.values()} | set(self.told))

    def end_of(self, label: str) -> float:
        """From when on that process may have ended: until then it was seen to run, or wrote lines. NEVER if nobody saw
        it end."""
        return self.ends.get(label, NEVER)

    def bodies_of(self, group: str) -> list[Try]:
        """In the order in which they were entered."""
        return self._by_group.get(group, [])

    def bodies_in(self, label: str) -> list[Try]:
        """Of one process."""
        return self._by_who.get(label, [])

    def bodies_near(self, body: Try) -> list[Try]:
        """Those of other groups that the same process began just before it and just after it."""
        every = self.bodies_in(body.who)
        place = bisect_left(every, _entered_at(body), key=_entered_at)
        near = every[max(place - _NEAR, 0) : place + _NEAR + 1]
        return [other for other in near if other.group != body.group]

    def newest_token(self, group: str, at: float) -> int:
        """The highest with which anybody had entered by then."""
        times, tokens = self._newest.get(group, ([], []))
        index = bisect_right(times, at)
        return tokens[index - 1] if index else 0

    def told_of(self, group: str, token: int) -> list[Told]:
        """What the stream tells of a lease, and of lost data; in its order."""
        return sorted([*self._by_token.get((group, str(token)), ()), *self._resets.get(group, ())], key=_at)

    def processes_of(self, node: str, job: str) -> list[str]:
        """Labels of all that ever ran there."""
        return self._labels.get((node, job), [])

    def partners(self, body: Try) -> list[str]:
        """Labels of the processes that hold together with this one, and of those that were in their place."""
        if body.ranks < 2:
            return []
        return [label for label, born in self.born.items() if born.job == body.job and label != body.who]

    def stops_of(self, label: str) -> list[Harm]:
        return self._stops.get(label, [])

    def serves(self, group: str, node: str, since: float, at: float) -> bool:
        """Whether that node was one of the group all the time, for certain: what is told is read a moment later."""
        return any(
            start <= since and at + READ_S * SECOND < end for start, end in self._terms_of.get((group, node), ())
        )

    def has_left(self, group: str, node: str, at: int) -> bool:
        """Whether that node was none of the group then, though it was or is one at another time: nobody moves what jobs
        load there, and their processes have said so."""
        terms = self._terms_of.get((group, node), ())
        return bool(terms) and not any(start <= at <= end for start, end in terms)

    def found_at_join(self, group: str, node: str, job: str, since: int, at: int) -> bool:
        """Whether a node joined after ``since``, and the job was on its device before and is so still."""
        joined = self._joined(group, node, at)
        return joined is not None and joined > since and job in self.there_at_join(group, node, at)

    def _joined(self, group: str, node: str, at: int) -> int | None:
        """When the node joined the last time before that."""
        return max((int(start) for start, _ in self._terms_of.get((group, node), ()) if start <= at), default=None)

    def there_at_join(self, group: str, node: str, at: int) -> set[str]:
        """Jobs that were on a node's device just before it joined, and that neither were moved out nor began again
        since."""
        joined = self._joined(group, node, at)
        if joined is None:
            return set()
        looks = (look for look in self.surveys if (look.group, look.node) == (group, node))
        # It is read a moment after it came about, and who is let in by that must not count.
        before = [look for look in looks if joined - 2 * READ_S * SECOND < look.at < joined - SECOND // 3]
        begun = {born.job for born in self.born.values() if born.node == node and joined < born.at < at}
        return {
            job
            for job in {job for look in before for job in look.found} - begun
            if not any(
                joined < move.at < at and move.step == "suspend" for move in self.moves.get((group, node, job), ())
            )
        }

    def was_silent(self, group: str, at: float) -> bool:
        """Whether a node of the group was overdue at what the stream told then."""
        return any(line.since <= at and line.at >= at - READ_S * SECOND for line in self.silences.get(group, ()))

    def harms_to(self, group: str) -> Iterator[Harm]:
        return (harm for harm in self.harms if harm.disturbs(group))

    def losses(self, group: str) -> list[Harm]:
        return [harm for harm in self.harms_to(group) if harm.loses]

    def hinders(self, harm: Harm, who: str) -> bool:
        """Whether a fault may keep a process from the server: not one that was done to another job, agent or
        coordinator."""
        label = harm.fault.label
        if harm.fault.harm == "revoke":
            return False
        return label in {"", who} or label not in self.born or self.born[label].role == "server"

    def away(self, harm: Harm, who: str) -> tuple[float, float] | None:
        """From when to when a process may stand still or not reach the server, for that fault; None if it can't be.

        A script that was forgotten is sent again at once, a request that arrives twice is answered, and no clock step
        keeps anybody away. Behind the others comes what it takes to notice and to connect again.
        """
        if harm.fault.harm in {"forget", "repeat", "clock"} or not self.hinders(harm, who):
            return None
        return harm.at, harm.until + BACK_S * SECOND

    def calm_from(self, group: str, who: str, start: float, seconds: float) -> float:
        """The first moment after ``start`` that has so many undisturbed seconds for ``who`` behind it."""
        until = start + seconds * SECOND
        for harm in self.harms_to(group):
            if self.hinders(harm, who) and harm.at < until and harm.until > until - seconds * SECOND:
                until = harm.until + seconds * SECOND
        return until


def _at(line: Line) -> int:
    return line.at


def _highest(bodies: list[Try]) -> tuple[list[int], list[int]]:
    """Times of entries, and the highest token by each."""
    return [_entered_at(body) for body in bodies], list(accumulate((body.token for body in bodies), max))


def _entered_at(body: Try) -> int:
    assert body.entered is not None
    return body.entered.at


def seconds(start: float, end: float) -> float:
    return (end - start) / SECOND
