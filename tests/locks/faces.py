"""Both drivers behind one synchronous face, each for one thread."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from typing import Any, Protocol, TypeVar

from timeslice.locks.drivers import AsyncDriver
from timeslice.locks.flows import Entries, Op, Wait
from timeslice.locks.scripts import Call
from timeslice.locks.view import GroupView

T = TypeVar("T")


class Face(Protocol):
    """A driver, called from one thread."""

    def run(self, call: Call[T], *, deadline_s: float | None = None) -> T: ...

    def wait(self, wait: Wait) -> Entries: ...

    def drive(self, flow: Generator[Op, Any, T]) -> T: ...

    def view(self, group: Any) -> GroupView: ...

    def close(self) -> None: ...


class AsyncFace:
    """AsyncDriver on a loop of its own."""

    def __init__(self, url: str) -> None:
        self.driver = AsyncDriver(url)
        self.loop = asyncio.new_event_loop()

    def run(self, call: Call[T], *, deadline_s: float | None = None) -> T:
        return self.loop.run_until_complete(self.driver.run(call, deadline_s=deadline_s))

    def wait(self, wait: Wait) -> Entries:
        return self.loop.run_until_complete(self.driver.wait(wait))

    def drive(self, flow: Generator[Op, Any, T]) -> T:
        return self.loop.run_until_complete(self.driver.drive(flow))

    def view(self, group: Any) -> GroupView:
        return self.loop.run_until_complete(self.driver.view(group))

    def close(self) -> None:
        self.loop.run_until_complete(self.driver.close())
        self.loop.close()
