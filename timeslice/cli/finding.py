"""What ``timeslice doctor`` says of one thing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Finding:
    """One thing looked at. ``do`` is empty when all is well; ``info`` is worth knowing and needs nothing done."""

    level: Literal["ok", "info", "warning", "error"]
    check: str
    what: str
    do: str = ""
