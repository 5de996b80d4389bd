"""Device memory that stays taken after a suspend that was said to have worked, and that could not be undone (G06)."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.agent.rig import Rig, until
from timeslice.agent import moving
from timeslice.agent.journal import Journal
from timeslice.agent.owed import Debts
from timeslice.agent.state import Owed, owing
from timeslice.backends.base import DeviceMemory, Probe
from timeslice.cli.node_memory import suspended
from timeslice.coordinator.service import CoordinatorOptions, run_coordinator
from timeslice.errors import BackendError, FaultKind
from timeslice.models import Command, Leave, Residency, Target

FREE_S = 0.3


@pytest.fixture(autouse=True)
def _not_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moving, "FREE_S", FREE_S)


async def _commit(rig: Rig, *out: str, into: str | None) -> Command:
    """A swap that is prepared: the order to commit it, not sent yet."""
    swap = (await rig.view()).swap
    assert (await rig.order(rig.command(swap, "prepare", *out, into=into)))["step"] == "prepared"
    await rig.step("prepare", "commit")
    return rig.command(swap, "commit", *out, into=into)


async def _over(rig: Rig, swap: int, *out: str, into: str | None) -> None:
    """The swap is undone as far as it can be, and ends."""
    await rig.step("commit", "rollback")
    await rig.order(rig.command(swap, "rollback", *out, into=into))
    await rig.settle(swap)


async def _lie(rig: Rig, **suspend: Any) -> Command:
    """Job a, which holds 600 bytes, is to leave for job b; its suspend frees nothing, and it can't be brought back."""
    await rig.job("a", 600)
    await rig.begin_swap("a", into="b")
    command = await _commit(rig, "a", into=None)
    rig.fake.knob("suspend", share=0.0, **suspend)
    rig.fake.knob("restore", fail=-1)
    return command


async def _refused(rig: Rig, job: str, *out: str) -> str:
    """Why a waiter that has nothing saved does not get in, by the answer to its swap's first order."""

    async def tried() -> Any:
        return (await rig.view()).swap

    await rig.acquire(job)
    await until(tried, "a swap is tried")
    swap = await rig.plan(*out, into=None)
    refused = await rig.order(rig.command(swap, "prepare", *out, into=None))
    assert refused["step"] == "failed"
    await rig.settle(swap, refused["error"])
    return refused["error"]


async def test_who_left_memory_behind_is_not_out_for_a_first_load(rig: Rig) -> None:
    """G06: the suspend is said to have worked and freed nothing, and the undo fails, too. The job is suspended by its
    backend's word, but nobody gets in beside its memory, also who has nothing to bring in; figures and pid are told."""
    async with rig.agent():
        command = await _lie(rig)
        failed = await rig.order(command)
        assert failed["step"] == "failed"
        assert "only 0 of its 600 bytes were measured free" in failed["error"]
        assert "restore fails by order of the test" in failed["error"]
        assert rig.fake.state("a") == "suspended"
        assert (await rig.view()).jobs["a"].residency == "suspending"
        taken = {"group": rig.name, "job": "a", "host_bytes": 600, "device_bytes": 600}
        assert suspended(await rig.view(), rig.node) == [taken]
        await _over(rig, command.swap, "a", into=None)
        why = await _refused(rig, "c", "a")
        assert "only 0 of its 600 bytes were measured free" in why
        assert "400 of 1000 bytes are free" in why
        assert f"end its processes ({rig.processes[0].pid})" in why
        view = await rig.view()
        assert not view.holder
        assert any("only 0 of its 600 bytes" in (each.deferred or "") for each in view.queue)


async def test_weights_that_were_dropped_are_due_also_of_who_owes(rig: Rig) -> None:
    """G21: the content is gone, be it that its memory is not free yet."""
    async with rig.agent():
        await rig.register(rig.target("a", rig.spawn(job="a").pid, leave=Leave(mode="discard")))
        rig.fake.load("a", 600)
        rig.fake.write("a", {**rig.fake.read("a"), "pid": rig.processes[0].pid})
        await rig.begin_swap("a", into="b")
        command = await _commit(rig, "a", into=None)
        rig.fake.knob("suspend", share=0.0)
        rig.fake.knob("restore", fail=-1)
        await rig.order(command)
        assert "suspend a discard" in rig.fake.asked()
        assert await rig.member_state("a") == "suspending"
        assert (await rig.view()).jobs["a"].needs_weights


