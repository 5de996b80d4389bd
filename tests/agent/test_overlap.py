"""One job comes in while another one goes out, where measured memory has room for both."""

from __future__ import annotations

import json
import signal
from typing import Any

import pytest

from tests.agent.rig import Rig, until
from timeslice.agent import moving
from timeslice.locks import scripts
from timeslice.models import Command


async def _commit(rig: Rig, leaving: int, coming: int) -> Command:
    """Job a is on the device and prepared, b is suspended and about to come in: the commit, not sent yet."""
    await rig.job("b", coming)
    await rig.swap("b", into="a")
    await rig.job("a", leaving)
    await rig.yield_("a")
    await rig.acquire("b")
    swap = await rig.plan("a", into="b")
    assert (await rig.order(rig.command(swap, "prepare", "a", into="b")))["step"] == "prepared"
    await rig.step("prepare", "commit")
    rig.fake.knob("overlaps", on=True)
    return rig.command(swap, "commit", "a", into="b")


def _state(rig: Rig) -> Any:
    return {job: (rig.fake.state(job), rig.fake.locked(job)) for job in "ab"}


BEFORE = {"a": ("resident", False), "b": ("suspended", False)}
AFTER = {"a": ("suspended", False), "b": ("resident", False)}


async def test_both_copies_run_at_once_and_nobody_runs_before_both_are_done(rig: Rig) -> None:
    """With room for both, the comer is copied in while the leaver is being copied out. It stands still, and holds
    nothing, until the leaver is out by measure; what each freed or took is told apart."""
    async with rig.agent():
        command = await _commit(rig, 300, 400)
        rig.fake.knob("suspend", hang=True)
        await rig.send(command)
        await until(lambda: _state(rig)["b"] == ("resident", True), "b is copied in")
        assert rig.fake.state("a") == "resident"
        assert not (await rig.view()).holder
        assert isinstance(await rig.promote(command.swap), scripts.Open)
        (rig.fake.folder / "release").touch()
        assert (await rig.outcome(command))["step"] == "done"
        assert _state(rig) == AFTER
        ledger = json.loads((rig.folder / "state" / "groups" / rig.name / "journal.json").read_text())
        assert ledger["notes"]["a"]["footprint"] == {"fake0": 300}
        assert "b" not in ledger["notes"]
        assert isinstance(await rig.promote(command.swap), scripts.Promoted)


@pytest.mark.parametrize(
    ("leaving", "coming", "able", "force"),
    [(600, 500, True, False), (300, 400, False, False), (300, 400, True, True)],
    ids=["no room for both", "a backend that can not", "by force"],
)
async def test_else_the_leaver_goes_first(rig: Rig, leaving: int, coming: int, *, able: bool, force: bool) -> None:
    """Nothing is copied in before what does not fit beside it is out: as the leaver stays, nobody was touched."""
    async with rig.agent():
        command = await _commit(rig, leaving, coming)
        if not able:
            rig.fake.write("knobs", {})
        rig.fake.knob("suspend", fail=-1)
        assert (await rig.order(command.model_copy(update={"force": force})))["step"] == "failed"
        assert "restore b" not in rig.fake.calls()
        assert _state(rig) == BEFORE


async def test_two_that_leave_go_before_anybody_comes(rig: Rig) -> None:
    """What each of two freed could not be told apart beside a comer."""
    async with rig.agent():
        await rig.job("c", 100)
        command = await _commit(rig, 300, 400)
        rig.fake.knob("suspend", fail=-1)
        assert (await rig.order(command.model_copy(update={"out": ("a", "c")})))["step"] == "failed"
        assert "restore b" not in rig.fake.calls()


async def test_what_does_not_fit_beside_each_other_goes_one_after_the_other(rig: Rig) -> None:
    """A backend that could overlap is no reason to try it where measured memory says no."""
    async with rig.agent():
        command = await _commit(rig, 600, 500)
        assert (await rig.order(command))["step"] == "done"
        assert _state(rig) == AFTER


@pytest.mark.parametrize("broken", [("suspend",), ("restore",), ("suspend", "restore")], ids="+".join)
async def test_one_that_fails_undoes_both(rig: Rig, broken: tuple[str, ...]) -> None:
    """The other copy is finished first; then the node is as it was before the swap, and the comer never ran."""
    async with rig.agent():
        command = await _commit(rig, 300, 400)
        for operation in broken:
            rig.fake.knob(operation, fail=3, delay=0.05)
        failed = await rig.order(command)
        assert (failed["step"], failed["kind"]) == ("failed", "transient")
        assert f"{broken[0]} fails by order of the test" in failed["error"]
        assert _state(rig) == BEFORE
        assert "release b" not in rig.fake.calls()
        await rig.settle(command.swap)


