"""O18: a holder of which nothing is on the devices, because its framework fell back to the CPU without a word."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.agent.rig import Rig, until
from tests.agent.workers import Starts, agent_on, starts
from timeslice import metrics
from timeslice.agent import procfs
from timeslice.backends.registry import get_backend
from timeslice.locks import scripts

__all__ = ["starts"]

AFTER_S = 0.4


@asynccontextmanager
async def _agent(rig: Rig, folder: Path, **more: Any) -> AsyncIterator[None]:
    async with agent_on(rig, folder, "g", **{"idle_after_s": AFTER_S, **more}):
        yield


async def _complaints(rig: Rig) -> list[str]:
    stored = await rig.driver.client.hget(rig.keys.node_state(rig.node), "complaints")
    found: list[str] = json.loads(stored or b"{}").get("g", [])
    return found


async def _holds(rig: Rig, job: str, pid: int) -> None:
    """The process has the group, registered and confirmed."""
    await rig.register(rig.target(job, pid))
    found = procfs.look_at(pid)
    assert found is not None
    await rig.acquire(job, pid=pid, start=found.start)
    await until(partial(rig.holds, job), f"{job} holds")


def _gauge() -> float:
    return float(metrics.IDLE_HOLDERS.labels("g")._value.get())


async def _complained(rig: Rig) -> str:
    async def told() -> str:
        return next((line for line in await _complaints(rig) if "running on the CPU" in line), "")

    found: str = await until(told, "it is complained of")
    return found


async def _silent(rig: Rig) -> None:
    async def none() -> bool:
        return not await _complaints(rig)

    await until(none, "nothing is complained of")


async def test_a_holder_on_the_cpu_is_complained_of_until_it_comes_to_the_device(
    rig: Rig, starts: Starts, clean_environment: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The node's record, the log (once) and the metric say who holds and since when; with its first bytes that ends."""
    async with _agent(rig, clean_environment):
        worker = starts(JOB="a", GROUPS="g")
        await _holds(rig, "a", worker.pid)
        assert (await _complained(rig)).startswith("holder of g (job a) has no process on the device for ")
        assert _gauge() == 1
        before = await _complained(rig)

        async def counts() -> bool:
            return await _complained(rig) != before

        await until(counts, "the seconds are counted")
        worker.do("load")
        await _silent(rig)
        assert _gauge() == 0
        assert caplog.text.count("is it running on the CPU?") == 1


async def test_who_is_there_and_nobodys_is_named(rig: Rig, starts: Starts, clean_environment: Path) -> None:
    """The driver holds, and its worker shows no job: it may well be on the device, but nobody knows it and nobody could
    move it. The complaint names it, and what to start it with."""
    async with _agent(rig, clean_environment):
        driver, worker = starts(SHOWS="g/a"), starts()
        worker.do("load")
        await _holds(rig, "a", driver.pid)
        told = await _complained(rig)
        assert f"If process {worker.pid} there is, let it register" in told
        assert "TIMESLICE_JOB=a and TIMESLICE_GROUPS=g" in told
        worker.process.kill()
        worker.process.wait()

        async def alone() -> bool:
            return "TIMESLICE_JOB" not in await _complained(rig)

        await until(alone, "nobody is there any more")


async def test_numbers_of_another_pid_namespace_accuse_nobody(rig: Rig) -> None:
    """G27: the driver counts as the host does and the agent is in a container: whose such a number is nobody can tell.
    Once it is gone, the holder is complained of."""
    async with rig.agent(ttl_s=0.9, idle_after_s=AFTER_S):
        process = await rig.job("a")
        ghost = rig.spawn()
        rig.fake.load("ghost", 100)
        rig.fake.write("ghost", {**rig.fake.read("ghost"), "pid": ghost.pid, "as": (1 << 22) + 1})
        await _holds(rig, "a", process.pid)
        await _overdue(rig)
        assert await _complaints(rig) == []
        rig.fake.write("ghost", {})
        await _complained(rig)


