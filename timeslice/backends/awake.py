"""Processes that their user stopped, and calls that need their threads.

What such a process does meanwhile reaches no device of others: it can compute up to its lock, when the device is still
its own, and after its unlock, when it is its own again; in between the driver keeps its calls waiting.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from timeslice.arena.errors import EmulatedDeviceError, TargetGoneError
from timeslice.arena.process import HeldProcess
from timeslice.arena.process import Target as HeldTarget
from timeslice.backends.toolrun import ToolOverdueError
from timeslice.models import Target

STOP_S = 2.0
HEAR_S = 0.5  # for an answer that needs no thread of the process

T = TypeVar("T")


async def heard(asking: Coroutine[Any, Any, T], target: Target) -> T:
    """An answer about a process, which is let run for it only if none comes while it is stopped."""
    task = asyncio.ensure_future(asking)
    try:
        await asyncio.wait({task}, timeout=HEAR_S)
        if task.done():
            return task.result()
        with awake(target):
            return await task
    finally:
        task.cancel()  # of no effect on one that is done


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
