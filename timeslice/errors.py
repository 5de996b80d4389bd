"""All errors of timeslice. One root; each names the group, job or node, what happened and what to do next.

::

    TimeSliceError
    ├── UsageError                 a call or a value is wrong; nothing was touched
    │   ├── InvalidNameError       a group, job or node name breaks the naming rule
    │   ├── UnknownGroupError      no such group, though agents serve others
    │   ├── UnknownNodeError       no such node
    │   ├── UnknownJobError        no such job
    │   └── GroupModeError         lock-only asked of a served group, or the other way round
    ├── RedisUnreachableError      no answer from the server within the deadline
    ├── ServerUnsuitableError      wrong version, eviction policy, or it speaks no Redis
    ├── AcquireTimeoutError        the wait limit passed before the grant; the queue entry is withdrawn
    ├── DeadlockError              this wait closed a circle of jobs that wait for each other; it is withdrawn
    ├── CancelledByOperatorError   somebody cancelled this waiter; ask again if that was not meant
    ├── GangEndedError             another rank of the gang gave up or died, so this one waits no longer
    ├── LeaseError                 about a lease that was granted
    │   ├── LeaseLostError         the lease is over; stop using the device
    │   ├── LeaseUncertainError    the server can't be asked whether the lease still stands
    │   └── NotHolderError         a yield or renewal for a lease that somebody else holds
    ├── RefusedError               the state of the group or node forbids it now
    ├── StaleCommandError          an order older than what its receiver has already seen
    └── BackendError               a snapshot backend failed; see ``kind``
"""

from __future__ import annotations

import re
from enum import StrEnum

QUOTED_MAX = 500  # characters of what somebody else wrote


class FaultKind(StrEnum):
    """What a backend fault means for the job, and so what the agent does next."""

    TRANSIENT = "transient"  # try again within the deadline
    POISONED = "poisoned"  # the target or driver can't be trusted any more
    GONE = "gone"  # the target no longer exists: counts as out
    BUSY = "busy"  # work in flight; try again within the deadline
    NEEDS_WEIGHTS = "needs_weights"  # restored, but content was discarded and must be pushed
    UNSUPPORTED = "unsupported"  # this target can't do what was asked; never tried


def printable(text: str) -> str:
    """The text with what could steer a terminal written out. Further lines are set in, so that none looks like a line
    of its own. For logs and messages: some of what they tell was written by strangers."""
    if text.isprintable():
        return text
    shown = (each if each.isprintable() or each == "\n" else each.encode("unicode_escape").decode() for each in text)
    return re.sub(r"\n(?!  )", "\n  ", "".join(shown))


def quoted(text: str) -> str:
    """What somebody else wrote, for a message: on one line, and cut visibly after 500 characters."""
    shown = printable(text.replace("\n", " "))
    return shown if len(shown) <= QUOTED_MAX else f"{shown[:QUOTED_MAX]}... ({len(shown) - QUOTED_MAX} more characters)"


def duration(value: float) -> str:
    """A duration for people: 0.4 s, 12 s, 3 min 20 s, 2 h 5 min."""
    if value < 0:
        return "0 s"
    if value < 10:
        return f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    if not minutes:
        return f"{rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


class TimeSliceError(Exception):
    """Root of all errors that timeslice raises on purpose.

    ``group``, ``job``, ``node`` and ``token`` are set where they are known.
    """

    def __init__(
        self,
        message: str,
        *,
        group: str | None = None,
        job: str | None = None,
        node: str | None = None,
        token: int | None = None,
    ) -> None:
        super().__init__(printable(message))
        self.group = group
        self.job = job
        self.node = node
        self.token = token


class UsageError(TimeSliceError, ValueError):
    """A call or a value is wrong; nothing was touched."""


class InvalidNameError(UsageError):
    """A group, job or node name breaks the naming rule."""


class UnknownGroupError(UsageError):
    """No such group, though agents serve others."""


class UnknownNodeError(UsageError):
    """No such node."""


class UnknownJobError(UsageError):
    """No such job."""


class GroupModeError(UsageError):
    """Lock-only was asked of a served group, or a swap of a lock-only one."""


class RedisUnreachableError(TimeSliceError):
    """No answer from the server within the deadline."""


class ServerUnsuitableError(TimeSliceError):
    """The server is too old, evicts keys, or speaks no Redis."""


class AcquireTimeoutError(TimeSliceError, TimeoutError):
    """The wait limit passed before the grant; the queue entry is withdrawn."""


class DeadlockError(TimeSliceError):
    """Jobs hold groups and wait for each other's. This wait is withdrawn; what the caller holds stays held."""


class CancelledByOperatorError(TimeSliceError):
    """Somebody cancelled this waiter."""


class GangEndedError(TimeSliceError):
    """Another rank of the gang gave up or died: the wait is over for all ranks."""


class LeaseError(TimeSliceError):
    """About a lease that was granted."""


class LeaseLostError(LeaseError):
    """The lease is over; the device may belong to another job."""


class LeaseUncertainError(LeaseError):
    """The server can't be asked whether the lease still stands."""


class NotHolderError(LeaseError):
    """A yield or renewal for a lease that this caller does not hold."""


class RefusedError(TimeSliceError):
    """The state of the group, job or node forbids it now."""


class StaleCommandError(TimeSliceError):
    """An order that is older than what its receiver has already seen."""


class BackendError(TimeSliceError):
    """A snapshot backend failed; ``kind`` says what that means for the job."""

    def __init__(
        self,
        message: str,
        *,
        kind: FaultKind,
        group: str | None = None,
        job: str | None = None,
        node: str | None = None,
    ) -> None:
        super().__init__(message, group=group, job=job, node=node)
        self.kind = kind
