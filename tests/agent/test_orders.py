"""Orders of a coordinator, carried out by a real agent with a backend that a test can spoil."""

from __future__ import annotations

from typing import Any

import pytest

from tests.agent.rig import Rig, until
from timeslice.agent import executor
from timeslice.agent.group import Scope
from timeslice.agent.steps import Steps
from timeslice.errors import RedisUnreachableError
from timeslice.locks import scripts


async def test_a_swap_moves_one_job_out_and_the_other_in(rig: Rig) -> None:
    """After prepare and commit the leaver is in host memory, the comer on the device, and the waiter is granted."""
    async with rig.agent():
        await rig.job("a", 600)
        await rig.job("b", 500)
        await rig.swap("a", into="b")
        assert (rig.fake.state("a"), rig.fake.state("b")) == ("suspended", "resident")
        view = await rig.view()
        assert view.holder == "b"
        assert {job.job: job.residency for job in view.jobs.values()} == {"a": "suspended", "b": "resident"}
        await rig.yield_("b")
        await rig.acquire("a")
        swap = await rig.plan("b", into="a")
        assert (await rig.order(rig.command(swap, "prepare", "b", into="a")))["step"] == "prepared"
        await rig.step("prepare", "commit")
        assert (await rig.order(rig.command(swap, "commit", "b", into="a")))["step"] == "done"
        assert (rig.fake.state("a"), rig.fake.state("b")) == ("resident", "suspended")
        assert not rig.fake.locked("a")
        await rig.idle()


async def test_an_order_that_was_not_accepted_touches_nothing(rig: Rig) -> None:
    """Without the group's word an order is dropped: wrong swap, wrong epoch, wrong step, each changes nothing. †"""
    async with rig.agent():
        await rig.job("a", 600)
        swap = await rig.begin_swap("a", into="b")
        await rig.send(rig.command(swap + 1, "prepare", "a", into="b"))
        await rig.send(rig.command(swap, "prepare", "a", into="b", epoch=rig.epoch + 1))
        await rig.send(rig.command(swap, "commit", "a", into="b"))
        await rig.idle()
        assert rig.fake.calls() == []
        good = await rig.order(rig.command(swap, "prepare", "a", into="b"))
        assert good["step"] == "prepared"


async def test_a_stale_swap_is_refused_by_the_fence_on_disk(rig: Rig) -> None:
    """L08: an agent that has seen a newer swap refuses an older one, even if Redis has forgotten and would accept."""
    async with rig.agent():
        await rig.job("a", 600)
        await rig.swap("a", into="b")
    calls = rig.fake.calls()
    old = int((await rig.events("SwapStarted"))[-1]["swap"]) - 1
    async with rig.agent():
        forgotten = {"swap_id": str(old), "swap_step": "commit", "swap_deadline_ms": "9999999999999", "lease_id": ""}
        for name, value in forgotten.items():
            await rig.driver.client.hset(rig.group.state, name, value)
        await rig.send(rig.command(old, "commit", "b", into="a"))
        await rig.idle()
        assert rig.fake.calls() == calls


async def test_the_same_order_twice_runs_once_and_gets_the_same_answer(rig: Rig) -> None:
    """A second delivery of a command id is answered from the journal."""
    async with rig.agent():
        await rig.job("a", 600)
        swap = await rig.begin_swap("a", into="b")
        command = rig.command(swap, "prepare", "a", into="b")
        first = await rig.order(command)
        rig.fake.write("a", {**rig.fake.read("a"), "locked": False})  # a second run would lock it again
        await rig.send(command)
        await rig.idle()
        assert rig.fake.calls() == ["prepare a"]
        assert await rig.outcome(command) == first


async def test_a_suspend_that_fails_leaves_the_job_running_where_it_was(rig: Rig) -> None:
    """G04: after a failed commit the node is as before: the job on the device, unlocked, and the fault told."""
    async with rig.agent():
        await rig.job("a", 600)
        swap = await rig.begin_swap("a", into="b")
        await rig.order(rig.command(swap, "prepare", "a", into="b"))
        assert rig.fake.locked("a")
        await rig.step("prepare", "commit")
        rig.fake.knob("suspend", fail=-1, kind="poisoned")
        failed = await rig.order(rig.command(swap, "commit", "a", into="b"))
        assert failed["step"] == "failed"
        assert failed["kind"] == "poisoned"
        assert (rig.fake.state("a"), rig.fake.locked("a")) == ("resident", False)
        assert (await rig.view()).jobs["a"].residency == "resident"


