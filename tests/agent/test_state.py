"""The pure parts: what a ledger says of an order, what measured memory says of a job, which backend applies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.agent.knobs import KnobBackend
from tests.agent.rig import Rig
from timeslice.agent import fencing, state
from timeslice.agent.choice import BackendSet
from timeslice.agent.devices import freed, left_behind, shortage
from timeslice.agent.journal import Journal
from timeslice.agent.owed import standing
from timeslice.agent.state import Answer, Ledger, Note, Owed, Seen, Undo
from timeslice.backends.base import Context, DeviceMemory
from timeslice.errors import BackendError, FaultKind, StaleCommandError
from timeslice.models import Command, Leave


def command(swap: int, step: Any = "prepare", attempt: int = 1) -> Command:
    return Command(
        id=f"{swap}/n1/{step}/{attempt}",
        group="g",
        node="n1",
        swap=swap,
        epoch=1,
        step=step,
        suspend_timeout_ms=1000,
        restore_timeout_ms=1000,
    )


PREPARED = Answer(outcome="prepared", seen=(Seen(job="a", state="resident"),))


def test_an_unknown_order_has_no_answer_and_a_begun_one_neither() -> None:
    """Only what was finished is answered from the journal."""
    order = command(5)
    assert Ledger().answer_to(order) is None
    assert state.begun(Ledger(), order, Undo()).answer_to(order) is None


def test_a_repeat_gets_the_whole_answer_only_while_nothing_came_after_it() -> None:
    """What an old order saw may not be true any more."""
    order, later = command(5), command(5, "commit", 2)
    ledger = state.finished(state.begun(Ledger(), order, Undo()), order, PREPARED)
    assert ledger.answer_to(order) == PREPARED
    ledger = state.begun(ledger, later, Undo())
    assert ledger.answer_to(order) == Answer(outcome="prepared")


def test_an_order_below_the_fence_is_stale_and_carries_the_floor() -> None:
    """A newer grant or swap was seen; the epoch is no part of the fence."""
    ledger = fencing.raised(Ledger(), floor=90, fence=70)
    fencing.check(ledger, command(70))
    with pytest.raises(StaleCommandError) as caught:
        fencing.check(ledger, command(69))
    assert caught.value.token == 90
    assert fencing.raised(ledger, floor=5, fence=5) == ledger


def test_a_new_swap_forgets_the_orders_of_the_old_one() -> None:
    """The fence rises with it."""
    ledger = state.begun(Ledger(), command(5), Undo(locked=("a",)))
    ledger = state.begun(ledger, command(6), Undo(locked=("b",)))
    assert [record.id for record in ledger.records] == ["6/n1/prepare/1"]
    assert (ledger.undo.locked, ledger.fence) == (("b",), 6)


def test_what_may_be_undone_grows_within_a_swap_and_ends_with_the_undo() -> None:
    """A second attempt keeps what the first one may have done."""
    ledger = state.begun(Ledger(), command(5), Undo(locked=("a",)))
    ledger = state.begun(ledger, command(5, "commit", 2), Undo(moved=("a",), returned="b"))
    ledger = state.begun(ledger, command(5, "commit", 3), Undo())
    assert ledger.undo == Undo(locked=("a",), moved=("a",), returned="b")
    failed = Answer(outcome="failed", kind="transient", error="x")
    assert state.finished(ledger, command(5, "commit", 3), failed).undo == ledger.undo
    undone = failed.model_copy(update={"undone": True})
    assert state.finished(ledger, command(5, "commit", 3), undone).undo == Undo()


@pytest.mark.parametrize(
    ("answer", "left_open"),
    [(None, True), (PREPARED, True), (Answer(outcome="done"), False), (Answer(outcome="failed", undone=True), False)],
)
def test_a_swap_that_is_over_is_tidied_up_only_if_it_left_something(answer: Answer | None, left_open: bool) -> None:
    """A job that is still locked, or an order whose end nobody knows."""
    order = command(5)
    ledger = state.begun(Ledger(), order, Undo(locked=("a",)))
    if answer:
        ledger = state.finished(ledger, order, answer)
    assert ledger.is_open(0) is left_open
    assert ledger.is_open(6) is left_open
    assert not ledger.is_open(5)
    assert not state.abandoned(ledger).is_open(0)


def test_orders_are_kept_within_bounds() -> None:
    """A coordinator that retries for ever does not fill the disk."""
    ledger = Ledger()
    for attempt in range(100):
        ledger = state.begun(ledger, command(5, attempt=attempt), Undo())
    assert len(ledger.records) == state.RECORDS_KEPT


async def test_the_journal_is_read_again_as_it_was_written(tmp_path: Path) -> None:
    """Everything of it survives."""
    journal = Journal(tmp_path / "journal.json")
    await journal.update(lambda ledger: state.noted(ledger, "a", Note(backend="x", footprint={"d": 5})))
    await journal.update(lambda ledger: state.begun(ledger, command(5), Undo(moved=("a",))))
    assert Journal(tmp_path / "journal.json").ledger == journal.ledger
    assert journal.ledger.notes["a"].footprint == {"d": 5}


async def test_an_unreadable_journal_is_set_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The agent starts, with what it observes; the file is kept for people."""
    (tmp_path / "journal.json").write_text("{half")
    assert Journal(tmp_path / "journal.json").ledger == Ledger()
    assert (tmp_path / "journal.unreadable").read_text() == "{half"
    assert "what is observed counts" in caplog.text


