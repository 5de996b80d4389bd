"""What an agent that starts again knows of processes that did not register, and who comes first when one does."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.agent.rig import Rig, until
from tests.agent.workers import SIZE, Starts, agent_on, devices_end, emulated, found, starts, stored, watched
from timeslice.arena.survey import arenas_of
from timeslice.backends.registry import get_backend
from timeslice.locks import scripts
from timeslice.locks.scripts import Observed

__all__ = ["starts"]


async def _move(rig: Rig, out: str, into: str) -> None:
    """One has the group that another one, which is on the device, leaves for it."""

    async def resident() -> bool:
        return await rig.member_state(out) == "resident"

    await until(resident, f"the group knows that {out} is on the device")
    await rig.acquire(into)
    swap = await rig.plan(out, into=into)
    assert (await rig.order(rig.command(swap, "prepare", out, into=into)))["step"] == "prepared"
    await rig.step("prepare", "commit")
    assert (await rig.order(rig.command(swap, "commit", out, into=into)))["step"] == "done"
    await rig.promote(swap)


@pytest.mark.parametrize("lost", ["nothing", "folder"])
async def test_a_suspended_job_is_found_again(rig: Rig, starts: Starts, clean_environment: Path, lost: str) -> None:
    """It has nothing on the device by which to find it. The agent remembers it, and even without its folder the group
    says that the job is suspended here; it comes back with its content, also for an agent that never saw it there."""
    with devices_end(clean_environment, "g"):
        options = emulated("g")
        async with rig.agent(get_backend, **options):
            worker = starts(JOB="a", GROUPS="g")
            worker.do("load")
            await found(rig, worker.pid)
            await _move(rig, "a", "b")
        if lost == "folder":
            options["state_dir"] = str(rig.folder / "anew")
        async with rig.agent(get_backend, **options):
            assert await rig.member_state("a") == "suspended"
            await rig.yield_("b")
            await rig.acquire("a")
            swap = await rig.plan(into="a")
            assert (await rig.order(rig.command(swap, "prepare", into="a")))["step"] == "prepared"
            await rig.step("prepare", "commit")
            assert (await rig.order(rig.command(swap, "commit", into="a")))["step"] == "done"
            (arena,) = arenas_of(worker.pid)
            assert (arena.bytes_on_device, arena.state) == (SIZE, "running")


async def test_one_that_ended_while_no_agent_ran_is_gone(rig: Rig, starts: Starts, clean_environment: Path) -> None:
    """F05: the next agent remembers that it was there, and tells the group that the job is gone."""
    with devices_end(clean_environment, "g"):
        async with rig.agent(get_backend, **emulated("g")):
            worker = starts(JOB="a", GROUPS="g")
            worker.do("load")
            await found(rig, worker.pid)

            async def known() -> bool:
                return await rig.member_state("a") == "resident"

            await until(known, "the group knows the job")
        worker.process.kill()
        worker.process.wait()
        async with rig.agent(get_backend, **emulated("g")):

            async def gone() -> bool:
                return await rig.member("a") is None

            await until(gone, "the job is gone")
            await until(lambda: not watched(rig), "it is not watched any more")
            assert [event["job"] for event in await rig.events("JobGone")] == ["a"]


async def test_what_a_process_says_of_itself_comes_first(rig: Rig, starts: Starts, clean_environment: Path) -> None:
    """Started as job a's and found as that, it registers for job b, which it shows as well: it is b's alone."""
    async with agent_on(rig, clean_environment, "g"):
        worker = starts(JOB="a", GROUPS="g")
        worker.do("load")
        await found(rig, worker.pid)
        worker.do("show g/b")
        await rig.register(rig.target("b", worker.pid))
        await until(lambda: [each["job"] for each in stored(rig)] == ["b"], "it is job b's")

        async def told() -> bool:
            return await rig.member_state("b") == "resident" and await rig.member("a") is None

        await until(told, "the group knows it as job b's")
        assert watched(rig) == {worker.pid: "b"}


async def test_where_only_workloads_move_their_state_nobody_is_looked_for(
    rig: Rig, starts: Starts, clean_environment: Path
) -> None:
    """A process that says nothing of itself could not be moved there, and would only keep its job from being gone."""
    async with agent_on(rig, clean_environment, "g", "h", backends={"g": ["arena"], "h": ["channel"]}):
        mute = starts(JOB="a", GROUPS="g,h", on="h")
        mute.do("load")
        seen = starts(JOB="a", GROUPS="g,h")
        seen.do("load")
        await found(rig, seen.pid)
        assert watched(rig, "h") == {}


async def test_a_job_that_this_agent_could_not_have_moved_is_not_told_as_gone(
    rig: Rig, starts: Starts, clean_environment: Path
) -> None:
    """An agent whose driver library fails at its start has no device and no backend that works from outside. What
    another one moved out before is kept as suspended as long as a process shows that job, and not let in as if it had
    nothing; one that nobody shows any more is forgotten."""
    pulse = await rig.driver.run(scripts.heartbeat(rig.group, rig.node, 60_000))
    told = [Observed(job, "suspended", host_bytes=SIZE, backend="cuda") for job in "ab"]
    await rig.driver.run(scripts.report(rig.group, rig.node, pulse.counter, told, whole=True))
    starts(JOB="a", GROUPS="g")
    async with rig.agent(get_backend, groups=["g"], backends={"g": ["channel"]}, ttl_s=0.9):

        async def one_left() -> bool:
            return await rig.member("b") is None

        await until(one_left, "job b, which nobody shows, is forgotten")
        assert await rig.member_state("a") == "suspended"
        await rig.acquire("a")
        swap = await rig.plan(into="a")
        prepared = await rig.order(rig.command(swap, "prepare", into="a"))
        assert prepared["step"] == "prepared"
        await rig.step("prepare", "commit")
        refused = await rig.order(rig.command(swap, "commit", into="a"))
        assert refused["step"] == "failed"
        assert "the backend cuda has moved it out, and this agent has not got that" in refused["error"]
