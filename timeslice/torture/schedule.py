"""Which fault comes when: pure, and fixed by the seed, the seconds and the topology."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from timeslice.errors import UsageError
from timeslice.torture.stage import TOPOLOGIES, Topology

FIRST_AT_S = 1.5
GAP_S = (1.5, 3.1)  # between two faults
TAIL_S = 1.0  # before the end there is no new one
# After data loss nobody is granted for a lease, half a minute. Rare, so that the other faults meet traffic.
LOSSES = frozenset({"flush", "wipe"})
LOSS_GAP_S = 80.0

_ALONE: frozenset[Topology] = frozenset({"standalone"})
_ALL: frozenset[Topology] = frozenset(TOPOLOGIES)

# How many faults of a kind of victim may last at the same time.
_TOGETHER = {"job": 3, "agent": 2, "coordinator": 3, "server": 1, "link": 1, "disk": 1, "backend": 1, "lease": 1}
_CARD = 4  # of weight; each kind has one at least


@dataclass(frozen=True)
class Kind:
    """A kind of fault: how often it comes in relation to others, what it is done to, how long it lasts in seconds.

    What is done to a ``start`` is done once, before the first fault.
    """

    weight: int
    victim: str
    lasts: tuple[float, float] = (0.0, 0.0)
    where: frozenset[Topology] = _ALL
    extra: tuple[float, float] = (0.0, 0.0)  # range of `Planned.amount`


KINDS: Mapping[str, Kind] = {
    "kill-job": Kind(12, "job", (0.2, 2), extra=(0, 1)),
    "stop-job": Kind(16, "job", (2, 10), extra=(0, 0.65)),  # mostly who is inside, often past its lease
    "kill-agent": Kind(8, "agent", (0.2, 4)),
    "stop-agent": Kind(5, "agent", (0.5, 8)),
    "kill-coordinator": Kind(7, "coordinator", (0.2, 5), extra=(0, 1)),
    "stop-coordinator": Kind(5, "coordinator", (0.5, 8), extra=(0, 1)),
    "kill-server": Kind(5, "server", (0.2, 4)),
    "stop-server": Kind(3, "server", (0.3, 6)),
    "sleep": Kind(2, "server", (0.3, 3), where=_ALONE),
    "drop": Kind(3, "server"),
    "pause": Kind(2, "server", (0.3, 3)),
    "forget": Kind(2, "server"),
    "full": Kind(3, "server", (0.5, 4)),
    "flush": Kind(6, "server", where=_ALONE),
    "wipe": Kind(6, "server", (0.2, 2), where=_ALONE),
    "clock": Kind(3, "server", (2, 6), where=_ALONE, extra=(-3600, 3600)),
    "outage": Kind(3, "server", (3, 8), where=_ALONE),
    "password": Kind(2, "server", (0.5, 5), where=_ALONE),
    "cut": Kind(4, "link", (0.2, 7), where=_ALONE),
    "stall": Kind(3, "link", (0.3, 8), where=_ALONE),
    "delay": Kind(2, "link", (1, 4), where=_ALONE, extra=(0.02, 0.3)),
    "half-open": Kind(3, "link", (0.3, 6), where=_ALONE),
    "lose": Kind(4, "link", (1, 2), where=_ALONE),
    "repeat": Kind(4, "link", (1, 2), where=_ALONE),
    "disk": Kind(3, "disk", (1, 5)),
    "title": Kind(3, "job", (12, 18), extra=(0, 1)),
    "host-name": Kind(3, "job", (6, 8), extra=(0, 1)),
    "pid-namespace": Kind(3, "job", (6, 8), extra=(0, 1)),
    "time-namespace": Kind(3, "job", (6, 8), extra=(0, 1)),
    "threads": Kind(2, "job", (12, 18), extra=(0, 1)),
    "files-job": Kind(2, "job", (0.5, 4), extra=(0, 1)),
    "files-agent": Kind(2, "agent", (0.5, 4)),
    "blind-agent": Kind(3, "agent", (5, 8)),
    "trim": Kind(4, "agent", (8, 12)),
    "join": Kind(3, "agent", (6, 9)),
    "late-agents": Kind(0, "start", (1.5, 1.5)),
    "revoke": Kind(5, "lease", (4, 8)),
    "slow": Kind(2, "backend", (2, 5), extra=(0.05, 0.8)),
    "fail": Kind(4, "backend", (2, 5)),
    "fail-on": Kind(3, "backend", (1, 6)),
    "hang": Kind(3, "backend", (1, 9)),
    "die": Kind(4, "backend", (2, 5)),
    "lie": Kind(3, "backend", (1, 5)),
    "late": Kind(3, "backend", (2, 5), extra=(0.1, 0.6)),
}


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A fault to come. Seconds since the start of the run. ``pick`` in [0, 1) chooses among those that fit then."""

    id: int
    kind: str
    at_s: float
    lasts_s: float
    pick: float
    amount: float