def device(name: str, free: int, *holders: tuple[int, int]) -> DeviceMemory:
    return DeviceMemory(device=name, total_bytes=100, free_bytes=free, holders=holders)


def test_what_became_free_is_counted_per_device() -> None:
    """A device that got fuller meanwhile counts as nothing freed."""
    assert freed({"d0": 10, "d1": 50}, [device("d0", 90), device("d1", 40)]) == {"d0": 80, "d1": 0}


def test_a_job_fits_where_it_was_or_not_at_all() -> None:
    """Room on another device is no use to it; what its own processes hold is no obstacle."""
    devices = [device("d0", 20, (7, 60), (8, 20)), device("d1", 100)]
    assert shortage(devices, {"d0": 20}, 0, ()) == ""
    assert shortage(devices, {"d0": 50}, 0, ()) == (
        "device d0: 50 bytes needed, 20 free; process 7 holds 60, process 8 holds 20"
    )
    assert shortage(devices, {"d0": 50}, 0, {7}) == ""
    assert shortage(devices, {}, 120, ()) == ""
    assert "process 7 holds 60" in shortage(devices, {}, 121, ())
    assert shortage([], {"d0": 50}, 50, ()) == ""


def test_memory_of_the_dead_is_told_by_holders_or_by_what_nobody_explains() -> None:
    """A living squatter's memory is not a dead job's."""
    assert left_behind([device("d0", 40, (7, 60))], frozenset({7}), 0, 60) == 60
    assert left_behind([device("d0", 40, (8, 60))], frozenset({7}), 0, 60) == 0
    assert left_behind([device("d0", 40)], frozenset({7}), 0, 60) == 60
    assert left_behind([device("d0", 40)], frozenset({7}), 60, 60) == 0
    assert left_behind([device("d0", 40)], frozenset({7}), 0, 0) == 0
    assert left_behind([], frozenset({7}), 0, 60) == 0


@pytest.fixture
def backends(tmp_path: Path) -> BackendSet:
    options = {"folder": str(tmp_path)}
    made = {name: KnobBackend(Context(group="g", node="n1", options=options)) for name in ("channel", "outside", "x")}
    return BackendSet("g", "n1", made)


