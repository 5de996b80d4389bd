"""The product with one mistake in it, to see whether a torture run notices: the checker is checked.

A mutant is applied from outside, in the processes of a run and before they begin: the text of Lua scripts is replaced
where it is read, Python functions are. No installation can be mutated by a setting, for the product has none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Any

from timeslice.agent import executor, fencing, moving
from timeslice.errors import StaleCommandError, UsageError
from timeslice.locks import flows, loader
from timeslice.locks.scripts import Renewed
from timeslice.models import Residency


@dataclass(frozen=True)
class Edit:
    """A piece of a Lua file, which must be there exactly once, and what is put in its place."""

    file: str  # its name in lua/ or lua/include/
    old: str
    new: str


@dataclass(frozen=True)
class Mutant:
    """One mistake. ``rules`` of the checker of which one has to notice it."""

    mistake: str
    rules: frozenset[str]
    edits: Sequence[Edit] = ()
    patch: Callable[[], None] | None = None


def apply(name: str) -> None:
    """Make this process a mutant. UsageError for an unknown name; AssertionError when the product has changed so that
    the mutant would be none."""
    if name not in MUTANTS:
        raise UsageError(f"no mutant {name!r}; there are: {', '.join(NAMES)}")
    mutant = MUTANTS[name]
    if mutant.edits:
        _edit_scripts(mutant.edits)
    if mutant.patch:
        mutant.patch()


class _Edited:
    """A folder or file of Lua as `loader` sees it, with the edits made."""

    def __init__(self, place: Traversable, edits: Sequence[Edit]) -> None:
        self._place, self._edits = place, edits

    @property
    def name(self) -> str:
        return self._place.name

    def __truediv__(self, name: str) -> _Edited:
        return _Edited(self._place / name, self._edits)

    def iterdir(self) -> Iterator[_Edited]:
        return (_Edited(place, self._edits) for place in self._place.iterdir())

    def read_text(self) -> str:
        text = self._place.read_text()
        for edit in self._edits:
            if edit.file == self._place.name:
                assert text.count(edit.old) == 1, f"{edit.file} has no longer, or more than once: {edit.old}"
                text = text.replace(edit.old, edit.new)
        return text


class _Resources:
    """Stands for ``importlib.resources`` in the loader."""

    def __init__(self, edits: Sequence[Edit]) -> None:
        self._edits = edits

    def files(self, package: str) -> _Edited:
        return _Edited(resources.files(package), self._edits)


def _edit_scripts(edits: Sequence[Edit]) -> None:
    edited = _Resources(edits)
    for folder in ("", "include"):
        for place in (resources.files("timeslice.locks") / "lua" / folder).iterdir():
            if place.name in {edit.file for edit in edits}:
                (edited.files("timeslice.locks") / "lua" / folder / place.name).read_text()  # finds out now, not later
    vars(loader)["resources"] = edited
    loader.load.cache_clear()


def _no_fencing() -> None:
    """The agent takes every order, however old, and carries it out whatever the group says to it."""
    fencing.check = lambda *_: None
    insist = executor.Executor._insist  # noqa: SLF001

    async def act_anyway(self: executor.Executor, call: Any) -> Any:
        try:
            return await insist(self, call)
        except StaleCommandError:
            return 20_000  # ms left

    executor.Executor._insist = act_anyway  # type: ignore[method-assign] # noqa: SLF001


def _dropped_restore() -> None:
    restore = moving.Mover.restore

    async def say_done(self: moving.Mover, job: Any, *how: Any, **more: Any) -> Any:
        if job.probe.state is Residency.SUSPENDED:
            return job.seen().model_copy(update={"state": Residency.RESIDENT})
        return await restore(self, job, *how, **more)

    moving.Mover.restore = say_done  # type: ignore[method-assign]


def _first_lease_unchecked() -> None:
    """A hold of several groups begins its body when the last is granted, whatever became of the others."""
    from timeslice.client.hold import Hold

    assert "_gone" in vars(Hold), "a hold no longer looks for a lease that is gone by this name"

    def all_stand(_: Any, __: Any, taken: Any, *___: Any) -> Any:
        for holding in taken:
            holding.lease.begin_body()
        yield from ()

    Hold._gone = all_stand  # type: ignore[method-assign,assignment] # noqa: SLF001


def _unseen_is_out() -> None:
    """An agent tells of a job that it can't see that it is out."""
    from timeslice.agent.doubts import Doubts

    async def none(*_: Any) -> str:
        return ""

    for name in ("about", "beside"):
        assert name in vars(Doubts), f"doubts are no longer told by {name}"
        setattr(Doubts, name, none)


def _wiped_is_nobodys() -> None:
    """A process whose environment is wiped is of no job, and no reason for a doubt."""
    from timeslice.agent.discovery import Finder, environment

    judge: Any = vars(Finder).get("_judge")
    assert judge is not None, "who is on the devices is no longer judged by this name"
    assert "_inherited" in vars(environment.Snapshot), "whose a wiped process is, is no longer found out by this name"

    def judge_strangers(self: Any, others: Any, *why: str) -> None:
        judge(self, {pid: each for pid, each in others.items() if isinstance(each, int)}, *why)

    vars(environment)["Snapshot"]._inherited = lambda *_: set()  # noqa: SLF001
    Finder._judge = judge_strangers  # type: ignore[method-assign,assignment] # noqa: SLF001


def _refused_is_ended() -> None:
    """A registered process that the agent may not watch counts as one that has ended."""
    from timeslice.agent.targets import TargetRegistry

    assert isinstance(vars(TargetRegistry).get("unwatched"), property), "who can't be watched is no longer told so"
    TargetRegistry.unwatched = property(lambda _: {})  # type: ignore[method-assign,assignment]


