"""What an agent sees of processes between swaps: holders that hang, stop and die, and jobs that use the device."""

from __future__ import annotations

import os
import signal

import pytest

from tests.agent.rig import Rig, until
from timeslice.locks import scripts

# Never lets go of the interpreter: no thread of it could renew a lease.
HOLDS_THE_GIL = "import ctypes; print('up', flush=True); ctypes.PyDLL(None).sleep(600)"


async def _holder(rig: Rig, job: str, code: str, lease_ms: int) -> int:
    process = rig.spawn(code)
    target = rig.target(job, process.pid)
    await rig.register(target)
    reply = await rig.acquire(job, pid=process.pid, start=target.start, lease_ms=lease_ms)
    assert isinstance(reply, scripts.Granted)
    return process.pid


@pytest.mark.timing
async def test_a_holder_that_hangs_keeps_its_lease_and_a_stopped_one_does_not(rig: Rig) -> None:
    """L11: the agent vouches for a process that runs but can't renew; not for one that SIGSTOP holds. †"""
    async with rig.agent(ttl_s=0.9):
        pid = await _holder(rig, "a", HOLDS_THE_GIL, 2000)

        async def three_leases_old() -> bool:
            view = await rig.view()
            assert view.holder == "a", "the lease was lost although the process runs"
            return view.now_ms > view.number("granted_at_ms") + 6000

        await until(three_leases_old, "three leases have passed")
        signal.pidfd_send_signal(_pidfd(pid), signal.SIGSTOP)

        async def lost() -> bool:
            await rig.driver.run(scripts.own(rig.group, "c1"))
            return bool(await rig.events("LeaseReclaimed"))

        await until(lost, "the lease of the stopped process ends")
        end = (await rig.events("LeaseReclaimed"))[0]
        granted = (await rig.events("LeaseGranted"))[0]
        assert end["why"] == "expired"
        assert int(end["at_ms"]) < int(granted["at_ms"]) + 20_000, "it was vouched for to the very end, ten leases"


def _pidfd(pid: int) -> int:
    return os.pidfd_open(pid)


async def test_a_holder_that_dies_is_reclaimed_at_once(rig: Rig) -> None:
    """L04: the process is killed; its lease of ten minutes ends with it, and the event names the job."""
    async with rig.agent():
        process = rig.spawn()
        target = rig.target("a", process.pid)
        await rig.register(target)
        await rig.acquire("a", pid=process.pid, start=target.start, lease_ms=600_000)
        await until(lambda: _watched(rig, "a"), "the agent watches the process")
        process.kill()
        process.wait()

        async def reclaimed() -> bool:
            return (await rig.view()).holder == ""

        await until(reclaimed, "the lease is taken back")
        event = (await rig.events("LeaseReclaimed"))[0]
        assert (event["job"], event["why"]) == ("a", "its process ended")


def _watched(rig: Rig, job: str) -> bool:
    path = rig.folder / "state" / "groups" / rig.name / "targets.json"
    return path.exists() and f'"job":"{job}"' in path.read_text()


async def test_a_holder_that_died_while_no_agent_ran_is_found_at_the_start(rig: Rig) -> None:
    """The process ended unseen: the next agent reports it before anything else."""
    async with rig.agent():
        process = rig.spawn()
        target = rig.target("a", process.pid)
        await rig.register(target)
        await rig.acquire("a", pid=process.pid, start=target.start, lease_ms=600_000)
    process.kill()
    process.wait()
    async with rig.agent():
        assert (await rig.view()).holder == ""


async def test_gone_is_reported_only_when_the_memory_is_free(rig: Rig) -> None:
    """A job's process has ended, but its device memory is still taken: it is no longer resident only when that is
    measured free."""
    async with rig.agent(ttl_s=0.9):
        process = await rig.job("a", 600)
        await until(lambda: rig.member("a"), "the agent has looked")
        ghost = rig.spawn()  # keeps the fake memory alive under the dead process's number
        held = {**rig.fake.read("a"), "pid": process.pid}
        process.kill()
        process.wait()
        rig.fake.write("ghost", {**held, "pid": ghost.pid, "as": process.pid})

        async def target_gone() -> bool:
            return not (await rig.view()).targets

        await until(target_gone, "the end of the process was reported")
        assert await rig.member_state("a") == "resident"
        ghost.kill()
        ghost.wait()

        async def gone() -> bool:
            return await rig.member("a") is None

        await until(gone, "job a is gone")
        assert [event["job"] for event in await rig.events("JobGone")] == ["a"]


