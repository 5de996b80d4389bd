"""Processes whose environment says nothing any more, as engine cores and servers overwrite it that give themselves a
title; and who else is on a group's devices and is no job's."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.agent.rig import Rig, until
from tests.agent.workers import SIZE, Starts, agent_on, devices_end, emulated, found, starts, watched
from timeslice import metrics
from timeslice.arena.survey import arenas_of
from timeslice.backends.registry import get_backend

__all__ = ["starts"]


async def _complaints(rig: Rig) -> str:
    stored: Any = await rig.driver.client.hget(rig.keys.node_state(rig.node), "complaints")
    return "\n".join(json.loads(stored or b"{}").get(rig.name, []))


async def _complained(rig: Rig, words: str) -> None:
    async def told() -> bool:
        return words in await _complaints(rig)

    await until(told, f"it is told: {words}")


async def test_an_engine_core_with_a_title_is_moved_with_the_job_that_started_it(
    rig: Rig, starts: Starts, clean_environment: Path
) -> None:
    """The launcher shows the job; the core has overwritten its environment before it loaded, and shows nothing."""
    async with agent_on(rig, clean_environment, "g"):
        launcher = starts(JOB="a", GROUPS="g")
        core = launcher.do("titled")
        try:
            await found(rig, core)

            async def resident() -> bool:
                return await rig.member_state("a") == "resident"

            await until(resident, "the group knows that it is on the device")
            await rig.acquire("b")
            swap = await rig.plan("a", into="b")
            assert (await rig.order(rig.command(swap, "prepare", "a", into="b")))["step"] == "prepared"
            await rig.step("prepare", "commit")
            assert (await rig.order(rig.command(swap, "commit", "a", into="b")))["step"] == "done"
            (arena,) = arenas_of(core)
            assert (arena.bytes_on_device, arena.bytes_on_host) == (0, SIZE)
        finally:
            os.kill(core, signal.SIGKILL)


async def test_what_an_engine_core_descends_from_is_remembered_when_its_launcher_ends(
    rig: Rig, starts: Starts, clean_environment: Path
) -> None:
    """The agent saw them together."""
    async with agent_on(rig, clean_environment, "g"):
        launcher = starts(JOB="a", GROUPS="g")
        core = launcher.do("titled")
        await found(rig, core)
        launcher.process.kill()
        launcher.process.wait()
        await _other_found(rig, starts)
        assert watched(rig) == {core: "a"}
        os.kill(core, signal.SIGKILL)
        await until(lambda: not watched(rig), "it is forgotten")


async def test_a_core_stays_the_jobs_over_a_restart_of_the_agent(
    rig: Rig, starts: Starts, clean_environment: Path
) -> None:
    """The next agent can't read it from anywhere any more: the launcher has ended meanwhile."""
    with devices_end(clean_environment, "g"):
        async with rig.agent(get_backend, **emulated("g")):
            launcher = starts(JOB="a", GROUPS="g")
            core = launcher.do("titled")
            await found(rig, core)
        launcher.process.kill()
        launcher.process.wait()
        async with rig.agent(get_backend, **emulated("g")):
            await _other_found(rig, starts)
            assert watched(rig)[core] == "a"
        os.kill(core, signal.SIGKILL)


async def _other_found(rig: Rig, starts: Starts) -> None:
    """The agent has looked at everybody since now."""
    last = starts(JOB="last", GROUPS="g")
    last.do("load")
    await found(rig, last.pid, job="last")
    last.process.kill()
    last.process.wait()
    await until(lambda: last.pid not in watched(rig), "its memory is free")


async def test_a_registered_process_stays_the_jobs_when_it_shows_nothing_any_more(
    rig: Rig, starts: Starts, clean_environment: Path
) -> None:
    """It has given itself a title and closed what it had inherited, as daemons do, and the agent starts again; what
    stood in Redis is lost as well."""
    with devices_end(clean_environment, "g"):
        async with rig.agent(get_backend, **emulated("g")):
            worker = starts(SHOWS="g/a")
            worker.do("load")
            await rig.register(rig.target("a", worker.pid))
            await found(rig, worker.pid)
        worker.do("title")
        worker.do("close")
        await rig.driver.client.delete(rig.group.targets)
        async with rig.agent(get_backend, **emulated("g")):
            await _other_found(rig, starts)
            assert watched(rig) == {worker.pid: "a"}


async def test_one_that_may_be_any_jobs_is_doubtful_and_one_that_is_nobodys_a_stranger(
    rig: Rig, starts: Starts, clean_environment: Path
) -> None:
    """Both are on the device, and neither is touched. Whose the one with a title is nobody can tell; the other one
    shows that it is no job's. Both are complained of and counted, until they end."""
    async with agent_on(rig, clean_environment, "g"):
        titled, stranger = starts(TITLE="1"), starts()
        titled.do("load")
        stranger.do("load")
        await _complained(
            rig, f"process {titled.pid} on the device may be any job's: it has overwritten its environment"
        )
        await _complained(rig, f"process {stranger.pid} has {SIZE} bytes on the group's devices and belongs to no job")
        assert watched(rig) == {}
        gauges = (metrics.STRANGERS, metrics.STRANGER_BYTES, metrics.DOUBTFUL)
        assert [gauge.labels("g")._value.get() for gauge in gauges] == [1, SIZE, 1]
        for worker in (titled, stranger):
            worker.process.kill()
            worker.process.wait()

        async def silent() -> bool:
            return await _complaints(rig) == ""

        await until(silent, "nothing is complained of")
        assert [gauge.labels("g")._value.get() for gauge in gauges] == [0, 0, 0]


@pytest.mark.parametrize("shown", [{"JOB": "a"}, {"JOB": "a", "GROUPS": "g", "SHOWS": "g/b"}], ids=["no-group", "two"])
async def test_one_that_names_a_job_and_not_whose_it_is_here_is_doubtful(
    rig: Rig, starts: Starts, clean_environment: Path, shown: dict[str, str]
) -> None:
    """It is no stranger: it may well be one of these jobs', and only it or who starts it can say which."""
    async with agent_on(rig, clean_environment, "g"):
        worker = starts(**shown)
        worker.do("load")
        await _complained(rig, f"process {worker.pid} on the device names job a")
        assert watched(rig) == {}
        assert metrics.STRANGERS.labels("g")._value.get() == 0


async def test_a_process_that_shows_its_job_later_is_found(rig: Rig, starts: Starts, clean_environment: Path) -> None:
    """The agent has looked into it before; as its registration went to another name of this host, nothing but its
    memory file tells whose it is."""
    async with agent_on(rig, clean_environment, "g"):
        worker = starts()
        worker.do("load")
        await _complained(rig, f"process {worker.pid} has {SIZE} bytes")
        worker.do("show g/a")
        await found(rig, worker.pid)


@pytest.mark.parametrize("backends", [["arena"], ["channel"]])
async def test_another_installations_process_is_a_stranger(
    rig: Rig, starts: Starts, clean_environment: Path, backends: list[str]
) -> None:
    """It shows a job, and not of ours; where only workloads move their own state, too, for it takes room from them."""
    async with agent_on(rig, clean_environment, "g", backends={"g": backends}):
        theirs = starts(JOB="a", GROUPS="g", PREFIX="theirs")
        theirs.do("load")
        await _complained(rig, f"process {theirs.pid} has {SIZE} bytes on the group's devices and belongs to no job")
        assert watched(rig) == {}
