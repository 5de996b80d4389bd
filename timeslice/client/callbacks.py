"""A workload's own functions, called so that a repeat is harmless, and what is known of its state between them."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Literal

from timeslice.errors import TimeSliceError, UsageError
from timeslice.models import Residency

Mode = Literal["offload", "discard"]
OnSuspend = Callable[[Mode, tuple[str, ...]], Any]
OnRestore = Callable[[tuple[str, ...]], Any]
ProbeNow = Callable[[], Any]

_PAUSE_S = 0.5


class Busy(TimeSliceError):
    """Raised by a callback that has work in flight: it is asked again a moment later."""

    def __init__(self, message: str = "work is in flight", **where: Any) -> None:
        super().__init__(message, **where)


class Callbacks:
    """Used by one thread at a time, except for ``close``."""

    def __init__(
        self,
        on_suspend: OnSuspend,
        on_restore: OnRestore,
        probe: ProbeNow | None,
        *,
        loop: asyncio.AbstractEventLoop | None,
        modes: tuple[Mode, ...],
        tags: tuple[str, ...],
    ) -> None:
        self.modes, self.tags = modes, tags
        self._on_suspend, self._on_restore, self._probe = on_suspend, on_restore, probe
        self._all = frozenset(tags) or frozenset({""})
        self._out: frozenset[str] = frozenset()  # tags that are off the device
        self._bytes = 0
        self._closed = threading.Event()
        self._loop = loop
        if loop is None and any(map(inspect.iscoroutinefunction, (on_suspend, on_restore, probe))):
            try:
                self._loop = asyncio.get_running_loop()
            except RuntimeError:
                raise UsageError(
                    "a coroutine function as callback needs an event loop: register inside of one, or give loop=..."
                ) from None

    def look(self) -> tuple[Residency, int, int]:
        """State, bytes on the device, bytes in host memory."""
        if self._probe:
            state, device_bytes, host_bytes = self._call(self._probe)
            return Residency(state), int(device_bytes), int(host_bytes)
        if self._out:  # a part is enough: it can't run
            return Residency.SUSPENDED, 0, self._bytes
        return Residency.RESIDENT, self._bytes, 0

    def suspend(self, mode: Mode, tags: tuple[str, ...]) -> int:
        """Bytes moved; none when it is out already."""
        if mode not in self.modes:
            raise UsageError(f"mode {mode} was not registered; registered: {', '.join(self.modes)}")
        asked = self._asked(tags)
        if asked <= self._out:
            return 0
        moved = int(self._call(self._on_suspend, mode, tags) or 0)
        self._out |= asked
        self._bytes = moved or self._bytes
        return moved

    def restore(self, tags: tuple[str, ...]) -> int:
        """Bytes moved; none when it is back already."""
        asked = self._asked(tags)
        if not asked & self._out:
            return 0
        moved = int(self._call(self._on_restore, tags) or 0)
        self._out -= asked
        return moved

    def close(self) -> None:
        """Wait no longer for a coroutine."""
        self._closed.set()

    def _asked(self, tags: tuple[str, ...]) -> frozenset[str]:
        if self._probe and not tags:  # the job may have moved its state by itself
            self._out = self._all if self.look()[0] is Residency.SUSPENDED else frozenset()
        return frozenset(tags) or self._all

    def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        result = function(*arguments)
        if not inspect.iscoroutine(result):
            return result
        if self._loop is None:
            result.close()
            raise UsageError(f"{function!r} returned a coroutine, and no event loop was given: give loop=...")
        future: Future[Any] = asyncio.run_coroutine_threadsafe(result, self._loop)
        while not self._closed.is_set():
            try:
                return future.result(timeout=_PAUSE_S)
            except TimeoutError:
                if future.done():  # its own
                    raise
        future.cancel()
        raise Busy("the workload is being closed")
