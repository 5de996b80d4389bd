"""Several coordinators as real processes, over several groups and a real agent: killed, stopped, added, removed."""

from __future__ import annotations

import asyncio
import math
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.agent.rig import Rig, until
from tests.coordinator import doomed
from tests.coordinator.scripted import ScriptedAgent, World
from tests.support.jobs import process_state
from timeslice.agent import procfs
from timeslice.locks import flows, scripts

GROUPS = tuple(f"g{number}" for number in range(8))
LEASE_MS = doomed.LEASE_MS
BYTES = 100
BUSY_S = 60.0  # eight groups, up to four coordinators and an agent, on a machine with other tests


class Crowd:
    """Coordinators in processes of their own, one agent in another, and two jobs a group that take turns for ever."""

    def __init__(self, url: str, prefix: str, folder: Path, groups: Sequence[str]) -> None:
        self.groups = groups
        self.rigs = {name: Rig(url, prefix, folder, name) for name in groups}
        self.rig = self.rigs[groups[0]]
        self.running: dict[str, asyncio.subprocess.Process] = {}
        self.grants: Counter[str] = Counter()
        self.harm: list[str] = []  # what a body saw that must not be
        self._tasks: list[asyncio.Task[None]] = []

    async def open(self) -> None:
        await self.rig.driver.client.sadd(self.rig.keys.groups, *self.groups)
        self.rig.spawn_agent(groups=tuple(self.groups))

    async def start(self, name: str, point: str = "never", number: str = "SIGKILL") -> asyncio.subprocess.Process:
        line = [sys.executable, "-m", doomed.__name__, self.rig.url, self.rig.prefix, name, point, number]
        self.running[name] = await asyncio.create_subprocess_exec(*line)
        return self.running[name]

    async def end(self, name: str, number: signal.Signals) -> None:
        process = self.running.pop(name)
        process.send_signal(number)
        await process.wait()

    # traffic

    async def play(self) -> None:
        """Start both jobs of each group."""
        for rig in self.rigs.values():
            for job in "ab":
                process = await rig.job(job)
                self._tasks.append(asyncio.create_task(self._turns(rig, job, process.pid)))

    async def _turns(self, rig: Rig, job: str, pid: int) -> None:
        look = procfs.look_at(pid)
        assert look is not None
        while True:
            request = rig.request(job, pid, look.start)
            grant = await rig.driver.drive(flows.acquire(rig.group, request))
            if grant.how == "first load":
                rig.fake.load(job, BYTES)
                rig.fake.write(job, {**rig.fake.read(job), "pid": pid})
            where = {each: rig.fake.state(each) for each in "ab"}
            if where.pop(job) != "resident" or "resident" in where.values():
                self.harm.append(f"{rig.name}: job {job} is inside, and the device has {where}")
            self.grants[rig.name] += 1
            await rig.driver.run(scripts.yield_(rig.group, request.waiter, grant.token))

    async def progress(self, turns: int = 1) -> None:
        """Every group goes on: so many more turns in each."""
        before = Counter(self.grants)

        def done() -> bool:
            failed = [task for task in self._tasks if task.done()]
            for task in failed:
                task.result()
            return all(self.grants[name] >= before[name] + turns for name in self.groups)

        await until(done, "every group goes on", BUSY_S)

    # looking

    async def owners(self) -> Counter[str]:
        views = [await rig.view() for rig in self.rigs.values()]
        return Counter(view.state.get("owner", "") for view in views)

    async def until_shared(self, *names: str) -> None:
        """All groups are owned, by these, and by none more than its share."""
        share = math.ceil(len(self.groups) / len(names))

        async def shared() -> bool:
            owners = await self.owners()
            return set(owners) <= set(names) and max(owners.values()) <= share

        await until(shared, f"shared among {names}", BUSY_S)

    async def check(self) -> None:
        """No swap was lost or done twice, and nobody was inside with the wrong state on the device."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        assert self.harm == []
        for rig in self.rigs.values():
            started = [event["swap"] for event in await rig.events("SwapStarted")]
            planned = {event["swap"] for event in await rig.events("SwapPlanned")}
            under_way = str((await rig.view()).swap)
            ended = [event["swap"] for kind in ("SwapFinished", "SwapDeferred") for event in await rig.events(kind)]
            assert max(Counter(ended).values()) == 1
            assert set(ended) <= {event["swap"] for event in await rig.events("SwapStarted")}
            # One that was not planned yet is dropped with its waiter, without a word.
            assert (set(started) - set(ended) - {under_way}) & planned == set()
            tokens = [int(event["token"]) for event in await rig.events("LeaseGranted")]
            assert tokens == sorted(set(tokens))

    async def close(self) -> None:
        for process in self.running.values():
            process.kill()
            await process.wait()
        for task in self._tasks:
            task.cancel()
        for rig in self.rigs.values():
            for job in rig.processes:
                job.kill()
                job.communicate()
            await rig.driver.close()


async def until_queued(rig: Rig, job: str) -> None:
    async def queued() -> bool:
        return [waiter.job for waiter in (await rig.view()).queue] == [job]

    await until(queued, f"job {job} waits")


@pytest.fixture
async def crowd(redis_url: str, prefix: str, tmp_path: Path) -> AsyncIterator[Crowd]:
    made = Crowd(redis_url, prefix, tmp_path, GROUPS)
    yield made
    await made.close()


@pytest.fixture
async def alone(redis_url: str, prefix: str, tmp_path: Path) -> AsyncIterator[Crowd]:
    """A crowd around one group."""
    made = Crowd(redis_url, prefix, tmp_path, GROUPS[:1])
    yield made
    await made.close()


@pytest.mark.slow
async def test_three_coordinators_killed_stopped_and_restarted_while_swaps_run(crowd: Crowd) -> None:
    """Each is killed and started again, each is stopped past its lease and continued: its groups are taken over, all
    groups go on, no swap is lost or done twice, and nobody is ever inside with another job's state on the device."""
    await crowd.open()
    names = ("one", "two", "three")
    for name in names:
        await crowd.start(name)
    await crowd.until_shared(*names)
    await crowd.play()
    await crowd.progress()
    for name in names:
        others = [other for other in names if other != name]
        await crowd.end(name, signal.SIGKILL)
        await crowd.until_shared(*others)
        await crowd.progress()
        await crowd.start(name)
        await crowd.until_shared(*names)
    for name in names:
        process = crowd.running[name]
        process.send_signal(signal.SIGSTOP)
        await crowd.until_shared(*(other for other in names if other != name))
        await crowd.progress()
        process.send_signal(signal.SIGCONT)
        await crowd.until_shared(*names)
        await crowd.progress()
        assert process.returncode is None
    await crowd.check()


