"""How a group is asked for, checked before anything is sent."""

from __future__ import annotations

import math
from dataclasses import dataclass

from timeslice.client.lease import OnLost
from timeslice.errors import UsageError
from timeslice.names import check_name

_LONGEST_LEASE_S = 86_400.0


@dataclass(frozen=True)
class Terms:
    """How a group is asked for. Raises UsageError for what can't be asked; seconds."""

    job: str | None = None
    priority: int = 0
    phase: str | None = None
    lock_only: bool = False
    lease: float = 30.0
    on_lost: OnLost | None = None

    def __post_init__(self) -> None:
        if self.job is not None:
            check_name("job", self.job)
        if self.phase is not None:
            check_name("phase", self.phase)
        if not -100 <= self.priority <= 100:
            raise UsageError(f"priority {self.priority} is out of range: -100 (last) to 100 (first)")
        if not 1 <= self.lease <= _LONGEST_LEASE_S:
            raise UsageError(f"a lease of {self.lease} s is out of range: 1 to {_LONGEST_LEASE_S:g} seconds")


def check_timeout(timeout: float | None) -> float | None:
    """The wait limit in seconds, or None for none. Raises UsageError."""
    if timeout is not None and not 0 <= timeout < math.inf:
        raise UsageError(f"a timeout of {timeout} s can't be kept: give 0 or more seconds, or None to wait for ever")
    return timeout