async def test_memory_that_becomes_free_later_lets_the_waiter_in(rig: Rig) -> None:
    """G06: the driver lets go much later than it said: it is noticed, and the waiter is tried again by itself."""
    async with rig.agent(ttl_s=1.5):
        command = await _lie(rig)
        await rig.order(command)
        await _over(rig, command.swap, "a", into=None)
        assert await rig.member_state("a") == "suspending"
        rig.fake.write("a", {**rig.fake.read("a"), "until": 0})

        async def inside() -> bool:
            return (await rig.view()).holder == "b"

        async def settled() -> bool:
            return await rig.member_state("a") == "suspended"

        await until(settled, "job a counts as out")
        assert (await rig.member("a")).device_bytes == 0
        await rig.acquire("b")
        await until(inside, "job b is in")
        await rig.job("b", 900)
    async with rig.agent():  # it has looked at everybody before it serves
        assert await rig.member_state("a") == "suspended"


async def test_processes_that_end_settle_what_they_owed(rig: Rig) -> None:
    """G06: the end of the job's processes frees what the driver kept, and that is all it takes."""
    async with rig.agent(ttl_s=1.5):
        command = await _lie(rig)
        await rig.order(command)
        await _over(rig, command.swap, "a", into=None)
        rig.processes[0].kill()
        rig.processes[0].wait()

        async def gone() -> bool:
            return await rig.member("a") is None

        await until(gone, "job a is gone")
        await until(lambda: not _ledger(rig)["owed"], "nothing is owed")


async def test_the_job_itself_comes_back_while_it_owes(rig: Rig) -> None:
    """Its saved copy is intact: its own turn brings it back, and then it owes nothing."""
    async with rig.agent():
        command = await _lie(rig)
        await rig.order(command)
        await _over(rig, command.swap, "a", into=None)
        assert _ledger(rig)["notes"]["a"]["backend"] == "knobs"  # who moved it out brings it back
        rig.fake.write("knobs", {})
        await rig.acquire("a")

        async def tried() -> Any:
            return (await rig.view()).swap

        await until(tried, "a swap for a is tried")
        await rig.plan(into="a")
        assert (await rig.order(await _commit(rig, into="a")))["step"] == "done"
        assert rig.fake.state("a") == "resident"
        assert _ledger(rig)["owed"] == {}


async def test_a_waiter_gets_in_by_itself_when_the_memory_is_free(rig: Rig) -> None:
    """G06, with a real coordinator: who waits reads the figures, and nobody has to help once the memory is free."""
    stop, ready = asyncio.Event(), asyncio.Event()
    options = CoordinatorOptions(url=rig.url, prefix=rig.prefix, name="c1")
    task = asyncio.create_task(run_coordinator(options, ready=ready.set, stop=stop))
    await asyncio.wait_for(ready.wait(), 20)
    try:
        async with rig.agent(ttl_s=1.5):
            await rig.job("a", 600)
            rig.fake.knob("suspend", share=0.0)
            rig.fake.knob("restore", fail=-1)
            await rig.acquire("a")
            await rig.acquire("b")
            await rig.yield_("a")

            async def told() -> bool:
                view = await rig.view()
                return not view.swap and any("of its 600 bytes" in (each.deferred or "") for each in view.queue)

            await until(told, "b reads why it waits")
            assert await rig.member_state("a") == "suspending"
            await rig.acquire("c")
            await until(told, "b waits on")
            assert not (await rig.view()).holder
            rig.fake.write("a", {**rig.fake.read("a"), "until": 0})
            holders = set()

            async def inside() -> bool:
                holders.add((await rig.view()).holder)
                return bool(holders & {"b", "c"})

            await until(inside, "somebody is in")
            assert "a" not in holders
            assert (await rig.view()).jobs["a"].residency == "suspended"
    finally:
        stop.set()
        await task


