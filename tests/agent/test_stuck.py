"""Jobs that must leave, can't be moved, and give no answer: told by default, ended where the group says so."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.agent.knobs import KnobBackend
from tests.agent.rig import NODE, Rig, until
from timeslice import metrics
from timeslice.agent import procfs
from timeslice.backends.base import Backend, Capabilities, Context, Job, Outcome, Selection
from timeslice.backends.registry import get_backend
from timeslice.coordinator.service import CoordinatorOptions, run_coordinator
from timeslice.errors import BackendError, FaultKind
from timeslice.locks import scripts
from timeslice.models import GroupConfig

ONLY_CHANNEL = {"g": ["channel"]}


async def configure(rig: Rig, **settings: str) -> None:
    await rig.driver.run(scripts.configure(rig.group, settings))


def stop(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)


def lives(process: subprocess.Popen[str]) -> bool:
    return process.poll() is None


@asynccontextmanager
async def coordinated(rig: Rig) -> AsyncIterator[None]:
    """A real coordinator, and an agent that has the channel only."""
    stop, ready = asyncio.Event(), asyncio.Event()
    options = CoordinatorOptions(url=rig.url, prefix=rig.prefix, name="c1")
    task = asyncio.create_task(run_coordinator(options, ready=ready.set, stop=stop))
    await asyncio.wait_for(ready.wait(), 20)
    try:
        async with rig.agent(get_backend, backends=ONLY_CHANNEL):
            yield
    finally:
        stop.set()
        await task


class Fails(KnobBackend):
    """Works from outside, and can't do it just now."""

    async def prepare(self, job: Job, selection: Selection, *, deadline_s: float) -> Outcome:
        raise BackendError("it does not answer", kind=FaultKind.POISONED, job=job.job)


class Slow(KnobBackend):
    """Measures the device, and needs an answer of the job."""

    def capabilities(self) -> Capabilities:
        return replace(super().capabilities(), forced=False)


class Asks(Slow, Fails):
    """And the answer does not come."""


StartJob = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(rig: Rig) -> StartJob:
    """Start a job that takes the group and keeps it."""

    def start(job: str, *more: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.agent.stuck_job", job, *more],
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parent.parent.parent,
            env={**os.environ, "TIMESLICE_URL": rig.url, "TIMESLICE_PREFIX": rig.prefix, "TIMESLICE_NODE": NODE},
        )
        rig.processes.append(process)
        return process

    return start


