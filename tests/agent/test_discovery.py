"""Processes of jobs that did not register: who is found, who is not, and what becomes of them."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.agent.rig import Rig, until
from tests.agent.workers import SIZE, Starts, agent_on, found, starts, watched
from tests.support.jobs import process_state
from timeslice.arena.survey import arenas_of

__all__ = ["starts"]


async def _looked(rig: Rig, starts: Starts) -> None:
    """The agent has looked at everybody since now, for it has found a process that was started now."""
    last = starts(JOB="last", GROUPS="g")
    last.do("load")
    await found(rig, last.pid, job="last")
    last.process.kill()
    last.process.wait()
    await until(lambda: last.pid not in watched(rig), "its memory is free")


async def test_a_worker_that_never_registered_is_seen_moved_and_forgotten(
    rig: Rig, starts: Starts, clean_environment: Path
) -> None:
    """C20, F05: it is flagged, for it is on the device without a hold; a swap moves it out with its content kept; with
    its end the job is gone."""
    async with agent_on(rig, clean_environment, "g"):
        worker = starts(JOB="a", GROUPS="g")
        worker.do("load")

        async def flagged() -> bool:
            member = await rig.member("a")
            return member is not None and bool(member.unheld)

        await until(flagged, "job a is flagged")
        assert (await rig.member("a")).device_bytes == SIZE
        assert (await rig.view()).targets == {}, "nothing of it stands in Redis that it did not say"
        await rig.acquire("b")
        swap = await rig.plan("a", into="b")
        assert (await rig.order(rig.command(swap, "prepare", "a", into="b")))["step"] == "prepared"
        await rig.step("prepare", "commit")
        assert (await rig.order(rig.command(swap, "commit", "a", into="b")))["step"] == "done"
        (arena,) = arenas_of(worker.pid)
        assert (arena.bytes_on_device, arena.bytes_on_host) == (0, SIZE)
        worker.process.kill()
        worker.process.wait()

        async def gone() -> bool:
            return await rig.member("a") is None and not watched(rig)

        await until(gone, "job a is gone")


async def test_only_who_has_memory_on_the_device_is_taken(rig: Rig, starts: Starts, clean_environment: Path) -> None:
    """G14: a parent that opened the device and allocated nothing, and a helper that never did, are left alone; the
    child that allocated is the job's process here."""
    async with agent_on(rig, clean_environment, "g"):
        helper = starts(JOB="a", GROUPS="g")
        parent = starts(JOB="a", GROUPS="g")
        parent.do("open")
        child = parent.do("child")
        await found(rig, child)
        assert watched(rig) == {child: "a"}
        parent.process.kill()
        os.kill(child, signal.SIGKILL)
        await until(lambda: not watched(rig), "the child is forgotten")
        assert process_state(helper.pid) == "S"


async def test_a_fork_is_found_by_the_memory_file_of_its_parent(
    rig: Rig, starts: Starts, clean_environment: Path
) -> None:
    """Forks hold what their parent showed when it registered; nothing about them needs to be in the environment."""
    async with agent_on(rig, clean_environment, "g"):
        parent = starts(SHOWS="g/a")
        fork = parent.do("fork")
        try:
            await found(rig, fork)
            assert watched(rig) == {fork: "a"}
        finally:
            os.kill(fork, signal.SIGKILL)


async def test_a_program_inherits_the_groups_of_a_process_that_has_shown_them(
    rig: Rig, starts: Starts, clean_environment: Path
) -> None:
    """The driver sets TIMESLICE_JOB late, by ``os.environ``, and registers itself; its engine is a program of its own
    that shows the job and no group. Without the driver's proof the same program is nobody's."""
    async with agent_on(rig, clean_environment, "g"):
        driver, other = starts(LATE_JOB="a", SHOWS="g/a"), starts(LATE_JOB="b", SHOWS="h/b")
        await rig.register(rig.target("a", driver.pid))
        await rig.register(rig.target("b", other.pid))
        engine = driver.do("child")
        try:
            await found(rig, engine)
        finally:
            os.kill(engine, signal.SIGKILL)
        await until(lambda: engine not in watched(rig), "its memory is free")
        engine = other.do("child")
        try:
            await _looked(rig, starts)
            assert watched(rig) == {driver.pid: "a"}
        finally:
            os.kill(engine, signal.SIGKILL)


async def test_two_roles_of_a_job_are_two_sets(rig: Rig, starts: Starts, clean_environment: Path) -> None:
    """F04: who was started for the trainers is not in the samplers, on whatever device it is; each group looks at its
    own device."""
    async with agent_on(rig, clean_environment, "g", "h"):
        trainer, sampler = starts(JOB="a", GROUPS="g"), starts(JOB="a", GROUPS="h", on="h")
        both, wrong = starts(JOB="b", GROUPS="g,h", on="h"), starts(JOB="a", GROUPS="g", on="h")
        trainer.do("load")
        sampler.do("load")
        await found(rig, trainer.pid)
        await found(rig, sampler.pid, "h")
        sampler.process.kill()
        sampler.process.wait()
        await until(lambda: sampler.pid not in watched(rig, "h"), "its memory is free")
        wrong.do("load")
        both.do("load")
        await found(rig, both.pid, "h", "b")
        assert wrong.pid not in watched(rig, "h")
        assert watched(rig) == {trainer.pid: "a"}


async def test_other_installations_are_left_alone(rig: Rig, starts: Starts, clean_environment: Path) -> None:
    """Two of them on one machine, with groups and jobs of the same names, are told apart by the prefix."""
    async with agent_on(rig, clean_environment, "g"):
        theirs = starts(JOB="a", GROUPS="g", PREFIX="theirs")
        theirs.do("load")
        await _looked(rig, starts)
        assert watched(rig) == {}


async def test_a_process_that_goes_on_as_another_program_is_let_go(
    rig: Rig, starts: Starts, clean_environment: Path
) -> None:
    """What it runs now was not started as the job's: it has not ended, and it is not watched any more."""
    async with agent_on(rig, clean_environment, "g"):
        worker = starts(JOB="a", GROUPS="g")
        worker.do("load")
        await found(rig, worker.pid)
        worker.do("exec")
        await until(lambda: not watched(rig), "it is let go")
        assert process_state(worker.pid) == "S"


def _sleeper(rig: Rig, **options: Any) -> subprocess.Popen[bytes]:
    shown = {"TIMESLICE_JOB": "a", "TIMESLICE_GROUPS": "g", "TIMESLICE_PREFIX": rig.prefix}
    return subprocess.Popen(["/bin/sleep", "600"], env=shown, **options)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs another user's process")
async def test_a_job_is_one_users(rig: Rig) -> None:
    """A local user can't put a process into another user's job by its environment: it is left alone, and that is told.
    The backend `knobs` tells nothing of devices, so whoever shows group and job would be found."""
    async with rig.agent(ttl_s=0.9):
        await rig.job("a")
        theirs, ours = _sleeper(rig, user=65534, group=65534), _sleeper(rig)
        try:
            await found(rig, ours.pid)

            async def told() -> bool:
                stored = await rig.driver.client.hget(rig.keys.node_state(rig.node), "complaints")
                return f"process {theirs.pid} shows job a and is left alone: it runs as user id 65534" in str(stored)

            await until(told, "the complaint is in the node's record")
            assert theirs.pid not in watched(rig)
        finally:
            for process in (theirs, ours):
                process.kill()
                process.wait()
