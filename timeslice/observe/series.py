"""What a series of samples tells of a loop. Pure: no clock, no I/O.

1. Each sample is busy or idle. The border is the value that divides them best into two classes (Otsu's method: the
   greatest variance between the classes); where the classes are closer than ``CONTRAST``, all samples are alike. If
   what is below falls into two classes itself, further apart than noise, the upper one of these is busy as well: a
   phase that uses a third of a device uses it.
2. A stretch is a run of busy samples. Pauses shorter than ``gap_s`` do not end one, for nobody could use them; after
   that, stretches shorter than ``gap_s`` are taken for noise.
3. A turn of the loop has one to four stretches: the smallest number after which starts and lengths repeat, two thirds
   of them to within a quarter (of two stretches: an eighth, and so on). The period is the median time from a stretch to
   its repetition. Where nothing repeats, it is that from one stretch to the next, and the loop is irregular.
4. The first and last stretch may be cut off, so their lengths count only if there is no other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

CONTRAST = 0.1  # of full activity; less between busy and idle is noise
FAINT = 0.2  # so far apart are two classes below that
NEAR = 0.25  # a time that differs from the median by this share of it is still regular
MOST = 2 / 3
PHASES = 4  # stretches of one turn that are looked for
GAP_S = 1.0


@dataclass(frozen=True, kw_only=True)
class Sample:
    """``at_s`` since the start; ``activity`` from 0 to 1 over the time since the sample before."""

    at_s: float
    activity: float
    device_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Stretch:
    start_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True, kw_only=True)
class Loop:
    """``period_s`` None: fewer than two turns were seen. ``turn`` has the typical length of each stretch of a turn,
    ``active_s`` that of all stretches. ``ignored`` stretches were taken for noise, typically of ``ignored_s``."""

    seconds: float
    stretches: tuple[Stretch, ...]
    idle_share: float
    active_s: float
    turn: tuple[float, ...]
    period_s: float | None
    regular: bool
    most_bytes: int
    least_bytes: int  # while it was idle
    ignored: int
    ignored_s: float


def analyse(samples: Sequence[Sample], *, gap_s: float = GAP_S) -> Loop:
    """At least two samples, in order. The first one only says when it began."""
    border = _border([each.activity for each in samples[1:]])
    found = _stretches(samples, border, gap_s)
    stretches = [each for each in found if each.seconds >= gap_s] if len(found) > 1 else found
    ignored = [each.seconds for each in found if each not in stretches]
    seconds = samples[-1].at_s - samples[0].at_s
    busy_s = sum(each.seconds for each in stretches)
    whole = stretches[1:-1] or stretches
    seen = stretches[1:] if stretches and stretches[0].start_s <= samples[0].at_s else stretches  # seen to begin
    phases = next((count for count in range(1, PHASES + 1) if _repeats(seen, count, gap_s)), 0)
    steps = [b.start_s - a.start_s for a, b in zip(seen, seen[phases or 1 :], strict=False)]
    turn = [[each.seconds for each in seen[first:-1:phases]] for first in range(phases)]
    idle = [s.device_bytes for s in samples[1:] if not any(each.start_s < s.at_s <= each.end_s for each in stretches)]
    return Loop(
        seconds=seconds,
        stretches=tuple(stretches),
        idle_share=1 - busy_s / seconds if seconds else 0.0,
        active_s=median(each.seconds for each in whole) if whole else 0.0,
        turn=tuple(median(lengths) for lengths in turn),
        period_s=median(steps) if len(steps) > 1 else None,
        regular=bool(phases),
        most_bytes=max(each.device_bytes for each in samples),
        least_bytes=min(idle) if idle else min(each.device_bytes for each in samples),
        ignored=len(ignored),
        ignored_s=median(ignored) if ignored else 0.0,
    )


def _repeats(stretches: Sequence[Stretch], count: int, gap_s: float) -> bool:
    """Whether starts and lengths come again after so many stretches. The last one may be cut off."""
    pairs = list(zip(stretches, stretches[count:], strict=False))
    if len(pairs) <= count:  # less than two turns
        return False
    steps = [after.start_s - before.start_s for before, after in pairs]
    near = sum(abs(step - median(steps)) <= NEAR / count * median(steps) for step in steps)
    lengths = [(before.seconds, after.seconds) for before, after in pairs if after is not stretches[-1]]
    alike = sum(abs(a - b) <= max(NEAR * max(a, b), gap_s) for a, b in lengths)
    return near >= MOST * len(pairs) and alike >= MOST * len(lengths)


def _border(values: Sequence[float]) -> float:
    """Above it a sample is busy."""
    border = found = _split(values, CONTRAST)
    while found is not None:
        border, found = found, _split([value for value in values if value <= found], FAINT)
    return CONTRAST / 2 if border is None else border


def _split(values: Sequence[float], contrast: float) -> float | None:
    """What divides them best into two classes; None if these are no further apart."""
    ordered, total = sorted(values), sum(values)
    best, border, below = -1.0, None, 0.0
    for count, value in enumerate(ordered[:-1], 1):
        below += value
        low, high = below / count, (total - below) / (len(ordered) - count)
        between = count * (len(ordered) - count) * (high - low) ** 2
        if between > best and ordered[count] > value:
            best, border = between, (value + ordered[count]) / 2 if high - low >= contrast else None
    return border


def _stretches(samples: Sequence[Sample], border: float, gap_s: float) -> list[Stretch]:
    found: list[Stretch] = []
    for before, sample in pairwise(samples):
        if sample.activity <= border:
            continue
        if found and before.at_s - found[-1].end_s < gap_s:
            found[-1] = Stretch(start_s=found[-1].start_s, end_s=sample.at_s)
        else:
            found.append(Stretch(start_s=before.at_s, end_s=sample.at_s))
    return found
