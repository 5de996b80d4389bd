"""``hold``: a group, or several, around a block of code or a function."""

from __future__ import annotations

import copy
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from timeslice.client import standing
from timeslice.client.context import Holding, current, here, put, release
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


@dataclass(frozen=True, eq=False)
class _Entered:
    """One entry into a hold, until it is left."""

    client: BaseClient[Any, Any]
    by: object  # thread or task
    holdings: tuple[Holding, ...]  # in the order taken
    joined: tuple[Holding, ...]  # those of a hold around this one

    def is_current(self) -> bool:
        return all(current(holding.key) is holding for holding in self.holdings)

    def release(self) -> Steps[None]:
        return _release_all(self.client, self.by, self.holdings)


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
        self._entered: list[_Entered] = []

    # both faces

    def _enter(self, client: BaseClient[Any, Any]) -> Steps[Any]:
        entered: _Entered = yield from self._take_all(client)
        leases = {holding.lease.group: holding.lease for holding in entered.holdings}
        for holding in entered.holdings if len(leases) > 1 else ():
            if holding not in entered.joined:
                holding.lease.beside = tuple(leases.values())
        return leases[self._groups[0]] if len(leases) == 1 else tuple(leases[group] for group in self._groups)

    def _take_all(self, client: BaseClient[Any, Any]) -> Steps[_Entered]:
        """Have all groups, and return with each lease standing: one may be lost while the next one is waited for. Then
        all are given back and taken anew, in order."""
        groups = self._groups
        if len(groups) > 1 and not client.disabled:
            groups = in_order(groups, (yield client.orders(groups)))
        until = math.inf if self._timeout is None else time.monotonic() + self._timeout
        around = standing.around()
        while True:
            taken: list[Holding] = []
            joined: list[Holding] = []
            try:
                for group in groups:
                    left = None if until == math.inf else max(until - time.monotonic(), 0.0)
                    if shared := self._join(client, group):
                        taken.append(shared)
                        joined.append(shared)
                    else:
                        taken.append((yield from self._take(client, group, left)))
                since = standing.last_wait([holding.lease for holding in taken if holding not in joined])
                yield from standing.ensure_around(client, around, since)
                gone = yield from self._gone(client, taken, since, until)
                if not gone:
                    entered = _Entered(client, here(), tuple(taken), tuple(joined))
                    self._entered.append(entered)
                    return entered
                if gone in joined:
                    gone.lease.ensure_held()  # raises: the hold around this one is over, and can't be taken anew
            except BaseException:
                yield from _release_all(client, here(), taken)
                raise
            yield from _release_all(client, here(), taken)
            log.info(
                "group %s: job %s lost it before all of %s were there; they are asked for again, in order",
                *(gone.lease.group, gone.lease.job, ", ".join(groups)),
            )

    def _gone(
        self, client: BaseClient[Any, Any], taken: Sequence[Holding], since: float, until: float
    ) -> Steps[Holding | None]:
        """A holding whose lease is over. None: from now on the body runs, and is told of losses."""
        for holding in taken:
            if not (yield from standing.stands(client, holding.lease, since, until)):
                return holding
        # Once more without a question in between, which may have taken long.
        return next((holding for holding in taken if not holding.lease.begin_body()), None)

    def _join(self, client: BaseClient[Any, Any], group: str) -> Holding | None:
        held = current((client.url, client.keys.prefix, group))
        return held if held and held.join(self._terms.job or client.job, self._terms.gang) else None

    def _take(self, client: BaseClient[Any, Any], group: str, timeout: float | None) -> Steps[Holding]:
        lease: BaseLease | None = None
        try:
            lease = yield from client._acquire(group, self._terms, timeout, limit=self._timeout, in_body=False)  # noqa: SLF001
            held = Holding((client.url, client.keys.prefix, group), lease)
            put(held)
            return held
        except BaseException:
            if lease:
                client.abandon(lease)
            raise

    def leave(self, *, done: bool) -> None:
        """As the end of a ``with``, for who enters and leaves by calls. ``done``: no error ended the work."""
        run(self._leave(done=done))

    def _leave(self, *, done: bool) -> Steps[None]:
        entered = self._own()
        self._entered.remove(entered)
        for holding in entered.holdings:
            # What a nested hold did is for the one around it to judge, unless that is over.
            holding.lease.done = done and (holding.lease.done or holding not in entered.joined)
        yield from entered.release()

    def _own(self) -> _Entered:
        """The entry that ends where the running code leaves: its thread's or task's own. Frameworks enter in one
        callback and leave in another, whose thread and context may differ: then, if others are inside too, that with
        the oldest grant, which the newer ones have ended."""
        by = here()

        def likeness(entered: _Entered) -> tuple[bool, bool, int]:
            return entered.by is by, entered.is_current(), -entered.holdings[0].lease.fencing_token

        found = max(reversed(self._entered), key=likeness, default=None)  # of equal ones the last
        if found is None:
            raise UsageError(f"hold of {', '.join(self._groups)}: it is left more often than it was entered")
        return found

    def _anew(self) -> Self:
        """One on the same terms, that nobody else enters."""
        made = copy.copy(self)
        made._entered = []  # noqa: SLF001
        return made

    # with

    def __enter__(self) -> Given_co:
        from timeslice.client.defaults import default_client
        from timeslice.client.sync import Client

        client = self._client or default_client(self._url)
        if not isinstance(client, Client):
            raise UsageError("this hold belongs to an AsyncClient: use `async with`, or decorate a coroutine function")
        given: Given_co = run(self._enter(client))
        return given

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave(done=kind is None)

    # async with

    async def __aenter__(self) -> AsyncGiven_co:
        from timeslice.client.aio import AsyncClient, told_if_late
        from timeslice.client.defaults import default_async_client

        client = self._client or await default_async_client(self._url)
        if not isinstance(client, AsyncClient):
            raise UsageError("this hold belongs to a Client: use `with`, or take AsyncClient for async code")
        with told_if_late():
            given: AsyncGiven_co = await run_async(self._enter(client))
        return given

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await run_async(self._leave(done=kind is None))

    # decorator

    def __call__(self, function: F) -> F:
        """Hold around each call of ``function``; for a coroutine function, around the whole await."""
        return decorated(function, "hold", self._anew)


def _release_all(client: BaseClient[Any, Any], by: object, holdings: Sequence[Holding]) -> Steps[None]:
    """Leave each holding, last taken first; an interrupt in between doesn't keep the others."""
    interrupt: BaseException | None = None
    for holding in reversed(holdings):
        try:
            yield from release(holding, client, by)
        except BaseException as error:
            interrupt = interrupt or error
            if not holding.count:
                client.abandon(holding.lease)
    if interrupt:
        raise interrupt


def in_order(groups: Sequence[str], configured: Sequence[Any]) -> tuple[str, ...]:
    """The order in which everybody takes these groups: config, then trainers before samplers, then name."""
    pairs = sorted(zip(groups, configured, strict=True), key=lambda pair: place(pair[0], number(text(pair[1] or ""))))
    return tuple(group for group, _ in pairs)
