"""The client for threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Never, Self, Unpack, overload

from timeslice.client.core import BaseClient
from timeslice.client.gang import find_gang
from timeslice.client.hold import Hold
from timeslice.client.lease import Lease
from timeslice.client.steps import run
from timeslice.client.terms import HoldOptions, OnLost, Terms, check_timeout, find_leave
from timeslice.locks.drivers import SyncDriver
from timeslice.locks.scripts import Call, Yielded
from timeslice.locks.view import GroupView
from timeslice.models import Mode


class Client(BaseClient[Lease, SyncDriver]):
    """Takes groups for a job. Threads may share one; after a fork, the child's starts clean.

    ``url`` defaults to ``TIMESLICE_URL`` or the server of ``timeslice up``, ``job`` to ``TIMESLICE_JOB`` or a name
    made of node and process id, ``prefix`` to ``TIMESLICE_PREFIX`` or ``ts``. ``patience``: how many seconds a
    call that is no wait, such as ``status``, asks on while the server does not answer; by default
    ``TIMESLICE_PATIENCE`` or 10. A wait for a group waits for the server, too, as long as its ``timeout`` allows, and
    says so on the log.
    """

    _lease_type = Lease
    _driver_type = SyncDriver

    def acquire(
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
    ) -> Lease:
        """Wait for ``group`` and return its lease, renewed until yielded. Seconds.

        Raises AcquireTimeoutError after ``timeout`` (0: at once), UnknownGroupError, GroupModeError, DeadlockError (it
        would wait in a circle for what this thread holds), CancelledByOperatorError, GangEndedError (another rank of
        the gang gave up or died), RefusedError (10,000 requests wait there already), RedisUnreachableError. Each call
        is a waiter of its own; ``hold`` may be nested.
        ``gang``, ``rank``, ``world_size``, ``mode``, ``tags``, ``slot``: as of ``timeslice.hold``.
        """
        terms = Terms(
            *(job, priority, phase, lock_only, lease, on_lost),
            find_gang(gang, rank, world_size),
            find_leave(mode, tags, slot),
        )
        return run(self._acquire(group, terms, check_timeout(timeout)))

    def yield_(self, lease: Lease) -> Yielded | None:
        """Give a lease up. None: it had ended, or the server does not answer; then the yield is tried on behind."""
        return run(self._yield(lease))

    @overload
    def hold(self, group: str, /, **options: Unpack[HoldOptions]) -> Hold[Lease, Never]: ...
    @overload
    def hold(self, first: str, second: str, /, **options: Unpack[HoldOptions]) -> Hold[tuple[Lease, Lease], Never]: ...
    @overload
    def hold(
        self, first: str, second: str, third: str, /, **options: Unpack[HoldOptions]
    ) -> Hold[tuple[Lease, Lease, Lease], Never]: ...
    @overload
    def hold(self, *groups: str, **options: Unpack[HoldOptions]) -> Hold[Any, Never]: ...
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
    ) -> Hold[Any, Never]:
        """As ``timeslice.hold``, with this client: for ``with`` and sync functions."""
        terms = Terms(
            *(job, priority, phase, lock_only, lease, on_lost),
            find_gang(gang, rank, world_size),
            find_leave(mode, tags, slot),
        )
        return Hold(groups, terms, timeout, client=self)

    def status(self, group: str) -> GroupView:
        """The group as one consistent picture."""
        return self.driver.view(self.group_keys(group))

    def close(self) -> None:
        """Yield what is still held and close the connections. The client opens new ones when used again."""
        run(self._close())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _pipe(self, commands: Sequence[tuple[str, ...]], deadline_s: float) -> Any:
        return self.driver.pipe(commands, deadline_s=deadline_s)

    def _taker(self) -> object:
        return threading.current_thread()

    def _pause(self, seconds: float) -> None:
        time.sleep(seconds)

    def _finish(self, call: Call[Any], deadline_s: float) -> Any:
        return self.driver.run(call, deadline_s=deadline_s)
