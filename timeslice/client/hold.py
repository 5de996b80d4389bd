"""``hold``: a group, or several, around a block of code or a function."""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from timeslice.client import standing
from timeslice.client.context import Entered, Holding, current, here, put, release, settle
from timeslice.client.core import BaseClient
from timeslice.client.decorating import decorated
from timeslice.client.lease import BaseLease
from timeslice.client.steps import Steps, run, run_async
from timeslice.client.terms import Terms, check_timeout
from timeslice.errors import UsageError
from timeslice.locks.cycles import place
from timeslice.locks.scripts import number, text
from timeslice.names import check_name

log = logging.getLogger("timeslice")

F = TypeVar("F", bound=Callable[..., Any])
if TYPE_CHECKING:
    from typing_extensions import TypeVar as DefaultTypeVar

    from timeslice.client.lease import AsyncLease, Lease

    # What `with` gives, and `async with`; unless it is told, of one group.
    Given_co = DefaultTypeVar("Given_co", covariant=True, default=Lease)
    AsyncGiven_co = DefaultTypeVar("AsyncGiven_co", covariant=True, default=AsyncLease)
else:
    Given_co = TypeVar("Given_co", covariant=True)
    AsyncGiven_co = TypeVar("AsyncGiven_co", covariant=True)


class Hold(Generic[Given_co, AsyncGiven_co]):
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
        self._entered: list[Entered] = []  # from before they hold anything until they are left
        self._inside: list[Entered] = []  # those of them that no exit has taken up yet

    # both faces

    def _enter(self, client: BaseClient[Any, Any]) -> Steps[Any]:
        """Have all groups, and return with each lease standing: one may be lost while the next one is waited for. Then
        all are given back and taken anew, in order."""
        groups = self._groups
        until = math.inf if self._timeout is None else time.monotonic() + self._timeout
        if len(groups) > 1 and not client.disabled:
            groups = in_order(groups, (yield client.orders(groups, until)))
        around = standing.around()
        while True:
            entered = Entered(client)
            try:
                self._entered.append(entered)
                for group in groups:
                    left = None if until == math.inf else max(until - time.monotonic(), 0.0)
                    if not self._join(entered, group):
                        yield from self._take(entered, group, left)
                gone = yield from self._gone(entered, around, until)
                if gone is None:
                    return self._begin(entered)
                if gone in entered.joined:
                    gone.lease.ensure_held()  # raises: the hold around this one is over, and can't be taken anew
                yield from self._release(entered)
            except BaseException:
                yield from self._release(entered)
                raise
            log.info(
                "group %s: job %s lost it before all of %s were there; they are asked for again, in order",
                *(gone.lease.group, gone.lease.job, ", ".join(groups)),
            )

    def _begin(self, entered: Entered) -> Any:
        leases = {holding.lease.group: holding.lease for holding in entered.holdings}
        for holding in entered.holdings if len(leases) > 1 else ():
            if holding not in entered.joined:
                holding.lease.beside = tuple(leases.values())
        self._inside.append(entered)
        return leases[self._groups[0]] if len(leases) == 1 else tuple(leases[group] for group in self._groups)

    def _gone(self, entered: Entered, around: list[BaseLease], until: float) -> Steps[Holding | None]:
        """A holding whose lease is over. None: from now on the body runs, and is told of losses."""
        own = [holding.lease for holding in entered.holdings if holding not in entered.joined]
        since = standing.last_wait(own)
        yield from standing.ensure_around(entered.client, around, since)
        for holding in entered.holdings:
            if not (yield from standing.stands(entered.client, holding.lease, since, until)):
                return holding
        # Once more without a question in between, which may have taken long.
        return next((holding for holding in entered.holdings if not holding.lease.begin_body()), None)

    def _join(self, entered: Entered, group: str) -> bool:
        client = entered.client
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

    def _take(self, entered: Entered, group: str, timeout: float | None) -> Steps[None]:
        client = entered.client
        lease: BaseLease | None = None
        try:
            lease = yield from client._acquire(group, self._terms, timeout, limit=self._timeout, in_body=False)  # noqa: SLF001
            held = Holding((client.url, client.keys.prefix, group), lease, entered)
            entered.holdings.append(held)
            put(held)
        except BaseException:
            if lease:
                client.abandon(lease)
            raise

    def leave(self, *, done: bool) -> None:
        """As the end of a ``with``, for who enters and leaves by calls. ``done``: no error ended the work."""
        self.__exit__(None if done else BaseException, None, None)

    def _leave(self, ended: list[Entered], *, done: bool) -> Steps[None]:
        self._take_up(ended)
        if not ended:
            raise UsageError(f"hold of {', '.join(self._groups)}: it is left more often than it was entered")
        (entered,) = ended
        for holding in entered.holdings:
            # What a nested hold did is for the one around it to judge, unless that is over.
            holding.lease.done = done and (holding.lease.done or holding not in entered.joined)
        yield from self._release(entered)

    def _take_up(self, ended: list[Entered]) -> None:
        """Put into ``ended`` the entry that ends where the running code leaves, once: its thread's or task's own.
        Frameworks enter in one callback and leave in another, whose thread and context may differ: then, if others are
        inside too, that with the oldest grant, which the newer ones have ended."""
        by = here()

        def likeness(entered: Entered) -> tuple[bool, bool, int]:
            return entered.by is by, entered.is_current(), -entered.holdings[0].lease.fencing_token

        while not ended:
            found = max(reversed(list(self._inside)), key=likeness, default=None)  # of equal ones the last
            if found is None:
                return
            ended.append(found)  # before it is claimed: an interrupt in between finds it
            try:
                self._inside.remove(found)
            except ValueError:
                ended.clear()  # another exit was faster

    def _release(self, entered: Entered) -> Steps[None]:
        """Leave each holding, last taken first; an interrupt in between doesn't keep the others."""
        interrupt: BaseException | None = None
        for holding in reversed(entered.holdings):
            try:
                yield from release(holding, entered)
            except BaseException as error:
                interrupt = interrupt or error
                settle(holding, entered)
        self._forget(entered)
        if interrupt:
            raise interrupt

    def _settle(self, ended: list[Entered]) -> None:
        """For an exit that was interrupted, perhaps before its first step."""
        self._take_up(ended)
        for entered in ended:
            entered.settle()
            self._forget(entered)

    def _forget(self, entered: Entered) -> None:
        for known in (self._inside, self._entered):
            if entered in known:
                known.remove(entered)

    def _anew(self) -> Self:
        """One on the same terms, that nobody else enters."""
        made = type(self).__new__(type(self))
        # At once: one that an interrupt left with our lists would leave our entries when it is let go.
        vars(made).update({**vars(self), "_entered": [], "_inside": []})
        return made

    def __del__(self) -> None:
        # An interrupt may come after the body and before the first line of our exit. Nobody can leave any more.
        if not sys.is_finalizing():
            for entered in getattr(self, "_entered", ()):
                entered.settle()

    # with

    def __enter__(self) -> Given_co:
        from timeslice.client.sync import Client

        client = self._client
        if client is None:
            from timeslice.client.defaults import default_client

            client = default_client(self._url)
        if not isinstance(client, Client):
            raise UsageError("this hold belongs to an AsyncClient: use `async with`, or decorate a coroutine function")
        given: Given_co = run(self._enter(client))
        return given

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        ended: list[Entered] = []
        try:
            run(self._leave(ended, done=kind is None))
        except BaseException:
            self._settle(ended)
            raise

    # async with

    async def __aenter__(self) -> AsyncGiven_co:
        from timeslice.client.aio import AsyncClient, told_if_late

        client = self._client
        if client is None:
            from timeslice.client.defaults import default_async_client

            client = await default_async_client(self._url)
        if not isinstance(client, AsyncClient):
            raise UsageError("this hold belongs to a Client: use `with`, or take AsyncClient for async code")
        with told_if_late():
            given: AsyncGiven_co = await run_async(self._enter(client))
        return given

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        ended: list[Entered] = []
        if kind is GeneratorExit:  # nobody resumes this coroutine any more, so that it can't wait for an answer
            self._settle(ended)
            return
        try:
            await run_async(self._leave(ended, done=kind is None))
        except BaseException:
            self._settle(ended)
            raise

    # decorator

    def __call__(self, function: F) -> F:
        """Hold around each call of ``function``; for a coroutine function, around the whole await."""
        return decorated(function, "hold", self._anew)


def in_order(groups: Sequence[str], configured: Sequence[Any]) -> tuple[str, ...]:
    """The order in which everybody takes these groups: config, then trainers before samplers, then name."""
    pairs = sorted(zip(groups, configured, strict=True), key=lambda pair: place(pair[0], number(text(pair[1] or ""))))
    return tuple(group for group, _ in pairs)