@pytest.mark.parametrize(
    "killed",
    [
        pytest.param("in the suspend", marks=pytest.mark.slow),
        "in the undo",
        pytest.param("after the answer", marks=pytest.mark.slow),
    ],
)
async def test_a_restarted_agent_still_knows_what_is_owed(rig: Rig, killed: str) -> None:
    """G06: what was due and what was free before is on disk before the suspend, so that the next agent counts, too."""
    agent = rig.spawn_agent(free_s=FREE_S)
    command = await _lie(rig, **({"die": "after"} if killed == "in the suspend" else {}))
    if killed == "in the undo":
        rig.fake.knob("restore", die="before")
    await rig.send(command)
    if killed == "after the answer":
        await rig.outcome(command)
        agent.kill()
    assert agent.wait(30) == -signal.SIGKILL
    rig.fake.write("knobs", {"restore": {"fail": -1}})
    rig.spawn_agent(free_s=FREE_S)
    failed = await rig.outcome(command, 40)
    assert failed["step"] == "failed"
    assert "only 0 of its 600 bytes were measured free" in failed["error"]
    await _over(rig, command.swap, "a", into=None)
    assert await rig.member_state("a") == "suspending"
    assert "only 0 of its 600 bytes" in await _refused(rig, "c", "a")
    assert not (await rig.view()).holder


async def test_a_swap_that_ended_meanwhile_leaves_the_debt(rig: Rig) -> None:
    """Killed in the suspend, and the swap is over when the next agent comes: still nobody gets in."""
    agent = rig.spawn_agent(free_s=FREE_S)
    command = await _lie(rig, die="after")
    await rig.send(command)
    assert agent.wait(60) == -signal.SIGKILL
    rig.fake.write("knobs", {"restore": {"fail": -1}})
    await rig.driver.client.flushall()
    rig.spawn_agent(free_s=FREE_S)

    async def told() -> bool:
        return await rig.member_state("a") == "suspending"

    await until(told, "the agent tells what is owed")
    await until(lambda: _ledger(rig)["notes"], "how it left is known")
    assert _ledger(rig)["notes"]["a"]["leave"]["mode"] == "offload"
    await rig.acquire("c")
    assert not (await rig.view()).holder


async def test_nobody_else_in_the_memory_is_taken_for_a_debt(rig: Rig) -> None:
    """Once it was measured free it is settled for good: who comes in then takes that memory with right."""
    async with rig.agent(ttl_s=1.5):
        await rig.job("a", 600)
        await rig.swap("a", into="b")
        await rig.job("b", 900)
        assert _ledger(rig)["owed"] == {}
    async with rig.agent():  # it has looked at everybody before it serves
        assert await rig.member_state("a") == "suspended"


def _ledger(rig: Rig) -> Any:
    return json.loads((rig.folder / "state" / "groups" / rig.name / "journal.json").read_text())


def test_an_earlier_run_of_the_job_owes_nothing_for_this_one(tmp_path: Path) -> None:
    """A number that was given to another process does not inherit what the one before had."""
    journal = Journal(tmp_path / "journal.json")
    owed = Owed(processes=((5, 60),), had=9, due=9, share=0.9, there=9)
    journal.ledger = owing(journal.ledger, "a", owed)
    debts = Debts(journal, _nothing)
    target = Target(job="a", host="n1", pid=5, start=60, uid=0, pid_namespace="x")
    assert debts.of("a", [target]) == owed
    assert debts.of("a", [target.model_copy(update={"start": 61})]) is None
    assert debts.of("b", [target]) is None


async def test_what_can_not_be_measured_is_still_owed(tmp_path: Path) -> None:
    """G06: that nobody can tell how full the devices are is no word that they are free."""
    journal = Journal(tmp_path / "journal.json")
    owed = Owed(processes=((5, 60),), had=9, due=9, share=0.9, there=9)
    journal.ledger = owing(journal.ledger, "a", owed)
    target = Target(job="a", host="n1", pid=5, start=60, uid=0, pid_namespace="x")
    debt = await Debts(journal, _broken).of_one_out("a", [target], Probe(state=Residency.SUSPENDED))
    assert debt is not None
    assert debt.left == 9
    assert "can't be told: the driver does not answer" in debt.told


async def _nothing() -> tuple[DeviceMemory, ...]:
    return ()


async def _broken() -> tuple[DeviceMemory, ...]:
    raise BackendError("the driver does not answer", kind=FaultKind.TRANSIENT)
