"""A job of which no agent watches a process: it is out only if something shows that."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.agent.rig import Rig, until
from timeslice.agent import procfs
from timeslice.backends.registry import get_backend
from timeslice.locks import scripts
from timeslice.models import Residency

CHANNEL: dict[str, Any] = {"make_backend": get_backend, "backends": {"g": ["channel"]}, "ttl_s": 1.5}


async def have_a_turn(rig: Rig, job: str) -> None:
    """The job holds by a process that nobody was told of, and yields."""
    await until(lambda: _granted(rig, job), f"{job} is let in")
    await rig.yield_(job)


async def _granted(rig: Rig, job: str, pid: int = 1, start: int = 1) -> bool:
    request = replace(rig.request(job), pid=pid, start=start)
    call: scripts.Call[Any] = scripts.acquire(rig.group, request)
    return isinstance(await rig.driver.run(call), scripts.Granted)


async def is_unknown(rig: Rig, job: str = "a") -> bool:
    return await rig.member_state(job) == Residency.UNKNOWN


async def _is_out(rig: Rig) -> bool:
    return await rig.member("a") is None


async def test_memory_that_nobody_explains_may_be_the_job_s(rig: Rig) -> None:
    """Bytes are on the device that no known process has: nobody is let in before they are gone, and then at once."""
    async with rig.agent(ttl_s=1.5):
        rig.fake.load("a", 600)
        await have_a_turn(rig, "a")
        await until(lambda: is_unknown(rig), "the group is told that job a may be there")
        waits = await rig.acquire("b")
        assert waits.phase == "blocked"
        assert waits.reason.startswith("job a may still be on the devices of node n1: no agent of the group knows")
        (rig.fake.folder / "a.json").unlink()
        await until(lambda: rig.holds("b"), "b is let in")


async def test_a_device_that_is_free_of_it_shows_it_out(rig: Rig) -> None:
    """Nobody watched a process of the job, and the device was measured free: a crashed job blocks nobody for ever."""
    async with rig.agent(ttl_s=1.5):
        await have_a_turn(rig, "a")
        await until(lambda: _is_out(rig), "the group is told that job a is out")
        assert isinstance(await rig.acquire("b"), scripts.Granted)
    assert await rig.events("JobUnknown") == []


async def test_a_job_that_nobody_knows_blocks_where_nothing_can_be_measured(rig: Rig) -> None:
    """An agent without devices to look at can't say that it is out; an operator can, until the next turn."""
    async with rig.agent(**CHANNEL):
        await have_a_turn(rig, "a")
        await until(lambda: is_unknown(rig), "the group is told that job a may be there")
        assert (await rig.acquire("b")).phase == "blocked"
        await rig.driver.run(scripts.repair(rig.group, "eve", "", out=["a"]))
        await until(lambda: rig.holds("b"), "b is let in")
    assert len([event for event in await rig.events("JobUnknown") if event["job"] == "a"]) == 1


async def test_the_end_of_an_earlier_life_says_nothing_of_a_later_one(rig: Rig) -> None:
    """The watched process of a job ended; the job came again, by a process that nobody was told of."""
    async with rig.agent(**CHANNEL):
        process = await rig.job("a")
        await until(lambda: _watched(rig), "the agent has the process")
        process.kill()
        process.wait()
        await until(lambda: _struck_off(rig), "the group hears of its end")
        await have_a_turn(rig, "a")
        await until(lambda: is_unknown(rig), "the group is told that job a may be there")


async def _watched(rig: Rig) -> bool:
    kept = rig.folder / "state" / "groups" / "g" / "targets.json"
    return kept.exists() and b'"job":"a"' in kept.read_bytes()


async def _struck_off(rig: Rig) -> bool:
    return not (await rig.view()).targets


async def test_with_the_backend_that_moves_nothing_nobody_is_in_doubt(rig: Rig) -> None:
    """An operator who serves a group by noop alone has said that jobs keep nothing on devices."""
    async with rig.agent(get_backend, backends={"g": ["noop"]}, ttl_s=1.5):
        await have_a_turn(rig, "a")
        await until(lambda: _is_out(rig), "the group is told that job a is out")
        assert isinstance(await rig.acquire("b"), scripts.Granted)


async def test_a_doubt_outlives_the_data_of_redis(rig: Rig) -> None:
    """The group has forgotten the job; the agent that could not see it tells it again."""
    async with rig.agent(**CHANNEL):
        await have_a_turn(rig, "a")
        await until(lambda: is_unknown(rig), "the group is told that job a may be there")
        keys = [key async for key in rig.driver.client.scan_iter(rig.group.prefix + ":*")]
        await rig.driver.client.delete(*keys)
        await until(lambda: is_unknown(rig), "the group is told again")


async def test_an_order_does_not_pass_over_what_nobody_can_see(rig: Rig) -> None:
    """The agent is asked to move a job out of which it knows no process, while memory is in use:
    it fails, and says why."""
    async with rig.agent():
        swap = await rig.begin_swap("a", into="b")
        rig.fake.load("a", 600)
        failed = await rig.order(rig.command(swap, "prepare", "a", into="b"))
        assert failed["step"] == "failed"
        assert "job a may still be on the devices of node n1" in failed["error"]


async def test_bytes_that_nobody_explains_outweigh_a_holder_that_was_known(rig: Rig) -> None:
    """The job's registered process ended, and a worker of it that nobody sees has memory on the device."""
    async with rig.agent(ttl_s=1.5):
        process = await rig.job("a")
        found = procfs.look_at(process.pid)
        assert found
        await until(lambda: _granted(rig, "a", process.pid, found.start), "a is let in")
        rig.fake.load("worker", 600)
        await rig.yield_("a")
        process.kill()
        process.wait()
        await until(lambda: is_unknown(rig), "the group is told that job a may be there")
