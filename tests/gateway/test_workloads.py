"""Workloads behind a WorkloadChannel are moved by a real agent, for real."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import grpc
import pytest

from tests.agent.rig import until
from tests.gateway.snapshot_rig import FakeWorkload, Place, placed, serving
from tests.support.jobs import process_state
from timeslice.locks import scripts
from timeslice.models import Target

Code = grpc.StatusCode


@pytest.fixture
async def place(redis_url: str, prefix: str, tmp_path: Path) -> AsyncIterator[Place]:
    async with placed(redis_url, prefix, tmp_path) as made:
        yield made


async def targets(place: Place) -> list[Target]:
    return [Target.model_validate_json(record) for record in (await place.rig.view()).targets.values()]


def proc(pid: int, name: str) -> Path:
    return Path("/proc", str(pid), name)


def shown(pid: int) -> list[str]:
    """The jobs that a process's descriptors show. One that is closed meanwhile shows none."""
    found = []
    for file in proc(pid, "fd").iterdir():
        with suppress(FileNotFoundError):
            found.append(str(file.readlink()))
    return [name for name in found if "timeslice:" in name]


def queue(place: Place, job: str) -> asyncio.Task[None]:
    """A turn of a job that has to wait for another's state to move."""
    return asyncio.create_task(place.turn(job))


async def gone(place: Place, pid: int) -> None:
    async def absent() -> bool:
        return pid not in [target.pid for target in await targets(place)]

    await until(absent, f"the agent has seen the end of process {pid}")


async def test_two_workloads_alternate(place: Place) -> None:
    """Each is told to save its state before the other runs, and to bring it back before it runs again."""
    a, b = await place.workload("a"), await place.workload("b")
    await place.turn("a")
    assert a.kinds() == b.kinds() == []
    await place.turn("b")
    assert (a.kinds(), b.kinds()) == (["snapshot"], [])
    await place.turn("a")
    assert (a.kinds(), b.kinds()) == (["snapshot", "restore"], ["snapshot"])
    assert (await place.residency("a"), await place.residency("b")) == ("resident", "suspended")
    assert len({command.command_id for command in (*a.commands, *b.commands)}) == 3


async def test_what_agents_watch_is_a_process_for_each_workload(place: Place) -> None:
    """Never the gateway's own, which nobody may stop or copy; only the channel can move it, and no environment tells
    of other jobs."""
    for job in "ab":
        await place.workload(job)
    found = await targets(place)
    assert {target.job: target.backend for target in found} == {"a": "channel", "b": "channel"}
    assert len({os.getpid(), *(target.pid for target in found)}) == 3
    for target in found:
        assert shown(target.pid) == [f"/memfd:timeslice:g/{target.job} (deleted)"]
        names = {each.partition(b"=")[0] for each in proc(target.pid, "environ").read_bytes().split(b"\0")}
        assert {name for name in names if name.startswith(b"TIMESLICE")} == {b"TIMESLICE_NODE", b"TIMESLICE_PREFIX"}


async def test_a_stream_that_breaks_in_the_middle_of_a_command_goes_on_where_it_was(place: Place) -> None:
    """Who comes back is told the unanswered command again, under the same id; answers of nobody's are ignored."""
    a = await place.workload("a", silent=True)
    await place.workload("b")
    await place.turn("a")
    turn = queue(place, "b")
    await a.told("snapshot")
    await a.close()
    again = await place.workload("a", silent=True)
    await again.told("snapshot")
    assert again.commands == a.commands
    await again.say(result={"command_id": "nobody's", "ok": True})
    await again.answer(again.commands[0])
    await again.answer(again.commands[0], error="too late to say so")
    await turn
    assert await place.residency("a") == "suspended"
    again.silent = False
    await place.turn("a")
    assert again.kinds() == ["snapshot", "restore"]


async def test_a_workload_that_reconnects_is_where_it_was(place: Place) -> None:
    """Its saved state is brought back after a break, and not asked for a second time."""
    a = await place.workload("a")
    await place.turn("a")
    await place.outcome(await place.snapshot("a"))
    await a.close()
    again = await place.workload("a")
    assert await place.residency("a") == "suspended"
    await place.turn("a")
    assert again.kinds() == ["restore"]
    assert len(await targets(place)) == 1


async def test_another_gateway_knows_where_a_workload_is(place: Place, redis_url: str) -> None:
    """After the first one ended its stand-in stays, so the job is not gone when the second one comes up."""
    a = await place.workload("a")
    await place.turn("a")
    await place.outcome(await place.snapshot("a"))
    await a.close()
    (old,) = (stand_in for stand_in in place.service._workloads._known.values() if stand_in)
    await place.service.close()
    assert process_state(old.pid) in "RS"
    assert await place.residency("a") == "suspended"
    async with serving(redis_url, place.rig.prefix) as (stub, *_):
        again = FakeWorkload(stub, "a")
        await again.register()
        assert len(await targets(place)) == 2
        old._process.kill()  # what it would do by itself when its time is over
        old._process.wait()
        await gone(place, old.pid)
        await place.turn("a")
        assert again.kinds() == ["restore"]
        await again.close()


async def test_a_workload_that_says_good_bye_has_ended(place: Place) -> None:
    """At once: its state is gone, and the next one need not wait for it."""
    a = await place.workload("a")
    await place.turn("a")
    (target,) = await targets(place)
    await a.finish()
    await gone(place, target.pid)
    await place.turn("b")
    assert await place.residency("a") == "absent"


async def test_an_order_by_force_does_not_stop_the_stand_in(redis_url: str, prefix: str, tmp_path: Path) -> None:
    """Who is meant is elsewhere, so it is asked all the same."""
    backends = {"g": ["channel", f"process:state={tmp_path / 'stopped'}"]}
    async with placed(redis_url, prefix, tmp_path, backends=backends) as place:
        a = await place.workload("a")
        await place.turn("a")
        (target,) = await targets(place)
        await place.rig.driver.run(scripts.evict(place.rig.group, "a", "eve", "", force=True))
        await a.told("snapshot")

        async def out() -> bool:
            return await place.residency("a") == "suspended"

        await until(out, "job a is out")
        assert process_state(target.pid) == "S"
