"""One server at a time: how it is now, put it to sleep, wake it. Each looks before it acts, and again afterwards."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from timeslice.backends.base import Selection
from timeslice.backends.http_client import PassingError, patiently
from timeslice.backends.http_dialect import Dialect, Server
from timeslice.backends.http_marks import Mark, Marks
from timeslice.errors import BackendError, FaultKind
from timeslice.models import Residency, Target

_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 0.5
_SETTLE_S = 5.0  # old servers answer before they sleep
_AWAKE_SHARE, _ASLEEP_SHARE = 0.8, 0.2  # of what it had on the devices: above it is awake, below asleep


@dataclass(frozen=True)
class Seen:
    """A server as it was a moment ago. ``asleep`` None: nobody can tell."""

    server: Server
    dialect: Dialect
    mark: Mark | None
    asleep: tuple[str, ...] | None

    @property
    def state(self) -> Residency:
        """A part that sleeps is enough: it can't compute."""
        if self.asleep is None:
            return Residency.FAULTED
        return Residency.SUSPENDED if self.asleep else Residency.RESIDENT

    @property
    def tags(self) -> tuple[str, ...]:
        """All that it can put to sleep, in the order in which it wakes."""
        known = self.server.target.tags or self.dialect.tags
        return tuple(tag for tag in self.dialect.tags if tag in known)

    def asked(self, selection: Selection) -> tuple[str, ...]:
        """What is meant; no tags mean all."""
        return tuple(tag for tag in self.tags if tag in (selection.tags or self.tags))


def kept(sizes: Sequence[int], dropped: int) -> int:
    """Bytes that host memory has to take, at most, of a server with these sizes on its devices."""
    return sum(max(0, size - dropped) for size in sizes)


