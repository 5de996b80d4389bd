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
_LOOKS = 3  # how often a look that fails is taken
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
        self._overdue: list[str] = []

    @property
    def overdue(self) -> str:
        return " and ".join(self._overdue)

    async def call(
        self, what: str, operation: Callable[[float], Awaitable[T]], deadline: Deadline, *, tries: int = 1_000_000
    ) -> T:
        """Run ``operation(seconds left)``; transient and busy faults are tried again within the deadline.

        It is never cut off: when it is overdue that is marked, and waited on. Raises BackendError; anything else
        that escapes a backend becomes one of the kind poisoned.
        """
        return await self._again(what, lambda: self._watch(what, operation(deadline.left()), deadline), deadline, tries)

    async def look(self, what: str, operation: Callable[[], Awaitable[T]], deadline: Deadline) -> T:
        """Run something that changes nothing, so that it may be cut off: BackendError(transient) when it is overdue."""
        return await self._again(what, lambda: self._cut_off(what, operation(), deadline), deadline, _LOOKS)

    async def _again(self, what: str, attempt: Callable[[], Awaitable[T]], deadline: Deadline, tries: int) -> T:
        pause = _FIRST_PAUSE_S
        while True:
            tries -= 1
            try:
                return await attempt()
            except BackendError as error:
                metrics.FAULTS.labels(self._group, error.kind).inc()
                if error.kind not in _AGAIN or tries <= 0 or deadline.left() <= pause:
                    raise
                log.info("group %s: %s failed (%s), trying again: %s", self._group, what, error.kind, error)
            except Exception as error:
                log.exception("group %s: %s failed in an unexpected way", self._group, what)
                raise BackendError(
                    f"group {self._group}: {what} failed in an unexpected way: {type(error).__name__}: {error}",
                    kind=FaultKind.POISONED,
                    group=self._group,
                ) from error
            await asyncio.sleep(pause)
            pause = min(pause * 2, _LONGEST_PAUSE_S)

    async def _watch(self, what: str, operation: Awaitable[T], deadline: Deadline) -> T:
        task = asyncio.ensure_future(operation)
        await asyncio.wait({task}, timeout=deadline.left() + OVERDUE_GRACE_S)
        if task.done():
            return task.result()
        # A checkpoint that is cut off in the middle loses the process: mark it and wait on.
        self._overdue.append(what)
        metrics.OVERDUE.labels(self._group).set(1)
        log.error("group %s: %s is past its deadline; it is left to end by itself", self._group, what)
        try:
            return await task
        finally:
            self._overdue.remove(what)
            metrics.OVERDUE.labels(self._group).set(bool(self._overdue))

    async def _cut_off(self, what: str, operation: Awaitable[T], deadline: Deadline) -> T:
        limit = asyncio.timeout(deadline.left() + OVERDUE_GRACE_S)
        try:
            async with limit:
                return await operation
        except TimeoutError:
            if not limit.expired():
                raise
            raise BackendError(
                f"group {self._group}: {what} was not done within its deadline; see what hangs",
                kind=FaultKind.TRANSIENT,
                group=self._group,
            ) from None