def schedule(seed: int, seconds: float, topology: Topology, kinds: Collection[str] = ()) -> tuple[Planned, ...]:
    """All faults of a run, earliest first, and before them what is done to its start. ``kinds`` narrows them.

    UsageError for an unknown kind. Kinds are dealt from a shuffled deck, which has each of them, the heavier ones
    several times. Another deck comes under it when nothing in it may come now. So a run that is long enough has all.
    """
    if unknown := set(kinds) - KINDS.keys():
        raise UsageError(f"no such kind of fault: {', '.join(sorted(unknown))}; there are: {', '.join(KINDS)}")
    usable = {name: kind for name, kind in KINDS.items() if topology in kind.where and (not kinds or name in kinds)}
    if not usable:
        raise UsageError(f"none of {', '.join(sorted(kinds))} can be done to a {topology} server")
    rng = random.Random(f"{seed}/{topology}")  # noqa: S311 - a schedule needs no secrecy
    shuffler = random.Random(f"{seed}/{topology}/kinds")  # noqa: S311
    deck: list[str] = []
    busy: dict[str, list[float]] = {}  # victim -> when the faults done to such end
    planned = [
        Planned(id=number, kind=name, at_s=0.0, lasts_s=kind.lasts[0], pick=0.0, amount=0.0)
        for number, (name, kind) in enumerate(_of_the_start(usable), 1)
    ]
    now, lost_at = FIRST_AT_S, -LOSS_GAP_S / 2
    while now < seconds - TAIL_S:
        # Drawn in any case, so that a narrowed schedule keeps its times.
        draws = (rng.random(), rng.random(), rng.random())
        card = next((name for name in deck if _is_free(name, now, busy, lost_at)), None)
        if card is None:
            fresh = _deck(usable, shuffler)
            card = next((name for name in fresh if _is_free(name, now, busy, lost_at)), None)
            deck += fresh if card else []
        if card is not None:
            deck.remove(card)
            kind = usable[card]
            lasts = _between(kind.lasts, draws[0])
            busy.setdefault(kind.victim, []).append(now + lasts)
            lost_at = now if card in LOSSES else lost_at
            planned.append(
                Planned(
                    id=len(planned) + 1,
                    kind=card,
                    at_s=round(now, 3),
                    lasts_s=round(lasts, 3),
                    pick=draws[1],
                    amount=_between(kind.extra, draws[2]),
                )
            )
        now += _between(GAP_S, rng.random())
    return tuple(planned)


def _of_the_start(usable: Mapping[str, Kind]) -> list[tuple[str, Kind]]:
    return [(name, kind) for name, kind in usable.items() if kind.victim == "start"]


def _deck(usable: Mapping[str, Kind], shuffler: random.Random) -> list[str]:
    cards = [
        name
        for name, kind in usable.items()
        if kind.victim != "start"
        for _ in range(max(1, round(kind.weight / _CARD)))
    ]
    shuffler.shuffle(cards)
    return cards


def _is_free(name: str, now: float, busy: Mapping[str, list[float]], lost_at: float) -> bool:
    """Whether a fault of that kind may come now, beside those that last."""
    victim = KINDS[name].victim
    if sum(end > now for end in busy.get(victim, ())) >= _TOGETHER[victim]:
        return False
    return name not in LOSSES or now > lost_at + LOSS_GAP_S


def _between(span: tuple[float, float], share: float) -> float:
    return span[0] + (span[1] - span[0]) * share
