"""What the steps of all backends share: time, and doing one thing to several processes at once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

from timeslice.backends.base import Outcome
from timeslice.errors import BackendError, FaultKind
from timeslice.models import Residency

UNDO_S = 10.0

T = TypeVar("T")


def combine(states: Iterable[Residency]) -> Residency:
    """State of a job from those of its processes that have any: a part here and a part there is no state to rely on."""
    found = set(states) - {Residency.ABSENT, Residency.GONE}
    if len(found) > 1:
        return Residency.FAULTED
    return found.pop() if found else Residency.ABSENT


async def together(steps: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run all to their end, whatever happens to one of them; then raise the gravest fault."""
    results = await asyncio.gather(*steps, return_exceptions=True)
    done = [result for result in results if not isinstance(result, BaseException)]
    if len(done) < len(results):
        raise max((r for r in results if isinstance(r, BaseException)), key=_gravity)
    return done


def _gravity(error: BaseException) -> int:
    if not isinstance(error, BackendError):
        return 2
    return 1 if error.kind is FaultKind.POISONED else 0


class Step:
    """Deadline (on the monotonic clock) and timing of one step."""

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._began = self._last = time.monotonic()
        self.until = self._began + deadline_s
        self._steps: dict[str, float] = {}

    def undo_until(self) -> float:
        """For putting things back after a failure: as long as the step itself had, and at least ``UNDO_S``."""
        return time.monotonic() + max(UNDO_S, self._deadline_s)

    def note(self, name: str) -> None:
        now = time.monotonic()
        self._steps[name], self._last = now - self._last, now

    def outcome(self, moved_bytes: int = 0, freed_bytes: int = 0, saved_bytes: int = 0) -> Outcome:
        return Outcome(
            moved_bytes=moved_bytes,
            freed_bytes=freed_bytes,
            saved_bytes=saved_bytes,
            seconds=time.monotonic() - self._began,
            steps=self._steps,
        )
