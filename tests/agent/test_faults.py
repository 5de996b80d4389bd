"""Backends that lie, devices that are not empty, memory that is short, disks that are full."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.agent.rig import Rig, until
from tests.support.disk import fill, small_disk
from timeslice.locks import scripts


async def _commit(rig: Rig, swap: int, out: str, into: str) -> dict[str, str]:
    assert (await rig.order(rig.command(swap, "prepare", out, into=into)))["step"] == "prepared"
    await rig.step("prepare", "commit")
    return await rig.order(rig.command(swap, "commit", out, into=into, suspend_timeout_ms=3_000))


@pytest.mark.parametrize("share", [0.0, 0.5])
async def test_a_suspend_that_claims_success_without_freeing_fails(rig: Rig, share: float) -> None:
    """G06: nothing or half was freed: the step fails with the measured bytes, and the job is back on the device."""
    async with rig.agent():
        await rig.job("a", 600)
        swap = await rig.begin_swap("a", into="b")
        rig.fake.knob("suspend", share=share)
        failed = await _commit(rig, swap, "a", "b")
        assert failed["step"] == "failed"
        assert f"only {int(600 * share)} of its 600 bytes" in failed["error"]
        assert rig.fake.state("a") == "resident"
        assert (await rig.view()).jobs["a"].residency == "resident"


@pytest.mark.parametrize("size", [600, 0])
async def test_a_suspend_that_claims_success_without_moving_fails(rig: Rig, size: int) -> None:
    """The job is looked at afterwards, also where there are no bytes to measure: it is resident, so the step fails."""
    async with rig.agent():
        await rig.job("a")
        rig.fake.load("a", size)
        swap = await rig.begin_swap("a", into="b")
        rig.fake.knob("suspend", lie=1)
        failed = await _commit(rig, swap, "a", "b")
        assert failed["step"] == "failed"
        assert "knobs reported it suspended, but it is resident" in failed["error"]


async def test_a_restore_that_claims_success_without_moving_fails(rig: Rig) -> None:
    """The job is looked at afterwards: it is still suspended, so the step fails and nobody is let in."""
    async with rig.agent():
        await rig.job("a", 600)
        await rig.swap("a", into="b")
        await rig.yield_("b")
        await rig.acquire("a")
        swap = await rig.plan("b", into="a")
        rig.fake.knob("restore", lie=1)
        failed = await _commit(rig, swap, "b", "a")
        assert failed["step"] == "failed"
        assert "knobs reported it restored, but it is suspended" in failed["error"]


async def test_memory_that_is_freed_late_is_waited_for(rig: Rig) -> None:
    """G06: the memory is free only after a while; the suspend succeeds then, and not before."""
    async with rig.agent():
        await rig.job("a", 600)
        swap = await rig.begin_swap("a", into="b")
        rig.fake.knob("suspend", share=0.0, late=1.0)
        assert (await _commit(rig, swap, "a", "b"))["step"] == "done"


async def test_a_restore_into_a_device_that_is_not_empty_is_not_tried(rig: Rig) -> None:
    """G07: a squatter holds the memory: the restore is not attempted, the error names the squatter's pid and bytes,
    and when it has gone the job comes back."""
    async with rig.agent():
        await rig.job("a", 600)
        await rig.job("b")
        await rig.swap("a", into="b")
        await rig.yield_("b")
        squatter = rig.spawn()
        rig.fake.load("squatter", 700)
        rig.fake.write("squatter", {**rig.fake.read("squatter"), "pid": squatter.pid})
        await rig.acquire("a")
        swap = await rig.plan("b", into="a")
        failed = await _commit(rig, swap, "b", "a")
        assert failed["step"] == "failed"
        assert f"process {squatter.pid} holds 700" in failed["error"]
        assert "restore a" not in rig.fake.calls()
        assert rig.fake.state("a") == "suspended"
        await rig.step("commit", "rollback")
        await rig.order(rig.command(swap, "rollback", "b", into="a"))
        await rig.settle(swap)
        squatter.kill()
        squatter.wait()

        async def again() -> bool:
            await rig.driver.run(scripts.own(rig.group, "c1"))
            return (await rig.view()).swap > swap

        await until(again, "the deferred waiter is tried again")
        assert (await _commit(rig, await rig.plan("b", into="a"), "b", "a"))["step"] == "done"
        assert rig.fake.state("a") == "resident"


async def test_too_little_host_memory_refuses_before_anything_is_touched(rig: Rig) -> None:
    """G08: the refused job keeps the device unlocked, and the error says what is needed and what is there."""
    async with rig.agent(host_budget_bytes=500):
        await rig.driver.run(scripts.configure(rig.group, {"host_reserve_bytes": "100"}))
        await rig.job("a", 600)
        swap = await rig.begin_swap("a", into="b")
        await rig.driver.client.xadd(rig.group.inbox, {"why": "x"})

        async def configured() -> bool:
            failed = await rig.order(rig.command(swap, "prepare", "a", into="b"))
            assert failed["step"] == "failed"
            return "needs 600 bytes of host memory, 400 are available" in failed["error"]

        await until(configured, "the group's reserve is known")
        assert rig.fake.calls() == []
        assert rig.fake.state("a") == "resident"


async def test_the_budget_of_a_job_that_ended_is_free_again(rig: Rig) -> None:
    """G08: what a suspended job held counts against the budget until it is gone."""
    async with rig.agent(host_budget_bytes=700, ttl_s=1.5):
        await rig.driver.run(scripts.configure(rig.group, {"host_reserve_bytes": "0"}))
        first = await rig.job("a", 600)
        await until(lambda: rig.member("a"), "the agent has looked")
        await rig.swap("a", into="b")
        await rig.job("b", 300)
        await rig.yield_("b")
        await rig.acquire("c")
        swap = await rig.plan("b", into="c")
        refused = await rig.order(rig.command(swap, "prepare", "b", into="c"))
        assert "needs 300 bytes of host memory, 100 are available" in refused["error"]
        first.kill()
        first.wait()

        async def gone() -> bool:
            return await rig.member("a") is None

        await until(gone, "job a is gone")
        assert (await rig.order(rig.command(swap, "prepare", "b", into="c")))["step"] == "prepared"


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A state folder on a disk of 64 KiB."""
    with small_disk(tmp_path / "disk") as folder:
        yield folder