def test_the_channel_is_used_only_while_its_process_runs(rig: Rig, backends: BackendSet) -> None:
    """No channel, or a stopped process: the next backend that applies takes its place."""
    process = rig.spawn()
    plain = rig.target("a", process.pid)
    listening = rig.target("a", process.pid, channel="n1.1.1")
    assert backends.choose("a", [plain]) is backends["outside"]
    assert backends.choose("a", [listening, plain]) is backends["channel"]
    process.send_signal(19)
    while (found := rig.target("a", process.pid)) and _state(found.pid) != "T":
        pass
    assert backends.choose("a", [listening]) is backends["outside"]
    assert backends.observer([listening]) is backends["outside"]


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]


def test_a_process_may_ask_for_a_backend_and_a_suspended_job_keeps_its_own(rig: Rig, backends: BackendSet) -> None:
    """What it registered for wins if the agent has it; else a clear error. Who suspended a job restores it."""
    pid = rig.spawn().pid
    assert backends.choose("a", [rig.target("a", pid, backend="x")]) is backends["x"]
    assert backends.choose("a", [rig.target("a", pid)], prefer="x") is backends["x"]
    with pytest.raises(BackendError, match="its processes ask for cuda; this agent has: channel, outside, x"):
        backends.choose("a", [rig.target("a", pid, backend="cuda")])


def test_who_left_by_a_backend_that_this_agent_lacks_is_not_given_to_another(rig: Rig, backends: BackendSet) -> None:
    """An agent was started anew with other backends: nobody else has the copy, nor knows where it is."""
    target = rig.target("a", rig.spawn().pid)
    with pytest.raises(BackendError, match=r"left by the backend gone.*has: channel, outside, x") as caught:
        backends.choose("a", [target], prefer="gone", force=True)
    assert caught.value.kind is FaultKind.UNSUPPORTED


def test_no_backend_that_applies_is_an_error_with_the_remedy(rig: Rig, backends: BackendSet) -> None:
    """A group with the channel only, and a job that does not listen."""
    only = BackendSet("g", "n1", {"channel": backends["channel"]})
    with pytest.raises(BackendError, match="does not answer on its channel"):
        only.choose("a", [rig.target("a", rig.spawn().pid)])


async def test_a_journal_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    """Written before parts of jobs, and what they owe, were known: how jobs left and what could be undone stays known,
    and such a job left as a whole."""
    old = {
        "version": 1,
        "floor": 9,
        "fence": 8,
        "swap": 8,
        "records": [{"id": "8/n1/commit/1", "step": "commit", "answer": None}],
        "undo": {"locked": ["a"], "moved": ["a"], "returned": "b", "force": False},
        "notes": {"b": {"backend": "arena", "footprint": {"d0": 7}, "processes": [[5, 6]]}},
    }
    (tmp_path / "journal.json").write_text(json.dumps(old))
    ledger = Journal(tmp_path / "journal.json").ledger
    assert ledger.fence == 8
    assert ledger.undo.jobs == ("a", "b")
    assert ledger.notes["b"] == Note(backend="arena", footprint={"d0": 7}, processes=((5, 6),))
    assert ledger.notes["b"].leave == Leave()
    assert ledger.owed == {}


def test_enough_of_what_is_due_has_to_be_free() -> None:
    """G06: by the devices' word where they can tell of the job; what a comer took meanwhile is counted on top. Of a
    part of unknown size, what its backend shows to be gone is due."""
    owed = Owed(processes=((5, 6),), had=60, due=60, share=0.9, there=60, free={"d0": 10})
    assert standing(owed, [device("d0", 10)], 0).left == 60
    assert standing(owed, [device("d0", 63)], 0).left == 7
    assert standing(owed, [device("d0", 64)], 0).left == 0
    assert standing(owed, [device("d0", 24)], 0, {"d0": 40}).left == 0
    assert standing(owed, [], 0).left == 60
    part = owed.model_copy(update={"due": None})
    assert standing(part, [device("d0", 10)], 40).left == 20
    assert standing(part, [device("d0", 30)], 40).left == 0
    elsewhere = owed.model_copy(update={"there": 3})
    assert standing(elsewhere, [device("d0", 10)], 60).left == 60
    assert standing(elsewhere, [device("d0", 10)], 0).left == 0