async def inside(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    line = await asyncio.wait_for(asyncio.to_thread(process.stdout.readline), 60)
    assert line == "inside\n"


async def waits_for(rig: Rig, words: str) -> str:
    """Why the rival waits, once that contains these words."""

    async def look() -> str:
        told = next((waiter.deferred for waiter in (await rig.view()).queue), "")
        return told if words in told else ""

    found: str = await until(look, f"the rival reads {words!r}", 60)
    return found


async def test_by_default_the_rival_reads_what_to_do(rig: Rig, start: StartJob) -> None:
    """L28, L08: the holder is stopped past its lease and only it could move its state. The reason names the process and
    the remedies; nobody is killed; continued, it answers, and the rival gets in."""
    async with coordinated(rig):
        first = start("a")
        await inside(first)
        stop(first)
        second = start("b")
        told = await waits_for(rig, "on-stuck")
        assert f"kill -CONT {first.pid}" in told
        assert f"timeslice group set {rig.name} --on-stuck kill" in told
        assert lives(first)
        first.send_signal(signal.SIGCONT)
        await inside(second)
        assert lives(first)


async def test_where_the_group_says_so_it_is_ended_and_the_rival_gets_in(rig: Rig, start: StartJob) -> None:
    """L28: by SIGKILL, which a stopped process heeds too; told in the events and in the metrics."""
    await configure(rig, on_stuck="kill")
    counter = metrics.STUCK_ENDED.labels(rig.name)
    before = counter._value.get()
    async with coordinated(rig):
        first = start("a")
        await inside(first)
        stop(first)
        second = start("b")
        await inside(second)
        assert first.wait(60) == -signal.SIGKILL
        (failed,) = [event["error"] for event in await rig.events("StepFailed") if "on_stuck=kill" in event["error"]]
        assert f"its processes {first.pid} were ended" in failed
        assert counter._value.get() == before + 1
        assert lives(second)


async def test_one_that_hangs_in_its_callback_is_ended_when_it_is_revoked(rig: Rig, start: StartJob) -> None:
    """L28: it answers questions until it is told to leave, and then nothing any more."""
    await configure(rig, on_stuck="kill", suspend_timeout_ms="1500", restore_timeout_ms="1500")
    async with coordinated(rig):
        first = start("a", "hang")
        await inside(first)
        second = start("b")
        state = (await rig.view()).state
        await rig.driver.run(scripts.revoke(rig.group, "a", state["lease_id"], int(state["token"]), "eve", ""))
        await inside(second)
        assert first.wait(60) == -signal.SIGKILL


async def revoked(rig: Rig, process: subprocess.Popen[str], **fields: Any) -> int:
    """The process is of job a, and the group was taken from it by force; the swap that puts it out, planned."""
    await rig.register(rig.target("a", process.pid, **fields))
    granted = await rig.acquire("a", pid=process.pid)
    lease = (await rig.view()).state["lease_id"]
    await rig.driver.run(scripts.revoke(rig.group, "a", lease, granted.token, "eve", ""))
    return await rig.plan("a", into=None)


async def ordered(rig: Rig, swap: int, *, force: bool = True, into: str | None = None) -> str:
    failed = await rig.order(rig.command(swap, "prepare", "a", into=into, force=force))
    assert failed["step"] == "failed", failed
    return failed["error"]


async def test_a_stand_in_is_never_ended(rig: Rig) -> None:
    """Its workload is another process, elsewhere: killing this one would free nothing and hide that."""
    await configure(rig, on_stuck="kill")
    process = rig.spawn(job="a")
    async with rig.agent(get_backend, backends=ONLY_CHANNEL):
        swap = await revoked(rig, process, channel="p1", backend="channel")
        stop(process)
        assert "end job a there" in await ordered(rig, swap)
        assert lives(process)


async def test_what_works_from_outside_is_never_replaced_by_a_kill(rig: Rig) -> None:
    """Its fault may pass, and the state is worth keeping."""
    await configure(rig, on_stuck="kill")

    def make(_: str, context: Context) -> Backend:
        return Fails(context)

    async with rig.agent(make):
        process = rig.spawn(job="a")
        rig.fake.load("a", 600)
        swap = await revoked(rig, process)
        stop(process)
        assert "on_stuck" not in await ordered(rig, swap)
        assert lives(process)


@pytest.mark.parametrize("order", ["a rival asks", "evicted, not by force"])
async def test_who_may_stay_is_not_ended(rig: Rig, order: str) -> None:
    """A job that gave the group up, or that an operator wants out if that goes well, has done nothing wrong."""
    await configure(rig, on_stuck="kill")
    process = rig.spawn(job="a")
    async with rig.agent(get_backend, backends=ONLY_CHANNEL):
        await rig.register(rig.target("a", process.pid))
        await rig.acquire("a", pid=process.pid)
        if order == "a rival asks":
            await rig.acquire("b")
        await rig.yield_("a")
        if order != "a rival asks":
            await rig.driver.run(scripts.own(rig.group, "c1"))
            await rig.driver.run(scripts.evict(rig.group, "a", "eve", "", force=False))
        swap = await rig.plan("a", into=None)
        stop(process)
        assert "on_stuck" not in await ordered(rig, swap, force=False)
        assert lives(process)


async def test_only_the_proven_processes_of_that_job_are_ended(rig: Rig) -> None:
    """F04: neither another job's, nor one that a registration claims without showing it."""
    await configure(rig, on_stuck="kill")
    mine, other, claimed = rig.spawn(job="a"), rig.spawn(job="b"), rig.spawn(job="c")
    async with rig.agent(get_backend, backends=ONLY_CHANNEL):
        await rig.register(rig.target("b", other.pid))
        await rig.register(rig.target("a", claimed.pid))
        swap = await revoked(rig, mine)
        assert f"its processes {mine.pid} were ended" in await ordered(rig, swap)
        assert mine.wait(60) == -signal.SIGKILL
        assert lives(other)
        assert lives(claimed)


async def test_a_workload_that_answers_that_it_can_not_is_not_ended(rig: Rig) -> None:
    """It is not stuck, and its state is worth keeping: whoever asked so is told."""
    await configure(rig, on_stuck="kill")

    def make(_: str, context: Context) -> Backend:
        return Slow(context)

    async with rig.agent(make):
        process = rig.spawn(job="a")
        rig.fake.load("a", 600)
        rig.fake.knob("prepare", fail=-1, kind="unsupported")
        swap = await revoked(rig, process, channel="p1")
        assert "on_stuck" not in await ordered(rig, swap)
        assert lives(process)


async def test_a_setting_that_was_taken_back_a_moment_ago_counts(rig: Rig) -> None:
    """What the agent has heard of the setting may be old by seconds: before it ends anybody it asks again."""
    await configure(rig, on_stuck="kill")

    def make(_: str, context: Context) -> Backend:
        return Slow(context)

    async with rig.agent(make, ttl_s=90.0):
        process = rig.spawn(job="a")
        rig.fake.load("a", 600)
        rig.fake.knob("suspend", fail=-1, kind="poisoned")
        swap = await revoked(rig, process)
        prepared = await rig.order(rig.command(swap, "prepare", "a", into=None, force=True))
        assert prepared["step"] == "prepared", prepared
        await configure(rig, on_stuck="block")
        await rig.step("prepare", "commit")
        failed = await rig.order(rig.command(swap, "commit", "a", into=None, force=True))
        assert "--on-stuck kill" in failed["error"]
        assert lives(process)


async def test_it_is_out_only_when_its_memory_is_free(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kill alone proves nothing: until the device is measured free the next try fails, too."""
    monkeypatch.setattr("timeslice.agent.presence.FREE_S", 0.5)
    await configure(rig, on_stuck="kill")

    def make(_: str, context: Context) -> Backend:
        return Asks(context)

    async with rig.agent(make):
        process = rig.spawn(job="a")
        rig.fake.load("a", 600)
        rig.fake.write("a", {**rig.fake.read("a"), "pid": os.getpid(), "as": process.pid})  # outlives the process
        swap = await revoked(rig, process)
        assert "were ended" in await ordered(rig, swap)
        assert not procfs.runs(rig.target("a", os.getpid()).model_copy(update={"pid": process.pid}))
        assert "600 bytes of its device memory are still taken" in await ordered(rig, swap)
        rig.fake.write("a", {})
        prepared = await rig.order(rig.command(swap, "prepare", "a", into=None, force=True))
        assert prepared["step"] == "prepared", prepared


def test_nobody_is_ended_unless_the_group_says_so() -> None:
    """The setting is off until somebody turns it on."""
    assert GroupConfig().on_stuck == "block"


@pytest.mark.parametrize("operation", ["probe", "prepare", "suspend"])
async def test_a_fault_that_names_no_job_is_told_of_the_one_that_was_asked(rig: Rig, operation: str) -> None:
    """L28: a backend of third parties, or a deadline, may not say whose fault it is. The remedies are told all the
    same."""

    def make(_: str, context: Context) -> Backend:
        return Slow(context)

    async with rig.agent(make):
        process = rig.spawn(job="a")
        rig.fake.load("a", 600)
        swap = await revoked(rig, process)
        rig.fake.knob(operation, fail=-1, kind="poisoned")
        order = rig.command(swap, "prepare", "a", into=None, force=True)
        answer = await rig.order(order)
        if operation == "suspend":
            await rig.step("prepare", "commit")
            answer = await rig.order(rig.command(swap, "commit", "a", into=None, force=True))
        assert "--on-stuck kill" in answer["error"]
        assert lives(process)