async def test_a_step_waits_until_a_dead_jobs_memory_is_free(rig: Rig) -> None:
    """F02: the job that has to leave is dead, but its device memory is still taken: the step is not done before that
    is measured free, for the next job would load into a device that is not empty."""
    async with rig.agent(ttl_s=600.0):
        process = await rig.job("a", 600)
        swap = await rig.begin_swap("a", into="b")
        assert (await rig.order(rig.command(swap, "prepare", "a", into="b")))["step"] == "prepared"
        ghost = rig.spawn()  # keeps the fake memory alive under the dead process's number
        rig.fake.write("ghost", {**rig.fake.read("a"), "pid": ghost.pid, "as": process.pid})
        process.kill()
        process.wait()
        await rig.step("prepare", "commit")
        failed = await rig.order(rig.command(swap, "commit", "a", into="b", suspend_timeout_ms=300))
        assert failed["step"] == "failed"
        assert "600 bytes of its device memory are still taken" in failed["error"]
        ghost.kill()
        ghost.wait()
        assert (await rig.order(rig.command(swap, "commit", "a", into="b")))["step"] == "done"


async def test_a_job_that_ends_during_its_own_suspend_counts_as_out(rig: Rig) -> None:
    """F02: the finisher dies while it is suspended: the swap goes on, no fault, the next job gets in."""
    async with rig.agent():
        process = await rig.job("a", 600)
        swap = await rig.begin_swap("a", into="b")
        await rig.order(rig.command(swap, "prepare", "a", into="b"))
        await rig.step("prepare", "commit")
        rig.fake.knob("suspend", delay=0.3, fail=1, kind="gone")
        commit = rig.command(swap, "commit", "a", into="b")
        await rig.send(commit)
        await until(lambda: "suspend a" in rig.fake.calls(), "the suspend has begun")
        process.kill()
        process.wait()
        assert (await rig.outcome(commit))["step"] == "done"
        assert isinstance(await rig.promote(swap, "first load"), scripts.Promoted)
        assert (await rig.view()).holder == "b"
        assert "a" not in (await rig.view()).jobs


@pytest.mark.parametrize("step", ["prepare", "commit"])
async def test_a_job_that_ends_before_a_step_counts_as_out(rig: Rig, step: str) -> None:
    """F02: it yields and exits; whether prepare or commit finds it dead, the swap is done."""
    async with rig.agent():
        process = await rig.job("a", 600)
        swap = await rig.begin_swap("a", into="b")
        if step == "prepare":
            process.kill()
            process.wait()
        assert (await rig.order(rig.command(swap, "prepare", "a", into="b")))["step"] == "prepared"
        process.kill()
        process.wait()
        await rig.step("prepare", "commit")
        assert (await rig.order(rig.command(swap, "commit", "a", into="b")))["step"] == "done"
        assert isinstance(await rig.promote(swap, "first load"), scripts.Promoted)


async def test_one_of_several_processes_may_end_and_the_rest_is_swapped(rig: Rig) -> None:
    """F02: a job with two processes loses one in the middle of its suspend; the other one is suspended."""
    async with rig.agent():
        await rig.job("a", 600)
        second = rig.spawn()
        await rig.register(rig.target("a", second.pid))
        swap = await rig.begin_swap("a", into="b")
        await rig.order(rig.command(swap, "prepare", "a", into="b"))
        await rig.step("prepare", "commit")
        rig.fake.knob("suspend", delay=0.3, fail=1, kind="gone")
        commit = rig.command(swap, "commit", "a", into="b")
        await rig.send(commit)
        await until(lambda: "suspend a" in rig.fake.calls(), "the suspend has begun")
        second.kill()
        second.wait()
        assert (await rig.outcome(commit))["step"] == "done"
        assert rig.fake.state("a") == "suspended"