async def test_a_restore_that_fails_rolls_the_node_back(rig: Rig) -> None:
    """When the comer can't come in, the leaver is brought back and the comer's saved copy stays."""
    async with rig.agent():
        await rig.job("a", 600)
        await rig.job("b", 500)
        await rig.swap("a", into="b")
        await rig.yield_("b")
        await rig.acquire("a")
        swap = await rig.plan("b", into="a")
        await rig.order(rig.command(swap, "prepare", "b", into="a"))
        await rig.step("prepare", "commit")
        rig.fake.knob("restore", fail=1, kind="poisoned")
        failed = await rig.order(rig.command(swap, "commit", "b", into="a"))
        assert failed["step"] == "failed"
        assert (rig.fake.state("a"), rig.fake.state("b")) == ("suspended", "resident")
        assert not rig.fake.locked("b")


async def test_a_rollback_undoes_a_commit_that_was_done(rig: Rig) -> None:
    """A peer failed after this node had swapped: who came in leaves again, who had left comes back."""
    async with rig.agent():
        await rig.job("a", 600)
        await rig.job("b", 500)
        await rig.swap("a", into="b")
        await rig.yield_("b")
        await rig.acquire("a")
        swap = await rig.plan("b", into="a")
        await rig.order(rig.command(swap, "prepare", "b", into="a"))
        await rig.step("prepare", "commit")
        assert (await rig.order(rig.command(swap, "commit", "b", into="a")))["step"] == "done"
        await rig.step("commit", "rollback")
        rolled = await rig.order(rig.command(swap, "rollback", "b", into="a"))
        assert rolled["step"] == "rolled back"
        assert (rig.fake.state("a"), rig.fake.state("b")) == ("suspended", "resident")
        assert not rig.fake.locked("b")
        await rig.settle(swap)


async def test_a_rollback_of_a_prepare_lets_the_job_run_on(rig: Rig) -> None:
    """What was locked is unlocked, nothing moves."""
    async with rig.agent():
        await rig.job("a", 600)
        swap = await rig.begin_swap("a", into="b")
        await rig.order(rig.command(swap, "prepare", "a", into="b"))
        await rig.step("prepare", "rollback")
        rolled = await rig.order(rig.command(swap, "rollback", "a", into="b"))
        assert rolled["step"] == "rolled back"
        assert rig.fake.calls() == ["prepare a", "abort a"]
        assert not rig.fake.locked("a")


async def test_one_flake_is_tried_again_and_nobody_notices(rig: Rig) -> None:
    """F03: a lock and a copy that fail once are tried again within the step."""
    async with rig.agent():
        await rig.job("a", 600)
        rig.fake.knob("prepare", fail=1)
        rig.fake.knob("suspend", fail=1)
        await rig.swap("a", into="b")
        assert rig.fake.state("a") == "suspended"


async def test_busy_is_tried_again_until_the_deadline(rig: Rig) -> None:
    """G19: a workload that is busy twice is asked a third time."""
    async with rig.agent():
        await rig.job("a", 600)
        rig.fake.knob("prepare", fail=2, kind="busy")
        await rig.swap("a", into="b")
        assert rig.fake.calls().count("prepare a") == 3


async def test_a_hang_in_one_group_stops_no_other(rig: Rig) -> None:
    """While a backend of one group hangs, another group of the same node swaps, and both keep beating."""
    other = Rig(rig.url, rig.prefix, rig.folder, name="h")
    try:
        async with rig.agent(groups=("g", "h")):
            await rig.job("a", 600)
            await other.job("c", 600)
            rig.fake.knob("suspend", hang=True)
            swap = await rig.begin_swap("a", into="b")
            await rig.order(rig.command(swap, "prepare", "a", into="b"))
            await rig.step("prepare", "commit")
            commit = rig.command(swap, "commit", "a", into="b", suspend_timeout_ms=300)
            await rig.send(commit)
            await until(lambda: "suspend a" in rig.fake.calls(), "the suspend hangs")
            await other.swap("c", into="d")
            assert other.fake.state("c") == "suspended"

            async def marked() -> bool:
                record = await rig.driver.client.hget(rig.keys.node_state(rig.node), "overdue")
                return b"suspend of job a" in (record or b"")

            await until(marked, "the overdue suspend is marked in the node's record")
            (rig.fake.folder / "release").touch()
            assert (await rig.outcome(commit))["step"] == "done"
    finally:
        await other.close()


