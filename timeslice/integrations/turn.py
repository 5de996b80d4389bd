"""The hold of a training loop whose phases begin in one method and end in another."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from timeslice.client.defaults import hold
from timeslice.client.hold import Hold
from timeslice.integrations import patience
from timeslice.integrations.torch import synchronize


class Turn:
    """What one thread of a loop holds of ``group``, which computes on ``device``."""

    def __init__(self, group: str, *, device: Any, job: str | None, timeout: float | None) -> None:
        self.group = group
        self.job = job
        self._device, self._timeout = device, timeout
        self._hold: Hold | None = None
        self._lease: Any = None
        self._phase = ""

    @property
    def held(self) -> bool:
        return self._hold is not None

    @property
    def nested(self) -> bool:
        """Whether a hold around this one keeps the group when this one is left."""
        return self.held and self._lease.holding.count > 1

    def hold(self, *groups: str, phase: str) -> Hold[Any, Any]:
        """A hold on the same terms."""
        return hold(*groups, job=self.job, timeout=self._timeout, phase=phase)

    def enter(self, phase: str) -> None:
        """Take the group. Where it is held already, only see that it still is."""
        if self._hold:
            self.ensure_held()
            return
        taken = self.hold(self.group, phase=phase)
        self._lease = taken.__enter__()
        self._hold, self._phase = taken, phase

    def leave(self) -> None:
        """Give the group up, if it is held."""
        taken, self._hold = self._hold, None
        if taken is None:
            return
        try:
            synchronize([self._device])  # what was launched is over before somebody else may begin
        finally:
            taken.leave(done=False)  # of a training loop: its weight sync is a hold of its own

    def ensure_held(self) -> None:
        """As ``patience.ensure_held``, or nothing is held."""
        if self._hold:
            patience.ensure_held(self._lease)

    @contextlib.contextmanager
    def inside(self, phase: str) -> Iterator[None]:
        """Hold the group, unless it is held: then that hold goes on."""
        outermost = not self.held
        self.enter(phase)
        try:
            yield
            self.ensure_held()
        finally:
            if outermost:
                self.leave()

    @contextlib.contextmanager
    def outside(self) -> Iterator[None]:
        """Give the group up meanwhile, if it is held. After an error it is not taken again."""
        if not self.held:
            yield
            return
        self.ensure_held()
        phase = "eval" if self._phase == "eval" else "train"
        self.leave()
        yield
        self.enter(phase)