async def test_two_registered_jobs_that_never_loaded_both_get_their_turn(rig: Rig) -> None:
    """F01: processes that registered before their first acquire are no resident jobs; nobody is blocked."""
    async with rig.agent(ttl_s=0.9):
        for job in "ab":
            await rig.job(job)
            rig.fake.load(job, 0)  # a bare context
        await rig.driver.run(scripts.own(rig.group, "c1"))
        beat = (await rig.view()).number("clock_ms")

        async def beaten() -> bool:
            return (await rig.view()).number("clock_ms") > beat + 900

        await until(beaten, "the agent has looked at both")
        assert (await rig.view()).members == ()
        first = await rig.acquire("a")
        assert (first.how, (await rig.view()).holder) == ("first load", "a")
        await rig.acquire("b")
        await rig.yield_("a")
        swap = await rig.plan("a", into="b")
        assert (await rig.order(rig.command(swap, "prepare", "a", into="b")))["step"] == "prepared"
        await rig.step("prepare", "commit")
        assert (await rig.order(rig.command(swap, "commit", "a", into="b")))["step"] == "done"
        await rig.promote(swap, "first load")
        assert (await rig.view()).holder == "b"
        assert await rig.events("GroupBlocked") == []


async def test_a_workload_that_only_it_can_see_stays_where_it_was_left(rig: Rig) -> None:
    """From outside there is nothing to see of a job that moves its own state: that is no proof that it is gone."""
    async with rig.agent(ttl_s=0.9):
        await rig.register(rig.target("a", rig.spawn().pid, channel="n1.1.1"))
        await rig.job("c", 100)
        await rig.acquire("a")
        await rig.yield_("a")
        await until(lambda: rig.member("c"), "the agent has looked")
        assert (await rig.view()).jobs["a"].residency == "resident"


async def test_a_job_that_gave_its_memory_back_is_out(rig: Rig) -> None:
    """Nobody has to swap a job that is measured off the device: the next one loads at once."""
    async with rig.agent(ttl_s=0.9):
        await rig.job("a", 300)
        await rig.acquire("a")
        await rig.yield_("a")
        await until(lambda: rig.member("a"), "the agent has looked")
        (rig.fake.folder / "a.json").unlink()

        async def out() -> bool:
            return "a" not in (await rig.view()).jobs

        await until(out, "job a is out")
        assert (await rig.acquire("b")).how == "first load"


async def test_a_job_on_the_device_without_a_hold_is_flagged(rig: Rig) -> None:
    """C20: an idle registered job disturbs nobody; once it allocates without a hold, one look flags it. A job that
    yielded and stays resident is not flagged."""
    async with rig.agent(ttl_s=0.9):
        await rig.job("a", 300)
        await rig.job("b")
        await rig.acquire("a")
        await rig.yield_("a")
        await until(lambda: rig.member("a"), "the agent has looked")
        found = await rig.member("a")
        assert (found.state, found.unheld) == ("resident", False)
        assert await rig.member("b") is None or (await rig.member("b")).device_bytes == 0
        rig.fake.load("b", 100)

        async def flagged() -> bool:
            member = await rig.member("b")
            return member is not None and bool(member.unheld)

        await until(flagged, "job b is flagged")
        assert [event["job"] for event in await rig.events("JobUnheld")] == ["b"]
        assert not (await rig.member("a")).unheld


async def test_a_suspended_job_that_allocates_again_is_flagged(rig: Rig) -> None:
    """C20: having held once is no licence for later."""
    async with rig.agent(ttl_s=0.9):
        await rig.job("a", 300)
        await rig.swap("a", into="b")
        rig.fake.load("a", 100)

        async def flagged() -> bool:
            member = await rig.member("a")
            return bool(member.unheld)

        await until(flagged, "job a is flagged")


async def test_suspending_one_role_of_a_job_leaves_its_other_role_alone(rig: Rig) -> None:
    """F04: one job serves in two groups on one node: a swap of the trainers does not touch the sampler."""
    other = Rig(rig.url, rig.prefix, rig.folder, name="samplers")
    try:
        async with rig.agent(groups=("g", "samplers")):
            await rig.job("a", 600)
            await other.job("a", 400)
            await rig.swap("a", into="b")
            assert rig.fake.state("a") == "suspended"
            assert (other.fake.state("a"), other.fake.calls()) == ("resident", [])
    finally:
        await other.close()
