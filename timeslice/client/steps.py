"""One logic for both clients: a generator yields what may have to be awaited, and these two run it.

In the sync client a yielded value is there already, in the asyncio one it is an awaitable; either way the generator
is sent the result, or gets the exception where it stands.
"""

from __future__ import annotations

import inspect
from collections.abc import Generator
from typing import Any, TypeVar

T = TypeVar("T")
Steps = Generator[Any, Any, T]


def run(steps: Steps[T]) -> T:
    """Run the generator of a sync client, to its end: an interrupt between two steps is thrown into it, so that it
    cleans up. Let go where it stands it would be closed, and could send nothing any more."""
    interrupt: BaseException | None = None
    value: Any = None
    try:
        while True:
            try:
                value = steps.throw(interrupt) if interrupt else steps.send(value)
                interrupt = None
            except StopIteration as stop:
                result: T = stop.value
                return result
            except BaseException as error:
                if steps.gi_frame is None:  # type: ignore[attr-defined]
                    raise  # it came out of the generator
                interrupt, value = error, None
    finally:
        # Interrupted just while an interrupt was dealt with.
        if steps.gi_frame is not None:  # type: ignore[attr-defined]
            _close(steps)


async def run_async(steps: Steps[T]) -> T:
    """Run the generator of an asyncio client."""
    try:
        waiting = next(steps)
        while True:
            try:
                value = await waiting
            except GeneratorExit:
                _close(steps)  # nobody resumes us any more
                raise
            except BaseException as error:  # CancelledError must reach the generator too
                waiting = steps.throw(error)
            else:
                waiting = steps.send(value)
    except StopIteration as stop:
        result: T = stop.value
        return result


class _Abandoned(BaseException):
    """What the generator hears then. GeneratorExit would not reach the generators that it delegates to."""


def _close(steps: Steps[Any]) -> None:
    """End a generator whose steps nobody takes any more: whatever else it would wait for, it hears the same again, and
    leaves to the renewal thread what is still to be sent."""
    try:
        while not _has_ended(steps):
            step = steps.throw(_Abandoned())
            if inspect.iscoroutine(step):
                step.close()
    except (_Abandoned, StopIteration):
        pass


def _has_ended(steps: Any) -> bool:
    return steps.gi_frame is None