class Sleepers:
    """Servers of one group on one node."""

    def __init__(self, marks: Marks, measure: Callable[[Target], Awaitable[list[int]]]) -> None:
        """``measure`` gives the bytes of a server's process on each device, none if nobody can tell."""
        self._marks, self._measure = marks, measure

    async def look(self, server: Server, dialect: Dialect, until: float) -> Seen:
        """What a lost answer left open is settled by what is on the devices."""
        mark = self._marks.get(server.url)
        asleep = await dialect.asleep(server, mark, until)
        if asleep is None and mark and mark.device_bytes:
            now = sum(await self._measure(server.target))
            if now >= _AWAKE_SHARE * mark.device_bytes:
                asleep = ()
            elif now <= _ASLEEP_SHARE * mark.device_bytes:
                asleep = mark.out
        return Seen(server, dialect, mark, asleep)

    async def find(self, server: Server, dialect: Dialect, until: float) -> Seen:
        """The same, before anything is done: whoever was put to sleep as a whole, and has its memory, is another run of
        the server, or was woken by somebody else."""
        seen = await self.look(server, dialect, until)
        mark = seen.mark
        if mark and mark.device_bytes and seen.asleep == mark.out == seen.tags:
            now = sum(await self._measure(server.target))
            if now >= _AWAKE_SHARE * mark.device_bytes:
                return replace(seen, asleep=())
        return seen

    async def drain(self, seen: Seen, until: float) -> None:
        """Wait until it computes nothing. BackendError(busy) when time is up first."""
        pause, work = _PAUSE_S, ""
        while not seen.asleep and (work := await self._work(seen, work, until)):
            if time.monotonic() + pause > until:
                raise BackendError(f"server {seen.server.url} stayed busy: {work}", kind=FaultKind.BUSY)
            await asyncio.sleep(pause)
            pause = min(pause * 2, _LONGEST_PAUSE_S)

    @staticmethod
    async def _work(seen: Seen, before: str, until: float) -> str:
        """What it computes now; what it did ``before``, if it did not tell until time was up."""
        try:
            return await seen.dialect.work(seen.server, until)
        except PassingError:
            if not before:
                raise
            return before

    async def put_to_sleep(self, seen: Seen, selection: Selection, until: float) -> None:
        server, dialect, before = seen.server, seen.dialect, seen.asleep or ()
        tags = tuple(tag for tag in seen.asked(selection) if tag not in before)
        sizes, out = await self._measure(server.target), tuple(tag for tag in seen.tags if tag in {*before, *tags})
        had = sum(sizes)
        if before and seen.mark:  # a part of it left earlier
            had = max(had, seen.mark.device_bytes)
        keeps = selection.mode == "offload" and "weights" in out
        dropped = await dialect.dropped(server, until) if keeps and "kv_cache" not in before else 0
        mark = Mark(
            url=server.url,
            run=await dialect.run_of(server, until),
            process=server.process,
            out=out,
            mode=selection.mode,
            device_bytes=had,
            host_bytes=kept(sizes, dropped) if keeps else 0,
        )

        async def done() -> bool:
            return set(mark.out) <= set(await self._asleep(seen, until) or ())

        await self._order(seen, lambda: dialect.sleep(server, selection, tags, until), mark, done, until)
        self._marks.put(mark)
        await self._verify(seen, done, until, "said that it sleeps, and it is awake")

    async def wake(self, seen: Seen, tags: Sequence[str], until: float) -> None:
        """Tag by tag, those that sleep, in the order that the server needs."""
        server, dialect, out = seen.server, seen.dialect, seen.asleep or ()
        run = await dialect.run_of(server, until)
        known = seen.mark if seen.mark and seen.mark.is_of(run, server.process) else None
        mark = known or Mark(url=server.url, run=run, process=server.process, out=out, mode="offload")

        async def done() -> bool:
            return await self._asleep(seen, until) == ()

        for tag in [tag for tag in seen.tags if tag in tags and tag in out]:
            await self._order(seen, partial(dialect.wake, server, tag, until), mark, done, until)
            mark = mark.model_copy(update={"out": tuple(each for each in mark.out if each != tag), "unsure": False})
            self._marks.put(mark)
            if tag == "weights" and mark.mode == "discard":
                await dialect.refill(server, until)
        await self._verify(seen, done if not mark.out else None, until, "said that it is awake, and it sleeps")
        if not mark.out:
            self._marks.drop(server.url)

    async def undo(self, seen: Seen, until: float) -> None:
        """Back to how it was at ``seen``, after a step that failed."""
        now = await self.look(seen.server, seen.dialect, until)
        was = set(seen.asleep or ())
        if now.asleep is None:
            message = f"nobody can tell what of server {seen.server.url} sleeps; end it"
            raise BackendError(message, kind=FaultKind.POISONED)
        if extra := [tag for tag in now.asleep if tag not in was]:
            await self.wake(now, extra, until)
        if missing := tuple(tag for tag in seen.tags if tag in was and tag not in now.asleep):
            if now.asleep and not seen.dialect.apart:
                awake = ", ".join(missing)
                message = f"server {seen.server.url} can't put {awake} back to sleep alone; wake all of it, or end it"
                raise BackendError(message, kind=FaultKind.POISONED)
            mode = seen.mark.mode if seen.mark else "offload"
            await self.put_to_sleep(now, Selection(mode=mode, tags=missing), until)

    def forget(self, server: Server) -> None:
        self._marks.drop(server.url)

    async def _asleep(self, seen: Seen, until: float) -> tuple[str, ...] | None:
        return (await self.look(seen.server, seen.dialect, until)).asleep

    async def _order(
        self,
        seen: Seen,
        attempt: Callable[[], Awaitable[None]],
        mark: Mark,
        done: Callable[[], Awaitable[bool]],
        until: float,
    ) -> None:
        """Send it until it is answered or seen done. As long as that is open, so says the mark."""
        unsure = False
        self._marks.put(mark.model_copy(update={"unsure": True}))

        async def after(error: PassingError) -> bool:
            nonlocal unsure
            unsure |= error.unsure
            if await done():
                return True
            if unsure and await self._asleep(seen, until) is None:  # a second time it could end the server
                message = f"nobody can tell what became of it: {error}; end the server"
                raise BackendError(message, kind=FaultKind.POISONED)
            return False

        try:
            await patiently(attempt, until, who=seen.server.who, after=after)
        except BackendError as error:
            if not (unsure or (isinstance(error, PassingError) and error.unsure)):
                self._restore_mark(seen, mark)
            raise

    def _restore_mark(self, seen: Seen, mark: Mark) -> None:
        if seen.mark:
            # Tags that were woken in this step are awake, whatever was known before it.
            out = tuple(tag for tag in seen.mark.out if tag in mark.out)
            self._marks.put(seen.mark.model_copy(update={"out": out}))
        else:
            self._marks.drop(seen.server.url)

    async def _verify(self, seen: Seen, done: Callable[[], Awaitable[bool]] | None, until: float, lie: str) -> None:
        if reason := await seen.dialect.dead(seen.server, until):
            raise BackendError(f"{reason}; end it", kind=FaultKind.POISONED)
        pause, soon = _PAUSE_S, min(until, time.monotonic() + _SETTLE_S)
        while done and not await done():
            if time.monotonic() + pause > soon:
                raise BackendError(f"server {seen.server.url} {lie}", kind=FaultKind.TRANSIENT)
            await asyncio.sleep(pause)
            pause = min(pause * 2, _LONGEST_PAUSE_S)
