"""What the running code holds, by context: so that a hold inside a hold shares its lease."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from timeslice.client.steps import Steps
from timeslice.errors import UsageError

if TYPE_CHECKING:
    from timeslice.client.core import BaseClient
    from timeslice.client.gang import Gang
    from timeslice.client.lease import BaseLease

Key = tuple[str, str, str]  # url, prefix, group


def here() -> object:
    """The task that runs now, else the thread."""
    try:
        task = asyncio.current_task()
    except RuntimeError:
        task = None
    return task or threading.current_thread()


@dataclass(eq=False)
class Entered:
    """One entry into a hold, by a `with` or a call, until it is left. What it is about to share stands here before it
    does, so that an interrupt at any time finds what is to be left."""

    client: BaseClient[Any, Any]
    by: object = field(default_factory=here)  # thread or task
    holdings: list[Holding] = field(default_factory=list)  # in the order taken
    joined: list[Holding] = field(default_factory=list)  # those of a hold around this one

    def is_current(self) -> bool:
        return all(current(holding.key) is holding for holding in self.holdings)

    def settle(self) -> None:
        """Leave all, however far the leaving came before it was interrupted. Sends nothing itself."""
        for holding in reversed(self.holdings):
            settle(holding, self)


class Holding:
    """A group that the current context holds, and who is inside: the entries of the nested holds that share it,
    outermost first. The last one out yields."""

    __slots__ = ("inside", "key", "lease", "outer")

    def __init__(self, key: Key, lease: BaseLease, entered: Entered) -> None:
        self.key = key
        self.lease = lease
        self.inside = [entered]
        self.outer: Holding | None = None  # one that is not over, such as one at a yield point
        lease.holding = self

    @property
    def count(self) -> int:
        return len(self.inside)

    def join(self, job: str, gang: Gang | None, entered: Entered) -> bool:
        """Share this holding. False if it is over; raises if that would wait for itself, let the other ranks of a gang
        wait for this one, or run without the lease."""
        if self.lease.inherited:
            return False
        with _counting:
            if not self.count or self.lease.at_point or self.lease.state in {"yielding", "yielded"}:
                return False
            if self.lease.job != job:
                raise UsageError(
                    f"group {self.lease.group}: this code holds it for job {self.lease.job} and would wait for itself "
                    f"as job {job}. Leave the outer hold first, or use the same job.",
                    group=self.lease.group,
                    job=job,
                )
            own = self.lease._terms.gang  # noqa: SLF001
            if gang != own:
                raise UsageError(
                    f"group {self.lease.group}: this code holds it for job {job} as {_told(own)}, and asks inside that "
                    f"as {_told(gang)}. A hold inside another shares its lease: give both the same gang, rank and "
                    "world_size.",
                    group=self.lease.group,
                    job=job,
                )
            if self.lease.state == "lost":
                self.lease.ensure_held()
            self.inside.append(entered)
            return True

    def without(self, entered: Entered) -> bool:
        """Take an entry out, if it is in. Whether nobody is left."""
        with _counting:
            self.inside = [each for each in self.inside if each is not entered]
            return not self.inside


def _told(gang: Gang | None) -> str:
    return f"rank {gang.rank} of a gang of {gang.world}" if gang else "this process alone"


# What this context holds. Child tasks and asyncio.to_thread inherit it; raw threads begin with nothing.
_held: ContextVar[Mapping[Key, Holding]] = ContextVar("timeslice_held", default={})  # noqa: B039 - never changed
# What this context has from calls of acquire, and may have yielded since.
_acquired: ContextVar[tuple[BaseLease, ...]] = ContextVar("timeslice_acquired", default=())
_counting = threading.RLock()  # a hold may be let go, and so be left, while this thread counts


def _start_clean() -> None:
    global _counting  # noqa: PLW0603 - a forked child can't trust the lock it inherited
    _counting = threading.RLock()


os.register_at_fork(after_in_child=_start_clean)


def enter_point(lease: BaseLease) -> bool:
    """Mark the lease as being at a yield point, so that nobody joins it. False if some other thread or task is in a
    nested hold of its own: only it knows whether it computes. LeaseUncertainError if one is at a point already."""
    own = here()
    with _counting:
        if lease.at_point:
            lease.ensure_held()
        nested = lease.holding.inside[1:] if lease.holding else []
        if any(each.by is not own for each in nested):
            return False
        lease.at_point = True
        return True


def current(key: Key) -> Holding | None:
    """What this context holds of a group; it may be over."""
    return _held.get().get(key)


def leases() -> list[BaseLease]:
    """The leases of this context; some may be over."""
    return [holding.lease for holding in _held.get().values()]


def acquired() -> tuple[BaseLease, ...]:
    """The leases that this context had from ``acquire``; some may be over."""
    return _acquired.get()


def keep(lease: BaseLease) -> None:
    """Note a lease from ``acquire``."""
    _acquired.set((*(each for each in _acquired.get() if each.state == "held"), lease))


def put(holding: Holding) -> None:
    known = _held.get()
    before = known.get(holding.key)
    holding.outer = before if before and before.count else None
    _held.set({**known, holding.key: holding})


def release(holding: Holding, entered: Entered) -> Steps[None]:
    """End what an entry has of a holding; the last one out yields, through the client it came with: a thread may have
    joined what a task took."""
    if not holding.lease.inherited and holding.without(entered):
        _forget(holding)
        yield from entered.client._yield(holding.lease)  # noqa: SLF001


def settle(holding: Holding, entered: Entered) -> None:
    """As ``release``, where nobody knows how far that came before an interrupt. Sends nothing itself."""
    if not holding.lease.inherited and holding.without(entered):
        _forget(holding)
        entered.client.abandon(holding.lease)


def _forget(holding: Holding) -> None:
    known = _held.get()
    if known.get(holding.key) is holding:
        rest = {key: held for key, held in known.items() if held is not holding}
        _held.set({**rest, holding.key: holding.outer} if holding.outer else rest)
