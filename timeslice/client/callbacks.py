"""A workload's own functions, called so that a repeat is harmless, and what is known of its state between them."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal

from timeslice.errors import TimeSliceError, UsageError
from timeslice.models import NUMBER_MAX, Residency

Mode = Literal["offload", "discard"]
OnSuspend = Callable[..., Any]  # (mode, tags), and slot where slots were registered
OnRestore = Callable[..., Any]  # (tags), and slot where slots were registered
ProbeNow = Callable[[], Any]

_PAUSE_S = 0.5


class Busy(TimeSliceError):
    """Raised by a callback that has work in flight: it is asked again a moment later."""

    def __init__(self, message: str = "work is in flight", **where: Any) -> None:
        super().__init__(message, **where)


@dataclass(frozen=True, kw_only=True)
class Moved:
    """What a callback did: the bytes that it moved, and those that it did not, since host memory had a valid copy."""

    bytes: int = 0
    saved: int = 0


@dataclass(frozen=True)
class Seen:
    """How things stand. ``parts`` has the bytes on the device by tag, where that is known."""

    state: Residency
    device_bytes: int = 0
    host_bytes: int = 0
    parts: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Callbacks:
    """What a workload registers: its functions, and what they can be asked for."""

    on_suspend: OnSuspend
    on_restore: OnRestore
    probe: ProbeNow | None = None
    modes: tuple[Mode, ...] = ("offload",)
    tags: tuple[str, ...] = ()
    slots: tuple[str, ...] = ()


class State:
    """A workload's state as far as its callbacks tell. Used by one thread at a time, except for ``close``.

    Its parts are pairs of a tag and a slot; with no tags or slots, the empty name stands for all there is.
    """

    def __init__(self, callbacks: Callbacks, *, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self._callbacks = callbacks
        self._all = frozenset((tag, slot) for tag in callbacks.tags or ("",) for slot in callbacks.slots or ("",))
        self._out: frozenset[tuple[str, str]] = frozenset()  # parts that are off the device
        self._on_device = self._saved = 0  # bytes, of workloads that can't be looked at
        self._closed = threading.Event()
        self._loop = loop
        functions = (callbacks.on_suspend, callbacks.on_restore, callbacks.probe)
        if loop is None and any(map(inspect.iscoroutinefunction, functions)):
            try:
                self._loop = asyncio.get_running_loop()
            except RuntimeError:
                raise UsageError(
                    "a coroutine function as callback needs an event loop: register inside of one, or give loop=..."
                ) from None

    @property
    def is_out(self) -> bool:
        """Whether a part of it is off the device, as far as it was moved from here."""
        return bool(self._out)

    def look(self) -> Seen:
        if self._callbacks.probe:
            state, device_bytes, host_bytes, *parts = self._call(self._callbacks.probe)
            by_tag = {str(tag): int(size) for tag, size in parts[0].items()} if parts else {}
            return Seen(Residency(state), int(device_bytes), int(host_bytes), by_tag)
        # A part that is out is enough: it can't run.
        return Seen(Residency.SUSPENDED if self._out else Residency.RESIDENT, self._on_device, self._saved)

    def suspend(self, mode: Mode, tags: tuple[str, ...], slot: str = "") -> Moved:
        """Nothing is done, or moved, when all of it is out already."""
        if mode not in self._callbacks.modes:
            raise UsageError(f"mode {mode} was not registered; registered: {', '.join(self._callbacks.modes)}")
        asked = self._asked(tags, slot)
        if asked <= self._out:
            return Moved()
        moved = _moved(self._call(self._callbacks.on_suspend, mode, tags, *self._slot(slot)))
        self._out |= asked
        self._on_device = max(0, self._on_device - moved.bytes - moved.saved)
        if mode == "offload":
            self._saved += moved.bytes + moved.saved
        return moved

    def restore(self, tags: tuple[str, ...], slot: str = "") -> Moved:
        """Nothing is done, or moved, when all of it is back already."""
        asked = self._asked(tags, slot)
        if not asked & self._out:
            return Moved()
        moved = _moved(self._call(self._callbacks.on_restore, tags, *self._slot(slot)))
        self._out -= asked
        back = moved.bytes + moved.saved
        if not self._out:
            back = back or self._saved
            self._saved = 0
        self._on_device += back
        self._saved = max(0, self._saved - back)
        return moved

    def close(self) -> None:
        """Wait no longer for a coroutine."""
        self._closed.set()

    def _slot(self, slot: str) -> tuple[str, ...]:
        """The argument that callbacks have who registered slots."""
        return (slot,) if self._callbacks.slots else ()

    def _asked(self, tags: tuple[str, ...], slot: str) -> frozenset[tuple[str, str]]:
        self._known("tags", set(tags), self._callbacks.tags)
        self._known("slots", {slot} - {""}, self._callbacks.slots)
        if self._callbacks.probe:  # the job may have moved its state by itself
            suspended = self.look().state is Residency.SUSPENDED
            self._out = (self._out or self._all) if suspended else frozenset()
        return frozenset(part for part in self._all if (not tags or part[0] in tags) and slot in ("", part[1]))

    def _known(self, what: str, asked: Iterable[str], registered: tuple[str, ...]) -> None:
        if unknown := sorted(set(asked) - set(registered)):
            able = ", ".join(registered) or "none"
            raise UsageError(f"{what} {', '.join(unknown)} were not registered; registered: {able}")

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


def _moved(result: Any) -> Moved:
    """What a callback returned. It has done its work by then, so what is no number counts as none."""
    if isinstance(result, Moved):
        return Moved(bytes=_count(result.bytes), saved=_count(result.saved))
    return Moved(bytes=_count(result))


def _count(number: Any) -> int:
    try:
        return min(max(0, int(number)), NUMBER_MAX)
    except (TypeError, ValueError, OverflowError):
        return 0
