"""The verb that tells of phases: what a job does off the devices, and what it measured in a hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from timeslice.locks.keys import GroupKeys
from timeslice.locks.scripts.base import Call, make_call, text

Kind = Literal["began", "ended", "measured"]


@dataclass(frozen=True)
class Stretch:
    """A named stretch of a job's work in one process. ``id`` is made before anything is sent, and is not used again."""

    id: str
    job: str
    phase: str
    host: str
    pid: int


def phase(
    group: GroupKeys,
    stretch: Stretch,
    kind: Kind,
    *,
    seconds: float | None = None,
    nbytes: int | None = None,
    token: int | None = None,
    outcome: str = "",
    floor: int = 0,
) -> Call[bool]:
    """Tell that a stretch began or ended, or what was measured in it. A repeated call notes nothing twice.

    False: nobody declared or serves the group, and nothing was noted.
    """
    s = stretch
    amounts = ("" if value is None else value for value in (nbytes, token))
    took = "" if seconds is None else f"{seconds:.6f}"
    args = (floor, s.id, kind, s.job, s.phase, s.host, s.pid, took, *amounts, outcome)
    return make_call("phase", group, args, lambda reply: text(reply[0]) == "ok")
