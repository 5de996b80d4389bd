"""Calls of backends: with a deadline, with retries where that can help, and never cut off in the middle."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from timeslice import metrics
from timeslice.errors import BackendError, FaultKind

log = logging.getLogger("timeslice.agent")

T = TypeVar("T")

OVERDUE_GRACE_S = 1.0  # a backend may need a moment to notice its own deadline
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0
_AGAIN = (FaultKind.TRANSIENT, FaultKind.BUSY)


class Deadline:
    """A point on the monotonic clock, ``seconds`` from now."""

    def __init__(self, seconds: float) -> None:
        self._until = time.monotonic() + seconds

    def left(self) -> float:
        return max(self._until - time.monotonic(), 0.0)

    def within(self, seconds: float) -> Deadline:
        """This deadline, or ``seconds`` from now if that is earlier."""
        return Deadline(min(self.left(), seconds))


class Caller:
    """Calls the backends of one group. ``overdue`` says what is past its deadline now, '' if nothing."""

    def __init__(self, group: str) -> None:
        self._group = group
        self.overdue = ""

    async def call(
        self, what: str, operation: Callable[[float], Awaitable[T]], deadline: Deadline, *, tries: int = 1_000_000
    ) -> T:
        """Run ``operation(seconds left)``; transient and busy faults are tried again within the deadline.

        Raises BackendError; anything else that escapes a backend becomes one of the kind poisoned.
        """
        pause = _FIRST_PAUSE_S
        while True:
            tries -= 1
            try:
                return await self._watch(what, operation(deadline.left()), deadline)
            except BackendError as error:
                metrics.FAULTS.labels(self._group, error.kind).inc()
                if error.kind not in _AGAIN or tries <= 0 or deadline.left() <= pause:
                    raise
                log.info("group %s: %s failed (%s), trying again: %s", self._group, what, error.kind, error)
            await asyncio.sleep(pause)
            pause = min(pause * 2, _LONGEST_PAUSE_S)

    async def _watch(self, what: str, operation: Awaitable[T], deadline: Deadline) -> T:
        task = asyncio.ensure_future(operation)
        try:
            await asyncio.wait({task}, timeout=deadline.left() + OVERDUE_GRACE_S)
            if not task.done():
                # A checkpoint that is cut off in the middle loses the process: mark it and wait on.
                self.overdue = what
                metrics.OVERDUE.labels(self._group).set(1)
                log.error("group %s: %s is past its deadline; it is left to end by itself", self._group, what)
            return await task
        except (BackendError, asyncio.CancelledError):
            raise
        except Exception as error:
            log.exception("group %s: %s failed in an unexpected way", self._group, what)
            raise BackendError(
                f"group {self._group}: {what} failed in an unexpected way: {type(error).__name__}: {error}",
                kind=FaultKind.POISONED,
                group=self._group,
            ) from error
        finally:
            if self.overdue:
                self.overdue = ""
                metrics.OVERDUE.labels(self._group).set(0)