@pytest.mark.slow
async def test_a_fourth_comes_and_goes_while_swaps_run(crowd: Crowd) -> None:
    """Each owns at most its share, before, with and after it; traffic goes on all the while."""
    await crowd.open()
    names = ("one", "two", "three")
    for name in names:
        await crowd.start(name)
    await crowd.play()
    await crowd.until_shared(*names)
    await crowd.start("four")
    await crowd.until_shared(*names, "four")
    owners = await crowd.owners()
    assert owners["four"]
    await crowd.progress()
    await crowd.end("four", signal.SIGTERM)
    await crowd.until_shared(*names)
    await crowd.progress()
    await crowd.check()


@pytest.mark.parametrize(
    "point",
    [
        pytest.param("before orders prepare", marks=pytest.mark.slow),
        pytest.param("before step commit", marks=pytest.mark.slow),
        "before orders commit",
    ],
)
async def test_one_that_wakes_with_orders_in_hand_does_no_harm(alone: Crowd, point: str) -> None:
    """It is stopped (SIGSTOP) between two lines, loses its group, and on waking goes on with the next line, while its
    heir is at the same step of the same swap: the agent refuses its orders, every script its word."""
    await alone.open()
    rig, world = alone.rig, World(alone.rig.url, alone.rig.prefix, alone.rig.name)
    slow = world.agents["n2"] = await ScriptedAgent(world, "n2").join()
    slow.states["a"] = "resident"
    step = "prepare" if "prepare" in point else "commit"
    gate = slow.gates[step] = asyncio.Event()
    holder, rival = await rig.job("a", BYTES), await rig.job("b")
    request = rig.request("a", holder.pid, 1)
    grant = await rig.driver.drive(flows.acquire(rig.group, request))
    late = await alone.start("late", point, "SIGSTOP")
    waiting = asyncio.create_task(rig.driver.drive(flows.acquire(rig.group, rig.request("b", rival.pid, 1))))
    await world.until(lambda view: view.queue, "b waits")
    await rig.driver.run(scripts.yield_(rig.group, request.waiter, grant.token))
    await until(lambda: process_state(late.pid) == "T", "it stopped itself")
    await alone.start("heir")
    reported = {"prepare": "prepared", "commit": "done"}[step]
    before = await world.until(
        lambda view: view.state["owner"] == "heir" and view.nodes["n1"].step == reported, "the heir's order was obeyed"
    )
    stream = rig.keys.commands("n1")

    async def orders() -> tuple[int, int]:
        """Sent ever, and not dealt with yet."""
        info: Any = await rig.driver.client.xinfo_stream(stream)
        return int(info["entries-added"]), int(info["length"])

    sent, _ = await orders()
    late.send_signal(signal.SIGCONT)
    if "orders" in point:

        async def refused() -> bool:
            return await orders() == (sent + 1, 0)

        await until(refused, "it sends what it had in hand, and the agent deals with it")
    else:
        await until(lambda: process_state(late.pid) != "T", "it goes on")
    during = await world.view()
    assert (during.state["swap_step"], during.epoch) == (step, before.epoch)
    command = await rig.driver.client.hget(rig.group.members, "n1/@/command")
    assert scripts.text(command).startswith(f"{before.swap}/n1/{step}/{before.epoch}.")
    gate.set()
    await waiting
    assert Counter(rig.fake.calls())["suspend a"] == 1
    assert len(await rig.events("SwapFinished")) == len(await rig.events("SwapStarted")) == 1
    assert [event["job"] for event in await rig.events("LeaseGranted")] == ["a", "b"]
    assert late.returncode is None
    await world.close()


async def test_one_that_wakes_before_its_promotion_grants_nobody_twice(alone: Crowd) -> None:
    """Stopped (SIGSTOP) just before the last word of a swap, which its heir then says."""
    await alone.open()
    rig = alone.rig
    holder, rival = await rig.job("a", BYTES), await rig.job("b")
    request = rig.request("a", holder.pid, 1)
    grant = await rig.driver.drive(flows.acquire(rig.group, request))
    late = await alone.start("late", "before promote", "SIGSTOP")
    waiting = asyncio.create_task(rig.driver.drive(flows.acquire(rig.group, rig.request("b", rival.pid, 1))))
    await until_queued(rig, "b")
    await rig.driver.run(scripts.yield_(rig.group, request.waiter, grant.token))
    await until(lambda: process_state(late.pid) == "T", "it stopped itself")
    await alone.start("heir")
    second = await waiting
    late.send_signal(signal.SIGCONT)
    await until(lambda: process_state(late.pid) != "T", "it goes on")
    view = await rig.view()
    assert (view.state["owner"], view.holder, view.number("token")) == ("heir", "b", second.token)
    assert len(await rig.events("SwapFinished")) == 1
    assert late.returncode is None
