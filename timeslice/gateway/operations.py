"""Operations that were asked for and go on by themselves. They are of this process: after a restart none is known."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Literal

from timeslice.errors import RefusedError, TimeSliceError

log = logging.getLogger("timeslice.gateway")

KEPT, KEEP_S = 10_000, 3600.0  # finished ones can be asked for so many, and so long
PENDING_MAX = 256

Kind = Literal["snapshot", "restore"]


@dataclass(frozen=True, kw_only=True)
class Moved:
    """Bytes of the job's state in host memory and on the devices; None where nobody measured them."""

    storage_bytes: int | None = None
    device_bytes: int | None = None


Work = Callable[[], Coroutine[None, None, Moved]]


@dataclass(kw_only=True)
class Operation:
    """``error`` is empty unless it failed. Times are monotonic."""

    id: str
    kind: Kind
    group: str
    job: str
    began: float
    ended: float | None = None
    moved: Moved | None = None
    error: str = ""

    @property
    def elapsed_ms(self) -> int:
        return round(((time.monotonic() if self.ended is None else self.ended) - self.began) * 1000)


class FullError(RefusedError):
    """As much as one gateway does at a time is under way."""


class Operations:
    """All operations of one gateway."""

    def __init__(self) -> None:
        self._pending: dict[tuple[Kind, str, str], Operation] = {}
        self._finished: OrderedDict[str, Operation] = OrderedDict()  # in the order of their ends
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, kind: Kind, group: str, job: str, work: Work) -> Operation:
        """Begin, or give the one that does the same already: a request that is repeated gets the same answer."""
        known = self._pending.get((kind, group, job))
        if known:
            return known
        if len(self._pending) >= PENDING_MAX:
            raise FullError(
                f"group {group}: {kind} of job {job} not begun: {PENDING_MAX} operations are pending; ask again when "
                "some of them have ended",
                group=group,
                job=job,
            )
        made = Operation(id=secrets.token_hex(10), kind=kind, group=group, job=job, began=time.monotonic())
        self._pending[kind, group, job] = made
        task = asyncio.create_task(self._run(made, work), name=f"{kind} {group}/{job}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return made

    def find(self, operation_id: str) -> Operation | None:
        """By its id; None if it is unknown, or was forgotten."""
        self._forget()
        pending = (each for each in self._pending.values() if each.id == operation_id)
        return self._finished.get(operation_id) or next(pending, None)

    async def close(self) -> None:
        """Give up what is pending; what was ordered of agents already is carried out all the same."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _run(self, operation: Operation, work: Work) -> None:
        try:
            operation.moved = await work()
        except TimeSliceError as error:
            operation.error = str(error)
        except Exception as error:
            log.exception("group %s: %s of job %s failed", operation.group, operation.kind, operation.job)
            operation.error = f"{type(error).__name__}: {error}; see the gateway's log"
        operation.ended = time.monotonic()
        del self._pending[operation.kind, operation.group, operation.job]
        self._finished[operation.id] = operation
        self._forget()

    def _forget(self) -> None:
        oldest = time.monotonic() - KEEP_S
        while self._finished:
            first = next(iter(self._finished.values()))
            if len(self._finished) <= KEPT and (first.ended or 0.0) >= oldest:
                return
            del self._finished[first.id]
