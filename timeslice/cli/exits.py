"""Exit codes, the same for every command. `timeslice hold -- CMD` alone returns what CMD returned."""

from __future__ import annotations

from timeslice import errors

DONE = 0
FAILED = 1
USAGE = 2
UNKNOWN = 3
TIMED_OUT = 4
UNREACHABLE = 5
REFUSED = 6
INTERRUPTED = 130  # as a shell has it

# The first line that fits counts.
_CODES: tuple[tuple[type[errors.TimeSliceError], int], ...] = (
    (errors.UnknownGroupError, UNKNOWN),
    (errors.UnknownNodeError, UNKNOWN),
    (errors.UnknownJobError, UNKNOWN),
    (errors.GroupModeError, REFUSED),  # the command was right; the group's state forbids it
    (errors.UsageError, USAGE),
    (errors.AcquireTimeoutError, TIMED_OUT),
    (errors.RedisUnreachableError, UNREACHABLE),
    (errors.CancelledByOperatorError, REFUSED),
    (errors.DeadlockError, REFUSED),
    (errors.NotHolderError, REFUSED),
    (errors.RefusedError, REFUSED),
    (errors.StaleCommandError, REFUSED),
)


def exit_code(error: errors.TimeSliceError) -> int:
    """What the shell gets for an error."""
    return next((code for kind, code in _CODES if isinstance(error, kind)), FAILED)
