"""How a group is asked for, checked before anything is sent."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict, get_args

from timeslice.client.gang import Gang
from timeslice.client.lease import AsyncLease, Lease
from timeslice.errors import UsageError
from timeslice.models import Leave, Mode
from timeslice.names import check_name

_LONGEST_LEASE_S = 86_400.0
_TAGS_MOST = 64
_NOTHING = Leave()

# Called once with the lease that is lost, on a thread of its own.
OnLost = Callable[[Lease], object] | Callable[[AsyncLease], object]


class HoldOptions(TypedDict, total=False):
    """What can be said of a hold beside its groups; see ``timeslice.hold``."""

    job: str | None
    timeout: float | None
    priority: int
    phase: str | None
    lock_only: bool
    lease: float
    on_lost: OnLost | None
    gang: bool | None
    rank: int | None
    world_size: int | None
    mode: Mode | None
    tags: Sequence[str]
    slot: str


@dataclass(frozen=True)
class Terms:
    """How a group is asked for. Raises UsageError for what can't be asked; seconds."""

    job: str | None = None
    priority: int = 0
    phase: str | None = None
    lock_only: bool = False
    lease: float = 30.0
    on_lost: OnLost | None = None
    gang: Gang | None = None  # None: this process holds alone
    leave: Leave = _NOTHING

    def __post_init__(self) -> None:
        if self.job is not None:
            check_name("job", self.job)
        if self.phase is not None:
            check_name("phase", self.phase)
        if not _is(numbers.Integral, self.priority) or not -100 <= self.priority <= 100:
            raise UsageError(f"priority {self.priority!r} is no whole number from -100 (last) to 100 (first)")
        if not _is(numbers.Real, self.lease) or not 1 <= self.lease <= _LONGEST_LEASE_S:
            raise UsageError(f"a lease of {self.lease!r} s can't be had: give 1 to {_LONGEST_LEASE_S:g} seconds")
        if not isinstance(self.lock_only, bool):
            raise UsageError(f"lock_only={self.lock_only!r}: give True or False")
        if self.lock_only and self.leave != _NOTHING:
            raise UsageError("a plain lock has no device state that could leave: give no mode, tags or slot with it")
        if self.on_lost is not None and not callable(self.on_lost):
            raise UsageError(f"on_lost={self.on_lost!r} can't be called: give a function that takes the lease")


def find_leave(mode: Mode | None, tags: Sequence[str], slot: str) -> Leave:
    """What of a job's state is to leave, as a hold says it. Raises UsageError and InvalidNameError."""
    if mode not in {None, *get_args(Mode)}:
        raise UsageError(f"mode={mode!r}: give 'offload' (kept in host memory) or 'discard' (dropped)")
    if isinstance(tags, str) or len(tags) > _TAGS_MOST:
        raise UsageError(f"tags={tags!r}: give a list of at most {_TAGS_MOST} names")
    for tag in tags:
        check_name("tag", tag)
    if slot:
        check_name("slot", slot)
    return Leave(mode=mode or "", tags=tuple(dict.fromkeys(tags)), slot=slot)


def check_timeout(timeout: float | None) -> float | None:
    """The wait limit in seconds, or None for none. Raises UsageError."""
    if timeout is not None and not (_is(numbers.Real, timeout) and 0 <= timeout < math.inf):
        raise UsageError(f"a timeout of {timeout!r} s can't be kept: give 0 or more seconds, or None to wait for ever")
    return timeout


def _is(kind: type, value: Any) -> bool:
    """Whether it is such a number, numpy's included; True and False are none."""
    return isinstance(value, kind) and not isinstance(value, bool)