async def test_invalid_orders_are_dropped_and_the_next_one_is_done(rig: Rig) -> None:
    """Garbage on the stream, an order for a group that is not served, and a bad swap number stop nothing."""
    async with rig.agent():
        await rig.job("a", 600)
        stream = rig.keys.commands(rig.node)
        await rig.driver.client.xadd(stream, {"body": "{not json"})
        await rig.driver.client.xadd(stream, {"other": "x"})
        swap = await rig.begin_swap("a", into="b")
        await rig.send(rig.command(swap, "prepare", "a", into="b", group="elsewhere"))
        assert (await rig.order(rig.command(swap, "prepare", "a", into="b")))["step"] == "prepared"
        await rig.idle()


async def test_an_order_that_was_there_before_the_agent_is_carried_out(rig: Rig) -> None:
    """The consumer group begins at 0: what was ordered before it existed counts."""
    async with rig.agent():
        await rig.job("a", 600)
        swap = await rig.begin_swap("a", into="b")
    stream = rig.keys.commands(rig.node)
    await rig.driver.client.delete(stream)
    command = rig.command(swap, "prepare", "a", into="b")
    await rig.send(command)
    async with rig.agent():
        assert (await rig.outcome(command))["step"] == "prepared"


async def test_a_deleted_stream_is_made_again(rig: Rig) -> None:
    """NOGROUP: the consumer group is created again and the next order arrives."""
    async with rig.agent():
        await rig.job("a", 600)
        await rig.driver.client.delete(rig.keys.commands(rig.node))
        swap = await rig.begin_swap("a", into="b")
        assert (await rig.order(rig.command(swap, "prepare", "a", into="b")))["step"] == "prepared"


async def test_a_job_that_is_not_here_counts_as_out(rig: Rig) -> None:
    """An order that names a job without processes on this node is done at once."""
    async with rig.agent():
        swap = await rig.begin_swap("a", into="b")
        assert (await rig.order(rig.command(swap, "prepare", "a", into="b")))["step"] == "prepared"
        await rig.step("prepare", "commit")
        assert (await rig.order(rig.command(swap, "commit", "a", into="b")))["step"] == "done"
        assert isinstance(await rig.promote(swap, "first load"), scripts.Promoted)
        assert rig.fake.calls() == []


@pytest.mark.parametrize("step", ["prepare", "commit"])
async def test_an_order_that_broke_is_taken_up_again(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, step: str
) -> None:
    """Something fails that nobody foresaw, once, after the order was accepted: the group waits for this node, so the
    agent takes the order up again without a restart, and does it."""
    if step == "prepare":
        breaks_once(monkeypatch, Scope, "refresh", RedisUnreachableError("Redis is away for longer than that"))
    else:
        breaks_once(monkeypatch, Steps, "commit", RuntimeError("unforeseen"))
    monkeypatch.setattr(executor, "AGAIN_S", 0.1)
    async with rig.agent():
        await rig.job("a", 600)
        swap = await rig.begin_swap("a", into="b")
        assert (await rig.order(rig.command(swap, "prepare", "a", into="b")))["step"] == "prepared"
        await rig.step("prepare", "commit")
        assert (await rig.order(rig.command(swap, "commit", "a", into="b")))["step"] == "done"
        assert "is taken up again" in caplog.text
        await rig.idle()


def breaks_once(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, error: Exception) -> None:
    real, left = getattr(owner, name), [error]

    async def call(self: Any, *arguments: Any) -> Any:
        if left:
            raise left.pop()
        return await real(self, *arguments)

    monkeypatch.setattr(owner, name, call)