async def test_the_complaint_ends_with_the_hold(rig: Rig, starts: Starts, clean_environment: Path) -> None:
    """Nobody holds, nobody is complained of; the next hold is judged anew."""
    async with _agent(rig, clean_environment):
        worker = starts(JOB="a", GROUPS="g")
        await _holds(rig, "a", worker.pid)
        await _complained(rig)
        assert _gauge() == 1
        await rig.yield_("a")
        await _silent(rig)
        assert _gauge() == 0
        await _holds(rig, "a", worker.pid)
        assert "job a" in await _complained(rig)


async def test_a_worker_that_never_registered_counts(rig: Rig, starts: Starts, clean_environment: Path) -> None:
    """A driver that holds for its workers is never on the device itself: it is enough that one of them is. And a hold
    that was once seen there is fine until it ends, whatever it frees."""
    async with _agent(rig, clean_environment):
        driver = starts(SHOWS="g/a")
        worker = starts(JOB="a", GROUPS="g")
        worker.do("load")

        async def known() -> bool:
            return await rig.member_state("a") == "resident"

        await until(known, "the worker is seen")
        await _holds(rig, "a", driver.pid)
        await _overdue(rig)
        assert await _complaints(rig) == []
        worker.process.kill()
        worker.process.wait()

        async def freed() -> bool:
            memory = await rig.driver.client.hget(rig.keys.node_state(rig.node), "memory")
            (device,) = json.loads(memory or b"{}")["devices"]["g"]
            return bool(device["free_bytes"] == device["total_bytes"])

        await until(freed, "its memory is seen free")
        await _overdue(rig)
        assert await _complaints(rig) == []


async def test_where_no_backend_sees_jobs_the_devices_are_asked(
    rig: Rig, starts: Starts, clean_environment: Path
) -> None:
    """With workloads only nobody tells of a holder that registered none; that it is on the device is seen there."""
    async with _agent(rig, clean_environment, backends={"g": ["channel"]}):
        worker = starts(JOB="a", GROUPS="g")
        worker.do("load")
        await _holds(rig, "a", worker.pid)
        await _overdue(rig)
        assert await _complaints(rig) == []
        assert (await rig.member("a")).device_bytes == 0


async def test_state_on_another_node_counts(rig: Rig, starts: Starts, clean_environment: Path) -> None:
    """The driver is on this node and its workers are on that one, whose agent tells of them."""
    async with _agent(rig, clean_environment):
        pulse = await rig.driver.run(scripts.heartbeat(rig.group, "n2", 60_000))
        there = [scripts.Observed("a", "resident", device_bytes=5, backend="cuda")]
        await rig.driver.run(scripts.report(rig.group, "n2", pulse.counter, there, whole=True))
        await _holds(rig, "a", starts(JOB="a", GROUPS="g").pid)
        await _overdue(rig)
        assert await _complaints(rig) == []


async def _overdue(rig: Rig) -> None:
    """The hold is older than what is allowed, by the server's clock; the group was looked at since, for the beat after
    that has come; and the agent has told of itself since."""
    start, beats = (await rig.view()).now_ms + AFTER_S * 1000, set[float]()

    async def looked() -> bool:
        if (await rig.view()).now_ms > start:
            beats.add(await rig.driver.client.zscore(rig.group.nodes, rig.node) or 0.0)
        return len(beats) > 2

    await until(looked, "the agent has looked at the holder when the time was over")
    now = (await rig.view()).now_ms

    async def told() -> bool:
        stored = await rig.driver.client.hget(rig.keys.node_state(rig.node), "heartbeat_at_ms")
        return int(stored or 0) > now

    await until(told, "the agent has told of it")


async def test_where_nobody_could_tell_nobody_is_accused(rig: Rig, starts: Starts, clean_environment: Path) -> None:
    """A group without devices that can be looked at; and an agent that was told not to complain."""
    async with rig.agent(get_backend, backends={"g": ["process"]}, idle_after_s=0.1):
        process = rig.spawn(job="a")
        await _holds(rig, "a", process.pid)
        await _overdue(rig)
        assert await _complaints(rig) == []
        await rig.yield_("a")
    async with _agent(rig, clean_environment, idle_after_s=0.0):
        worker = starts(JOB="b", GROUPS="g")
        await _holds(rig, "b", worker.pid)
        await _overdue(rig)
        assert await _complaints(rig) == []
