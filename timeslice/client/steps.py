"""One logic for both clients: a generator yields what may have to be awaited, and these two run it.

In the sync client a yielded value is there already, in the asyncio one it is an awaitable; either way the generator
is sent the result, or gets the exception where it stands.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, TypeVar

T = TypeVar("T")
Steps = Generator[Any, Any, T]


def run(steps: Steps[T]) -> T:
    """Run the generator of a sync client."""
    try:
        value = next(steps)
        while True:
            value = steps.send(value)
    except StopIteration as stop:
        result: T = stop.value
        return result


async def run_async(steps: Steps[T]) -> T:
    """Run the generator of an asyncio client."""
    try:
        waiting = next(steps)
        while True:
            try:
                value = await waiting
            except BaseException as error:  # CancelledError must reach the generator too
                waiting = steps.throw(error)
            else:
                waiting = steps.send(value)
    except StopIteration as stop:
        result: T = stop.value
        return result
