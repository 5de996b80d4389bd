"""What is measured in a growth run, and when a series of measurements counts as levelled off. Pure but for /proc."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from pydantic import BaseModel

Sample = Mapping[str, float]
# Streams are trimmed by whole nodes of about a hundred entries; below the cap they may still fill up.
CAPS = {"events": 2000 + 200, "inbox": 64 + 200, "commands": 1000 + 200}
_SLACK = {"": (5.0, 0.02), "B on disk": (2048.0, 0.02), "B": (1.5 * (1 << 20), 0.02)}  # absolute, and of the value


class Series(BaseModel):
    """One number over the run. ``early`` and ``late`` are the means of its second and its last quarter; ``level``
    says that it rose by no more than ``allowed`` between them, or never passed its cap."""

    name: str
    unit: str
    first: float
    early: float
    late: float
    most: float
    allowed: float
    level: bool


def judge(name: str, values: Sequence[float]) -> Series:
    """Whether a series levelled off. A name ends in its unit, ``(B)`` say; without one it is a count."""
    unit = name.rpartition(" (")[2].rstrip(")") if name.endswith(")") else ""
    quarter = max(len(values) // 4, 1)
    early, late = _mean(values[quarter : 2 * quarter] or values), _mean(values[-quarter:])
    slack, share = _SLACK[unit]
    allowed = slack + share * early
    cap = CAPS.get(name.rpartition(":")[2], 0)
    level = late - early <= allowed or max(values) <= cap
    return Series(
        name=name, unit=unit, first=values[0], early=early, late=late, most=max(values), allowed=allowed, level=level
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def judge_all(samples: Sequence[Sample]) -> tuple[Series, ...]:
    """Every series of a run; what was not there yet, or is not there any more, counts as 0."""
    names = sorted({name for sample in samples for name in sample})
    return tuple(judge(name, [sample.get(name, 0) for sample in samples]) for name in names)


def of_process(label: str, pid: int) -> dict[str, float]:
    """Resident memory, open files and threads of a process."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line)
    return {
        f"{label}: memory (B)": float(fields["VmRSS"].split()[0]) * 1024,
        f"{label}: threads": float(fields["Threads"]),
        f"{label}: open files": float(len(os.listdir(f"/proc/{pid}/fd"))),  # noqa: PTH208 - how many is all we want
    }


def of_folder(label: str, folder: Path) -> dict[str, float]:
    """How many files there are below a folder, and what they take."""
    sizes = list(_sizes(folder.rglob("*")))
    return {f"{label}: files": float(len(sizes)), f"{label}: size (B on disk)": float(sum(sizes))}


def _sizes(paths: Iterable[Path]) -> Iterable[int]:
    for path in paths:
        try:
            found = path.lstat()
        except FileNotFoundError:
            continue  # replaced in this moment
        yield found.st_size