async def test_memory_that_was_not_freed_is_noticed_beside_a_comer(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """F06: what the comer takes is not taken for what the leaver kept, nor hides it."""
    monkeypatch.setattr(moving, "FREE_S", 0.5)
    async with rig.agent():
        command = await _commit(rig, 300, 400)
        rig.fake.knob("suspend", share=0.5, of="a")
        failed = await rig.order(command)
        assert failed["step"] == "failed"
        assert "only 150 of its 300 bytes were measured free" in failed["error"]
        assert _state(rig) == BEFORE
        assert "release b" not in rig.fake.calls()


# In the fast tier: one copy is made and not noted, the other not begun.
@pytest.mark.parametrize(
    ("moment", "operation"),
    [
        pytest.param("before", "suspend", marks=pytest.mark.slow),
        ("after", "suspend"),
        ("before", "restore"),
        pytest.param("after", "restore", marks=pytest.mark.slow),
        pytest.param("before", "release", marks=pytest.mark.slow),
        pytest.param("after", "release", marks=pytest.mark.slow),
    ],
)
async def test_an_agent_killed_in_between_finishes_both(rig: Rig, operation: str, moment: str) -> None:
    """Killed at any point of either copy, the next run finishes the order from what it observes."""
    agent = rig.spawn_agent()
    command = await _commit(rig, 300, 400)
    rig.fake.knob(operation, die=moment)
    await rig.send(command)
    assert await until(agent.poll, "the agent died") == -signal.SIGKILL
    rig.fake.write("knobs", {"overlaps": {"on": True}})
    rig.spawn_agent()
    assert (await rig.outcome(command))["step"] == "done"
    assert _state(rig) == AFTER
    assert isinstance(await rig.promote(command.swap), scripts.Promoted)


@pytest.mark.parametrize("operation", ["suspend", pytest.param("restore", marks=pytest.mark.slow)])
async def test_an_agent_killed_in_between_can_still_undo_both(rig: Rig, operation: str) -> None:
    """What may have been done was on disk before either copy began, so a rollback finds it."""
    agent = rig.spawn_agent()
    command = await _commit(rig, 300, 400)
    rig.fake.knob(operation, die="after")
    await rig.send(command)
    assert await until(agent.poll, "the agent died") == -signal.SIGKILL
    rig.fake.write("knobs", {"overlaps": {"on": True}, "suspend": {"fail": 3}, "restore": {"fail": 3}})
    rig.spawn_agent()
    await rig.outcome(command)
    await rig.step("commit", "rollback")
    rig.fake.write("knobs", {})
    undone = await rig.order(rig.command(command.swap, "rollback", "a", into="b"))
    assert undone["step"] == "rolled back"
    assert _state(rig) == BEFORE


async def test_what_came_in_before_the_agent_was_killed_hides_nothing(rig: Rig) -> None:
    """The comer is in, the leaver is out, and the agent is killed before it measures: the next run tells both apart."""
    agent = rig.spawn_agent()
    command = await _commit(rig, 300, 400)
    rig.fake.knob("suspend", hang=True, die="after")
    await rig.send(command)
    await until(lambda: _state(rig)["b"] == ("resident", True), "b is copied in")
    (rig.fake.folder / "release").touch()
    assert await until(agent.poll, "the agent died") == -signal.SIGKILL
    assert _state(rig) == {"a": ("suspended", False), "b": ("resident", True)}
    rig.fake.write("knobs", {"overlaps": {"on": True}})
    rig.spawn_agent()
    assert (await rig.outcome(command))["step"] == "done"
    assert _state(rig) == AFTER


@pytest.mark.parametrize(
    ("moment", "operation"),
    [
        pytest.param("before", "suspend", marks=pytest.mark.slow),
        ("after", "suspend"),
        pytest.param("before", "restore", marks=pytest.mark.slow),
        pytest.param("after", "restore", marks=pytest.mark.slow),
    ],
)
async def test_a_lie_that_outlives_the_agent_is_found_beside_a_comer(rig: Rig, operation: str, moment: str) -> None:
    """G06: the leaver's memory stays taken, and the agent is killed in between. The next run knows what was free before
    either copy, tells what the comer took from it, and undoes both."""
    agent = rig.spawn_agent(free_s=0.3)
    command = await _commit(rig, 300, 400)
    lie = {"share": 0.5, "of": "a"}
    rig.fake.write("knobs", {"overlaps": {"on": True}, "suspend": lie, operation: {**lie, "die": moment}})
    await rig.send(command)
    assert await until(agent.poll, "the agent died") == -signal.SIGKILL
    rig.fake.write("knobs", {"overlaps": {"on": True}, "suspend": lie})
    rig.spawn_agent(free_s=0.3)
    failed = await rig.outcome(command, 40)
    assert failed["step"] == "failed"
    assert "only 150 of its 300 bytes were measured free" in failed["error"]
    assert _state(rig) == BEFORE
    assert "release b" not in rig.fake.calls()