def _order_given_once() -> None:
    """A coordinator gives an order of a step once, whatever became of it."""
    from timeslice.coordinator import swap

    assert "_is_due" in vars(swap), "which orders are due is no longer said by this name"

    def only_once(_: Any, sent_ms: int | None, __: int) -> bool:
        return sent_ms is None

    swap._is_due = only_once  # type: ignore[assignment] # noqa: SLF001


def _no_confirmation() -> None:
    """The client begins its body at the word of the stream; the script takes the grant for confirmed."""
    acquire = flows.acquire

    def believe(*args: Any, **options: Any) -> Any:
        flow = acquire(*args, **options)
        go_on: Callable[[Any], Any] = flow.send
        answer: Any = None
        while True:
            try:
                op = go_on(answer)
            except StopIteration as stop:
                return stop.value
            go_on = flow.send
            if getattr(getattr(op, "script", None), "name", "") == "renew":
                answer = Renewed(0, 0)
                continue
            try:
                answer = yield op
            except Exception as error:
                go_on, answer = flow.throw, error

    flows.acquire = believe


MUTANTS: Mapping[str, Mutant] = {
    "no-fencing": Mutant(
        "agents carry out orders that are refused, or older than what they have seen",
        frozenset({"touched", "restored", "resident"}),
        patch=_no_fencing,
    ),
    "early-grant": Mutant(
        "the grant is given when the swap should begin, not when it has ended",
        frozenset({"resident", "restored"}),
        [
            Edit(
                "advance.lua",
                "return start_swap(waiter, S.evict == record.job and '' or record.job)",
                "return grant(waiter, record, 'restored', 0, caller)",
            )
        ],
    ),
    "lost-wake-up": Mutant(
        "a waiter is not told of its grant, neither by its stream nor when it asks again",
        frozenset({"waiting"}),
        [
            Edit(
                "lease.lua",
                "redis.call('XADD', key, '*', 'kind', 'grant',",
                "redis.call('XADD', key, '*', 'kind', 'poke',",
            ),
            Edit(
                "asking.lua",
                "return grant(waiter, record, how, 0, waiter)",
                "S.told = true\n    return grant(waiter, record, how, 0, waiter)",
            ),
            Edit("asking.lua", "if S.lease_id == waiter then\n", "if S.lease_id == waiter and S.told then\n"),
        ],
    ),
    "last-in-first-out": Mutant(
        "who came last is served first",
        frozenset({"order"}),
        [
            Edit(
                "advance.lua",
                "redis.call('ZRANGE', queue_key, from, from + 15)",
                "redis.call('ZREVRANGE', queue_key, from, from + 15)",
            )
        ],
    ),
    "dropped-restore": Mutant(
        "agents say that a job is back without bringing it back", frozenset({"restored"}), patch=_dropped_restore
    ),
    "no-confirmation": Mutant(
        "nobody confirms that a waiter lives: it is not asked before a swap, and its grant counts at once",
        frozenset({"overlap", "resident", "restored"}),
        [
            Edit("poke.lua", "return { 'ok', seen }", "return { 'ok', 0 }"),
            Edit("lease.lua", "set('confirmed', direct and '1' or '0')", "set('confirmed', '1')"),
            Edit("lease.lua", "  if direct then\n    set('deadline_ms'", "  if true then\n    set('deadline_ms'"),
        ],
        _no_confirmation,
    ),
    "no-reclaim": Mutant(
        "a holder that has gone keeps the group",
        frozenset({"waiting"}),
        [
            Edit(
                "lease.lua",
                "local function reclaim(why)\n",
                "local function reclaim(why)\n  if S.confirmed == '1' then\n    return\n  end\n",
            )
        ],
    ),
    "early-expiry": Mutant(
        "after a clock step deadlines stand as they were",
        frozenset({"leases", "overlap"}),
        [Edit("group.lua", "    rebase()\n", "")],
    ),
    "reused-tokens": Mutant(
        "after data loss numbers begin again where the server stands",
        frozenset({"tokens", "overlap"}),
        [
            Edit("group.lua", "set('counter', math.max(S.counter + 1, now))", "set('counter', S.counter + 1)"),
            Edit(
                "group.lua",
                "  if floor > S.counter or (floor > 0 and floor < S.birth) then\n    note_loss()\n  end\n",
                "",
            ),
            Edit("renew.lua", "  set('counter', math.max(S.counter, token))\n", ""),
        ],
    ),
    "first-lease-unchecked": Mutant(
        "a hold of two groups does not look whether it still has the first when it gets the second",
        frozenset({"begun", "beside", "overlap"}),
        patch=_first_lease_unchecked,
    ),
    "unseen-is-out": Mutant(
        "of a job that an agent never saw it tells that it is out",
        frozenset({"beside", "content", "device", "resident", "restored"}),
        patch=_unseen_is_out,
    ),
    "wiped-is-nobodys": Mutant(
        "a process whose environment is wiped belongs to nobody",
        frozenset({"beside", "device", "resident"}),
        patch=_wiped_is_nobodys,
    ),
    "refused-is-ended": Mutant(
        "a registered process that can't be watched counts as ended",
        frozenset({"beside", "content", "device", "resident", "restored"}),
        patch=_refused_is_ended,
    ),
    "order-given-once": Mutant(
        "a step whose order was lost with the stream is not ordered again",
        frozenset({"recovery", "waiting"}),
        patch=_order_given_once,
    ),
    "no-exclusion": Mutant(
        "a group that is held is granted again",
        frozenset({"overlap", "resident"}),
        [Edit("advance.lua", "return S.lease_id ~= '' or S.swap_id ~= 0", "return S.swap_id ~= 0")],
    ),
}
NAMES = tuple(MUTANTS)
