"""Processes that their user stopped, and calls that need their threads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

from timeslice.arena.errors import EmulatedDeviceError, TargetGoneError
from timeslice.arena.process import HeldProcess
from timeslice.arena.process import Target as HeldTarget
from timeslice.backends.toolrun import ToolOverdueError
from timeslice.models import Target

STOP_S = 2.0


@contextmanager
def awake(target: Target) -> Iterator[None]:
    """A stopped process runs for as long as the body takes, and stands still again afterwards.

    Not after a call that is overdue: it goes on, and could never end without the process.
    """
    try:
        process = HeldProcess(HeldTarget(target.pid, target.start))
    except (EmulatedDeviceError, OSError):  # it is gone, or not ours to touch: the call will tell
        yield
        return
    with process:
        stopped = False
        with suppress(TargetGoneError, PermissionError):
            stopped = process.is_stopped()
            if stopped:
                process.go_on()
        try:
            yield
        except ToolOverdueError:
            stopped = False
            raise
        finally:
            if stopped:
                with suppress(EmulatedDeviceError, PermissionError):
                    process.stop(STOP_S)
