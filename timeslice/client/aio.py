"""The client for asyncio. Leases are renewed by the same thread as those of the sync client, never by the loop."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, Never, Self, Unpack, overload

from timeslice.client.core import BaseClient
from timeslice.client.gang import find_gang
from timeslice.client.hold import Hold
from timeslice.client.lease import AsyncLease
from timeslice.client.steps import run_async
from timeslice.client.terms import HoldOptions, OnLost, Terms, check_timeout, find_leave
from timeslice.errors import UsageError
from timeslice.locks.drivers import AsyncDriver
from timeslice.locks.scripts import Call, Yielded
from timeslice.locks.view import GroupView
from timeslice.models import Mode


@contextlib.contextmanager
def told_if_late() -> Iterator[None]:
    """Say what is the matter when asyncio can't look up a name: it does that on threads, and those start no more."""
    try:
        yield
    except RuntimeError as error:
        if threading.main_thread().is_alive():
            raise
        raise UsageError(
            "the main thread has ended, and Python then lets no event loop look up names. Hold with `with` in this "
            "thread, name the server by its IP address, or let the main thread wait for it."
        ) from error


class AsyncClient(BaseClient[AsyncLease, AsyncDriver]):
    """As ``Client``, for one event loop."""

    _lease_type = AsyncLease
    _driver_type = AsyncDriver

    async def acquire(
        self,
        group: str,
        *,
        timeout: float | None = None,
        priority: int = 0,
        phase: str | None = None,
        lock_only: bool = False,
        lease: float = 30.0,
        job: str | None = None,
        on_lost: OnLost | None = None,
        gang: bool | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        mode: Mode | None = None,
        tags: Sequence[str] = (),
        slot: str = "",
    ) -> AsyncLease:
        """As ``Client.acquire``. A cancelled wait leaves the queue before CancelledError goes on."""
        terms = Terms(
            *(job, priority, phase, lock_only, lease, on_lost),
            find_gang(gang, rank, world_size),
            find_leave(mode, tags, slot),
        )
        with told_if_late():
            return await run_async(self._acquire(group, terms, check_timeout(timeout)))

    async def yield_(self, lease: AsyncLease) -> Yielded | None:
        """As ``Client.yield_``."""
        return await run_async(self._yield(lease))

    @overload
    def hold(self, group: str, /, **options: Unpack[HoldOptions]) -> Hold[Never, AsyncLease]: ...
    @overload
    def hold(
        self, first: str, second: str, /, **options: Unpack[HoldOptions]
    ) -> Hold[Never, tuple[AsyncLease, AsyncLease]]: ...
    @overload
    def hold(
        self, first: str, second: str, third: str, /, **options: Unpack[HoldOptions]
    ) -> Hold[Never, tuple[AsyncLease, AsyncLease, AsyncLease]]: ...
    @overload
    def hold(self, *groups: str, **options: Unpack[HoldOptions]) -> Hold[Never, Any]: ...
    def hold(
        self,
        *groups: str,
        job: str | None = None,
        timeout: float | None = None,
        priority: int = 0,
        phase: str | None = None,
        lock_only: bool = False,
        lease: float = 30.0,
        on_lost: OnLost | None = None,
        gang: bool | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        mode: Mode | None = None,
        tags: Sequence[str] = (),
        slot: str = "",
    ) -> Hold[Never, Any]:
        """As ``timeslice.hold``, with this client: for ``async with`` and coroutine functions."""
        terms = Terms(
            *(job, priority, phase, lock_only, lease, on_lost),
            find_gang(gang, rank, world_size),
            find_leave(mode, tags, slot),
        )
        return Hold(groups, terms, timeout, client=self)

    async def status(self, group: str) -> GroupView:
        """As ``Client.status``."""
        return await self.driver.view(self.group_keys(group))

    async def close(self) -> None:
        """As ``Client.close``."""
        await run_async(self._close())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _pipe(self, commands: Sequence[tuple[str, ...]], deadline_s: float) -> Any:
        return await self.driver.pipe(commands, deadline_s=deadline_s)

    def _taker(self) -> object:
        return asyncio.current_task()

    def _pause(self, seconds: float) -> Any:
        return asyncio.sleep(seconds)

    async def _finish(self, call: Call[Any], deadline_s: float) -> Any:
        # Interrupted here, the call is repeated by the renewal thread; every call may be.
        async with asyncio.timeout(deadline_s + 1):
            return await self.driver.run(call, deadline_s=deadline_s)
