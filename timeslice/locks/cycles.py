"""Circles of jobs that hold groups and wait for each other's: found by who waits, without I/O.

Who holds elsewhere notes its wait in each group that it holds, *after* it was queued; then it follows the chain from
the group it waits for: its holder, the groups where that one waits, their holders. Whoever is last to note its wait in
a circle so sees the whole of it. A note alone proves nothing: its waiter must still be queued, and each link must
stand in two looks, so that there was a moment at which all of them stood.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from timeslice.errors import DeadlockError, InvalidNameError, RedisUnreachableError, ServerUnsuitableError, UsageError
from timeslice.locks import scripts
from timeslice.locks.keys import GroupKeys, Keys
from timeslice.locks.scripts import Call
from timeslice.locks.view import GroupView, look

Calls: TypeAlias = Generator[Call[Any], Any, "tuple[Link, ...]"]

_ANSWER_S = 1.0  # neither a look nor a note is worth a longer wait: the next refresh does it again
_MOST_GROUPS = 64  # looked at in one search


def place(group: str, order: int) -> tuple[int, int, str]:
    """Where a group comes in the order in which everybody takes several: configured, trainers before samplers, name."""
    role = 0 if group.startswith("trainer") else 2 if group.startswith("sampler") else 1
    return order, role, group


@dataclass(frozen=True)
class Held:
    """A lease that a waiter holds on another group of the same server and prefix."""

    keys: GroupKeys
    lease: str
    floor: int


@dataclass(frozen=True)
class Link:
    """``waiter`` of ``job`` waits for ``group``, which ``lease`` of ``holder`` holds."""

    waiter: str
    job: str
    group: str
    order: int
    lease: str
    holder: str


class Watch:
    """Looks for circles on behalf of one waiter. ``held`` tells what it holds elsewhere now."""

    def __init__(self, group: GroupKeys, waiter: str, held: Callable[[], Sequence[Held]]) -> None:
        self._group, self.waiter, self._held = group, waiter, held  # the waiter, or its gang once that is known
        self._noted: dict[str, Held] = {}  # by lease

    def look(self) -> Generator[Call[Any], Any, DeadlockError | None]:
        """Note the wait and follow the chain. The error if there is a circle and it is this wait that must end.

        That is the wait for the circle's first group: the one that is out of order. Any other sees to it that the one
        who is looks at once.
        """
        held = self._held()
        if not held:
            return None
        try:
            yield from self._note(held)
            mine = {each.keys.name: each.lease for each in held}
            circle = yield from self._find(mine)
            if not circle or (yield from self._find(mine)) != circle:
                return None
            first = min(circle, key=lambda link: place(link.group, link.order))
            if first.waiter == self.waiter:
                return _error(circle)
            yield _brief(scripts.nudge(self._keys(first.group), first.waiter))
        except (RedisUnreachableError, ServerUnsuitableError, UsageError):
            pass  # also: a group that is not for us to look at, or whose settings can't be read
        return None

    def clear(self) -> Generator[Call[Any], Any, None]:
        """Take the notes back. One that stays, because nobody answers, does no harm."""
        try:
            for each in self._noted.values():
                yield self._call(each, still=False)
        except (RedisUnreachableError, ServerUnsuitableError):
            pass
        self._noted.clear()

    def _note(self, held: Sequence[Held]) -> Generator[Call[Any], Any, None]:
        for each in held:  # again at each look: the server may have lost it
            self._noted[each.lease] = each
            yield self._call(each, still=True)

    def _call(self, held: Held, *, still: bool) -> Call[bool]:
        call = scripts.waits(held.keys, held.lease, self._group.name, self.waiter, still=still, floor=held.floor)
        return _brief(call)

    def _keys(self, group: str) -> GroupKeys:
        return Keys(self._group.prefix).group(group)

    def _find(self, mine: dict[str, str]) -> Calls:
        """The links from this waiter to a lease of its own, or nothing."""
        views: dict[str, GroupView] = {}
        ahead: list[tuple[str, str, tuple[Link, ...]]] = [(self._group.name, self.waiter, ())]
        seen = set()
        while ahead and len(views) < _MOST_GROUPS:
            group, waiter, path = ahead.pop()
            if (group, waiter) in seen:
                continue
            seen.add((group, waiter))
            if group not in views:
                views[group] = yield _brief(look(self._keys(group)))
            view = views[group]
            job = next((each.job for each in view.queue if each.waiter == waiter and each.alive), None)
            if job is None or not view.holder:
                continue
            path += (Link(waiter, job, group, view.config.order, view.state["lease_id"], view.holder),)
            if mine.get(group) == path[-1].lease:
                return path
            ahead += [(*wait, path) for wait in _waits(view)]
        return ()


def _waits(view: GroupView) -> list[tuple[str, str]]:
    """Where, and as which waiter, the holder says that it waits; what is no such note is passed over."""
    found = []
    for entry in view.state.get("waits_on", "").split():
        group, _, waiter = entry.partition("/")
        try:
            found.append((Keys().group(group).name, waiter))
        except InvalidNameError:
            continue
    return found


def _brief(call: Call[Any]) -> Call[Any]:
    return replace(call, deadline_s=_ANSWER_S)


def with_itself(group: str, job: str, holder: str, token: int, *, how: str) -> DeadlockError:
    """Code waits for what it holds itself. ``how`` it was taken."""
    return DeadlockError(
        f"group {group}: this code holds it already, for job {holder} by {how} (token {token}), and would wait for "
        "itself for ever. Yield that lease first, or take both with hold: holds inside of each other share a lease.",
        group=group,
        job=job,
        token=token,
    )


def _error(circle: tuple[Link, ...]) -> DeadlockError:
    own, last = circle[0], circle[-1]
    story = "; ".join(f"job {link.job} waits for {link.group}, which job {link.holder} holds" for link in circle)
    return DeadlockError(
        f"group {own.group}: nobody in this circle could ever go on: {story}. So this wait is withdrawn; what job "
        f"{own.job} holds stays held. Take both in one go, or everywhere in this order: "
        f'hold("{own.group}", "{last.group}").',
        group=own.group,
        job=own.job,
    )
