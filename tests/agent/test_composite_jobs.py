"""An agent whose backend is a composite: who is asked, who is not, and the way back of a job that left either way."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.agent.rig import Rig, until
from tests.support.jobs import JobProcess
from timeslice.agent import procfs
from timeslice.arena import Device
from timeslice.backends.registry import get_backend
from timeslice.locks import scripts
from timeslice.models import Target

SIZE, DEVICE = 4 << 20, 12 << 20


@asynccontextmanager
async def _agent(rig: Rig, folder: Path) -> AsyncIterator[None]:
    backends = {rig.name: ["composite:stages=channel+arena"]}
    try:
        async with rig.agent(get_backend, emulate={rig.name: DEVICE}, backends=backends, ttl_s=3.0):
            yield
    finally:
        Device.open(folder / "devices" / rig.name).destroy(force=True)


class Layered:
    """Job a: half of its memory it moves itself, the other half is moved from outside."""

    def __init__(self, rig: Rig, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TIMESLICE_NODE", rig.node)
        self.rig, self.folder = rig, folder
        self.process = JobProcess("tests.backends.worker")

    async def load(self) -> None:
        device = str(self.folder / "devices" / self.rig.name)
        self.process.call("arena", device)
        record = self.process.call("application", self.rig.url, self.rig.prefix, self.rig.name, "a")
        self.process.call("keep", SIZE, 1)
        self.digest = self.process.call("allocate", SIZE, 2)
        self.target = Target.model_validate_json(record)
        await self.rig.register(self.target)

    def is_intact(self) -> bool:
        return bool(self.process.call("digest") == self.digest)


@pytest.fixture
async def job(rig: Rig, clean_environment: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Layered]:
    async with _agent(rig, clean_environment):
        made = Layered(rig, clean_environment, monkeypatch)
        await made.load()
        yield made
        made.process.end()


async def moved(rig: Rig, swap: int, *out: str, into: str | None, force: bool = False) -> dict[str, Any]:
    prepared = await rig.order(rig.command(swap, "prepare", *out, into=into, force=force))
    assert prepared["step"] == "prepared", prepared
    await rig.step("prepare", "commit")
    done = await rig.order(rig.command(swap, "commit", *out, into=into, force=force))
    assert done["step"] == "done", done
    return done


async def came_back(rig: Rig) -> None:
    await rig.yield_("b")
    await rig.acquire("a")
    await moved(rig, await rig.plan("b", into="a"), "b", into="a")


async def test_a_job_leaves_by_both_stages_and_comes_back(rig: Rig, job: Layered) -> None:
    """The channel moves its half first, then the process is frozen; all of it returns, and the memory is the same."""
    swap = await rig.begin_swap("a", into="b")
    await moved(rig, swap, "a", into="b")
    member = await rig.member("a")
    assert (member.state, member.backend, member.host_bytes) == ("suspended", "composite", 2 * SIZE)
    assert isinstance(await rig.promote(swap), scripts.Promoted)
    await came_back(rig)
    assert job.is_intact()


async def test_a_stopped_job_is_not_asked_and_comes_back_the_way_it_left(rig: Rig, job: Layered) -> None:
    """L08: what needs its answer is passed over at once; when it runs again all of it is there."""
    os.kill(job.process.pid, signal.SIGSTOP)
    await until(lambda: not procfs.runs(job.target), "it is stopped")
    swap = await rig.begin_swap("a", into="b")
    await moved(rig, swap, "a", into="b")
    member = await rig.member("a")
    assert (member.state, member.backend) == ("suspended", "composite/outside")
    assert isinstance(await rig.promote(swap), scripts.Promoted)
    await came_back(rig)
    assert await rig.member_state("a") == "resident"
    os.kill(job.process.pid, signal.SIGCONT)
    assert job.is_intact()


async def test_a_swap_that_fails_between_two_stages_leaves_a_job_that_runs_on(
    rig: Rig, job: Layered, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P5, G04: the second stage fails after the first one is out. The order fails, and the job is as it was."""
    swap = await rig.begin_swap("a", into="b")
    prepared = await rig.order(rig.command(swap, "prepare", "a", into="b"))
    assert prepared["step"] == "prepared", prepared
    await rig.step("prepare", "commit")
    monkeypatch.setenv("TIMESLICE_ARENA_FAULTS", "checkpoint:fail")
    failed = await rig.order(rig.command(swap, "commit", "a", into="b"))
    assert failed["step"] == "failed", failed
    assert (await rig.member("a")).state == "resident"
    assert job.is_intact()
