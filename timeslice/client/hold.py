"""``hold``: a group, or several, around a block of code or a function."""

from __future__ import annotations

import copy
import functools
import inspect
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self, TypeVar, cast

from timeslice.client.context import Holding, current, put, release, settle
from timeslice.client.core import BaseClient
from timeslice.client.lease import BaseLease
from timeslice.client.steps import Steps, run, run_async
from timeslice.client.terms import Terms, check_timeout
from timeslice.errors import UsageError
from timeslice.locks.cycles import place
from timeslice.locks.scripts import number, text
from timeslice.names import check_name

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(eq=False)
class _Entered:
    """One `with` or call: what it holds, in the order taken."""

    holdings: list[Holding] = field(default_factory=list)
    joined: list[Holding] = field(default_factory=list)  # those of a hold around this one

    def is_current(self) -> bool:
        return all(current(holding.key) is holding for holding in self.holdings)

    def settle(self) -> None:
        """Leave them all, however far the leaving came before it was interrupted."""
        for holding in reversed(self.holdings):
            settle(holding, self)


class Hold:
    """Use it as ``with``, ``async with`` or decorator; as often as you like, nested or from several threads.

    ``as`` gives the lease, and for several groups a tuple of leases in the order they were named.
    """

    def __init__(
        self,
        groups: Sequence[str],
        terms: Terms,
        timeout: float | None,
        *,
        client: BaseClient[Any, Any] | None = None,
        url: str | None = None,
    ) -> None:
        if not groups:
            raise UsageError('hold needs the name of a group, as in timeslice.hold("trainers")')
        for group in groups:
            check_name("group", group)
        if len(set(groups)) < len(groups):
            raise UsageError(f"hold names a group twice: {', '.join(groups)}")
        self._groups = tuple(groups)
        self._terms = terms
        self._timeout = check_timeout(timeout)
        self._client = client
        self._url = url
        self._entered: list[_Entered] = []

    # both faces

    def _enter(self, client: BaseClient[Any, Any]) -> Steps[Any]:
        groups = self._groups
        until = None if self._timeout is None else time.monotonic() + self._timeout
        if len(groups) > 1 and not client.disabled:
            groups = in_order(groups, (yield client.orders(groups, math.inf if until is None else until)))
        entered = _Entered()
        try:
            for group in groups:
                left = None if until is None else max(until - time.monotonic(), 0.0)
                if not self._join(client, group, entered):
                    yield from self._take(client, group, left, entered)
            leases = {holding.lease.group: holding.lease for holding in entered.holdings}
            result = leases[groups[0]] if len(groups) == 1 else tuple([leases[group] for group in self._groups])
            self._entered.append(entered)
        except BaseException:
            yield from self._release(entered)
            raise
        return result

    def _join(self, client: BaseClient[Any, Any], group: str, entered: _Entered) -> bool:
        held = current((client.url, client.keys.prefix, group))
        if held is None:
            return False
        # Before it is joined: an interrupt just after that leaves it again.
        entered.holdings.append(held)
        entered.joined.append(held)
        if held.join(self._terms.job or client.job, self._terms.gang, entered):
            return True
        del entered.holdings[-1], entered.joined[-1]
        return False

    def _take(self, client: BaseClient[Any, Any], group: str, timeout: float | None, entered: _Entered) -> Steps[None]:
        lease: BaseLease | None = None
        try:
            lease = yield from client._acquire(group, self._terms, timeout, limit=self._timeout)  # noqa: SLF001
            held = Holding(client, (client.url, client.keys.prefix, group), lease, entered)
            put(held)
            entered.holdings.append(held)
        except BaseException:
            if lease:
                client.abandon(lease)
            raise

    def leave(self, *, done: bool) -> None:
        """As the end of a ``with``, for who enters and leaves by calls. ``done``: no error ended the work."""
        self.__exit__(None if done else BaseException, None, None)

    def _leaving(self) -> _Entered:
        # Frameworks enter in one callback and leave in another, whose context may differ: then the last entry is ours.
        return next((each for each in reversed(self._entered) if each.is_current()), self._entered[-1])

    def _leave(self, entered: _Entered, *, done: bool) -> Steps[None]:
        for holding in entered.holdings:
            # What a nested hold did is for the one around it to judge, unless that is over.
            holding.lease.done = done and (holding.lease.done or holding not in entered.joined)
        yield from self._release(entered)

    def _release(self, entered: _Entered) -> Steps[None]:
        """Leave each holding, last taken first; an interrupt in between doesn't keep the others."""
        interrupt: BaseException | None = None
        for holding in reversed(entered.holdings):
            try:
                yield from release(holding, entered)
            except BaseException as error:
                interrupt = interrupt or error
                settle(holding, entered)
        if entered in self._entered:
            self._entered.remove(entered)
        if interrupt:
            raise interrupt

    def __del__(self) -> None:
        # An interrupt may come after the body and before the first line of our exit. Nobody can leave any more.
        if not sys.is_finalizing():
            for entered in getattr(self, "_entered", ()):
                entered.settle()

    def _once(self) -> Self:
        """For one call of a decorated function."""
        once = copy.copy(self)
        once._entered = []  # noqa: SLF001 - our own
        return once

    # with

    def __enter__(self) -> Any:
        from timeslice.client.defaults import default_client
        from timeslice.client.sync import Client

        client = self._client or default_client(self._url)
        if not isinstance(client, Client):
            raise UsageError("this hold belongs to an AsyncClient: use `async with`, or decorate a coroutine function")
        return run(self._enter(client))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        entered: _Entered | None = None
        try:
            entered = self._leaving()
            run(self._leave(entered, done=kind is None))
        except BaseException:
            (entered or self._leaving()).settle()
            raise

    # async with

    async def __aenter__(self) -> Any:
        from timeslice.client.aio import AsyncClient
        from timeslice.client.defaults import default_async_client

        client = self._client or await default_async_client(self._url)
        if not isinstance(client, AsyncClient):
            raise UsageError("this hold belongs to a Client: use `with`, or take AsyncClient for async code")
        return await run_async(self._enter(client))

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is GeneratorExit:  # nobody resumes this coroutine any more, so that it can't wait for an answer
            self._leaving().settle()
            return
        entered: _Entered | None = None
        try:
            entered = self._leaving()
            await run_async(self._leave(entered, done=kind is None))
        except BaseException:
            (entered or self._leaving()).settle()
            raise

    # decorator

    def __call__(self, function: F) -> F:
        """Hold around each call of ``function``; for a coroutine function, around the whole await."""
        if inspect.isclass(function) or not callable(function):
            raise UsageError(
                f"{function!r} is no function: a hold decorates functions and methods. Decorate the method that "
                "computes."
            )
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise UsageError(
                f"{function.__qualname__} is a generator: its body runs between the calls of whoever iterates, so a "
                "decorator can't say when the group is needed. Put `with timeslice.hold(...)` inside it."
            )
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def held_await(*args: Any, **kwargs: Any) -> Any:
                async with self._once():
                    return await function(*args, **kwargs)

            return cast("F", held_await)

        @functools.wraps(function)
        def held_call(*args: Any, **kwargs: Any) -> Any:
            with self._once():
                result = function(*args, **kwargs)
            if inspect.iscoroutine(result):
                result.close()
                raise UsageError(
                    f"{function!r} returned a coroutine, which would run without the hold. Decorate the `async def`."
                )
            return result

        return cast("F", held_call)


def in_order(groups: Sequence[str], configured: Sequence[Any]) -> tuple[str, ...]:
    """The order in which everybody takes these groups: config, then trainers before samplers, then name."""
    pairs = sorted(zip(groups, configured, strict=True), key=lambda pair: place(pair[0], number(text(pair[1] or ""))))
    return tuple(group for group, _ in pairs)
