"""The actor that holds groups for Ray calls, so that neither their caller nor their target has to."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from timeslice.client.aio import AsyncClient
from timeslice.client.lease import AsyncLease
from timeslice.integrations.ray_actors import join

MAX_LINES = 4096
LOST_S = 2.0  # so long a call waits for those before it that are not here; they may have been cancelled on their way


@dataclass(frozen=True)
class Place:
    """Where a call may run. ``groups`` are without doubles."""

    job: str
    groups: tuple[str, ...]
    phase: str | None


@dataclass(frozen=True)
class Request:
    """A call of ``method`` of an actor, or of a remote function if that is empty. References among the arguments stay
    references until the target gets them."""

    place: Place
    target: Any
    method: str
    options: dict[str, Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def name(self) -> str:
        """As Ray's dashboard shows it."""
        return self.method or str(self.target._function_name)  # noqa: SLF001

    def submit(self) -> Any:
        """Send it to the target. One reference, or a list."""
        call = getattr(self.target, self.method) if self.method else self.target
        return (call.options(**self.options) if self.options else call).remote(*self.args, **self.kwargs)


class Holder:
    """Asks for the groups of each call, makes the call and passes its result on."""

    def __init__(self) -> None:
        self._client = AsyncClient()
        self._turns: dict[tuple[str, tuple[str, ...]], Turn] = {}
        self._lines: OrderedDict[str, Line] = OrderedDict()
        self._known: set[bytes] = set()  # actors that were registered once

    async def call(self, request: Request, line_name: str, number: int) -> Any:
        """The result of the call. Raises what it raised, what ``AsyncClient.hold`` raises, and LeaseLostError."""
        line = self._line(line_name)
        line.come(number)
        turn: Turn | None = None
        try:
            if request.method and request.target._actor_id.binary() not in self._known:  # noqa: SLF001
                # Before the group is asked for: an actor that is still loading would keep it from others.
                await self._register(request)
            while turn is None or not turn.stands:
                if turn:  # lost before this call went out: it waits for another
                    turn.leave()
                turn = self._turn(request.place)
                turn.calls += 1
                await asyncio.shield(turn.granted)
                await self._register_again(request, turn)
                await line.wait(number)
            sent = request.submit()
        except BaseException:
            if turn:
                turn.leave()
            raise
        finally:
            line.leave(number)
        # From here on only the end of the call ends its part in the hold, whatever else goes wrong. A cancelled caller
        # stops waiting at once; the call itself may run on, and so long the groups are held.
        result = _result(sent)
        result.add_done_callback(turn.leave)
        value = await asyncio.shield(result)
        await turn.ensure_stood()
        return value

    def _line(self, name: str) -> Line:
        line = self._lines.setdefault(name, Line())
        self._lines.move_to_end(name)
        if len(self._lines) > MAX_LINES:
            self._lines.popitem(last=False)
        return line

    def _turn(self, place: Place) -> Turn:
        key = (place.job, tuple(sorted(place.groups)))
        turn = self._turns.get(key)
        if turn is None or not turn.open:
            turn = self._turns[key] = Turn(self._client, place)
        return turn

    async def _register(self, request: Request) -> None:
        place = request.place
        # Repeated by Ray where the actor is being restarted; it may be, whatever holds for the call itself.
        await request.target.__ray_call__.options(max_task_retries=-1).remote(join, place.groups, place.job)
        self._known.add(request.target._actor_id.binary())  # noqa: SLF001

    async def _register_again(self, request: Request, turn: Turn) -> None:
        """Once a hold, for Ray may have started the actor again. Not before: one that is suspended may not answer."""
        if request.method and (actor := request.target._actor_id.binary()) not in turn.seen:  # noqa: SLF001
            turn.seen.add(actor)
            await self._register(request)


class Turn:
    """One hold, shared by the calls that are in flight together."""

    def __init__(self, client: AsyncClient, place: Place) -> None:
        self.calls = 0
        self.seen: set[bytes] = set()  # actors that were called in it
        self.granted: asyncio.Future[tuple[AsyncLease, ...]] = asyncio.get_running_loop().create_future()
        self._over = asyncio.Event()
        self._holding = asyncio.create_task(self._hold(client, place))

    @property
    def open(self) -> bool:
        """Whether one more call may come in: there is no way back into a hold that failed, was left or lost."""
        if self._over.is_set() or self._holding.done():
            return False
        return not self.granted.done() or self.stands

    @property
    def stands(self) -> bool:
        """Whether all that was granted is held, as far as is known here."""
        return all(lease.state == "held" for lease in self.granted.result())

    def leave(self, _result: object = None) -> None:
        """A call is over; the last one ends the hold, or the wait for it."""
        self.calls -= 1
        if not self.calls:
            self._over.set()
            if not self.granted.done():
                self._holding.cancel()

    async def ensure_stood(self) -> None:
        """LeaseLostError when a lease was lost while a call ran. The last call has that from the answer to the yield,
        which it waits for."""
        if self._over.is_set():
            await asyncio.wait([self._holding])
        for lease in self.granted.result():
            if lease.lost.is_set():
                lease.ensure_held()  # raises

    async def _hold(self, client: AsyncClient, place: Place) -> None:
        try:
            async with client.hold(*place.groups, job=place.job, phase=place.phase, gang=False) as leases:
                self.granted.set_result(leases if isinstance(leases, tuple) else (leases,))
                await self._over.wait()
        except Exception as error:
            if self.granted.done():
                raise
            self.granted.set_exception(error)


class Line:
    """The calls of one process to one target: each goes out after those that were made before it.

    Ray promises that order for an actor that takes one call at a time, but not for what leads to it through here.
    """

    def __init__(self) -> None:
        self._next = 0
        self._past: set[int] = set()
        self._here: dict[int, asyncio.Event] = {}  # calls that came and have not left; set when it is their turn

    def come(self, number: int) -> None:
        """This call is here: those behind it wait for it, however long it takes."""
        self._here[number] = asyncio.Event()

    async def wait(self, number: int) -> None:
        """Return when all calls before this one have left, or won't come any more."""
        while number > self._next:
            try:
                async with asyncio.timeout(LOST_S):
                    await self._here[number].wait()
            except TimeoutError:
                self._go_on(min(here for here in self._here if here >= self._next))

    def leave(self, number: int) -> None:
        """This call is on its way, or given up."""
        del self._here[number]
        if number >= self._next:
            self._past.add(number)
        self._go_on(self._next)

    def _go_on(self, number: int) -> None:
        """All before this one have left or won't come."""
        self._past = {past for past in self._past if past >= number}
        while number in self._past:
            self._past.remove(number)
            number += 1
        self._next = number
        if told := self._here.get(number):
            told.set()


def _result(sent: Any) -> asyncio.Future[Any]:
    """What the call will return, as a future that nobody has to look at."""
    if isinstance(sent, list):
        future: asyncio.Future[Any] = asyncio.gather(*(asyncio.wrap_future(each.future()) for each in sent))
    else:
        future = asyncio.wrap_future(sent.future())
    future.add_done_callback(lambda done: done.cancelled() or done.exception())
    return future