async def test_a_full_disk_fails_the_order_before_anything_is_touched(rig: Rig, disk: Path) -> None:
    """Without room for the intent nothing is moved; once there is room the next attempt goes through."""
    async with rig.agent(state_dir=str(disk / "state")):
        await rig.job("a", 600)
        swap = await rig.begin_swap("a", into="b")
        filler = fill(disk)
        failed = await rig.order(rig.command(swap, "prepare", "a", into="b"))
        assert failed["step"] == "failed"
        assert "can't be written (No space left on device)" in failed["error"]
        assert rig.fake.calls() == []
        filler.unlink()
        assert (await rig.order(rig.command(swap, "prepare", "a", into="b")))["step"] == "prepared"


async def test_a_disk_that_fills_up_between_the_steps_unlocks_the_job(rig: Rig, disk: Path) -> None:
    """The commit can't be noted: it fails, and the job that was locked for it runs on."""
    async with rig.agent(state_dir=str(disk / "state")):
        await rig.job("a", 600)
        swap = await rig.begin_swap("a", into="b")
        await rig.order(rig.command(swap, "prepare", "a", into="b"))
        fill(disk)
        await rig.step("prepare", "commit")
        failed = await rig.order(rig.command(swap, "commit", "a", into="b"))
        assert failed["step"] == "failed"
        assert rig.fake.calls() == ["prepare a", "abort a"]
        assert (rig.fake.state("a"), rig.fake.locked("a")) == ("resident", False)


async def test_a_state_that_is_unknown_blocks_the_group_and_a_new_process_heals_it(rig: Rig) -> None:
    """F05: a job whose state can't be told is faulted; once its process has ended, the same id works at once."""
    async with rig.agent(ttl_s=1.5):
        process = await rig.job("a", 600)
        swap = await rig.begin_swap("a", into="b")
        await rig.order(rig.command(swap, "prepare", "a", into="b"))
        await rig.step("prepare", "commit")
        rig.fake.write("a", {**rig.fake.read("a"), "state": "faulted"})
        rig.fake.knob("restore", fail=-1, kind="poisoned")
        failed = await rig.order(rig.command(swap, "commit", "a", into="b"))
        assert (failed["step"], failed["kind"]) == ("failed", "poisoned")
        assert await rig.member_state("a") == "faulted"
        await rig.settle(swap)

        async def blocked() -> bool:
            await rig.driver.run(scripts.own(rig.group, "c1"))
            return (await rig.view()).phase == "blocked"

        await until(blocked, "the group says that job a's state is unknown")
        rig.fake.write("knobs", {})
        (rig.fake.folder / "a.json").unlink()
        process.kill()
        process.wait()

        async def free() -> bool:
            return (await rig.view()).holder == "b"

        await until(free, "b gets in")
        await rig.job("a")
        await rig.yield_("b")
        await rig.acquire("a")
        assert (await _commit(rig, await rig.plan("b", into="a"), "b", "a"))["step"] == "done"
