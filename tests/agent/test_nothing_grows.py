"""What an agent keeps of jobs that are gone: nothing, neither in memory nor on disk nor in Redis."""

from __future__ import annotations

import subprocess
from typing import Any

from tests.agent.rig import Rig, until
from tests.support.census import census, grown
from timeslice.locks.keys import Keys


async def _kill(rig: Rig, job: str, process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()

    async def forgotten() -> bool:
        view = await rig.view()
        return job not in view.jobs and not any(target.startswith(f"{job}/") for target in view.targets)

    await until(forgotten, f"job {job} is forgotten")


async def _round(rig: Rig, number: int) -> None:
    """Two new jobs: one is suspended and dies, one yields and dies, and one registers and never holds."""
    first, second, third = (f"{name}{number}" for name in ("first", "second", "third"))
    processes = [await rig.job(first, 600), await rig.job(second), await rig.job(third)]
    await rig.swap(first, into=second)
    rig.fake.load(second, 500)
    await _kill(rig, first, processes[0])
    await rig.yield_(second)
    (rig.fake.folder / f"{second}.json").unlink()  # what it has on the device goes with it
    await _kill(rig, second, processes[1])
    await _kill(rig, third, processes[2])
    (rig.fake.folder / f"{first}.json").unlink()
    await rig.idle()


async def _sizes(rig: Rig) -> dict[str, int]:
    """Bytes on disk, and fields of the group's hashes."""
    client: Any = rig.driver.client
    keys = rig.group
    found = {name: await client.hlen(getattr(keys, name)) for name in ("jobs", "members", "targets", "waiters")}
    folder = rig.folder / "state"
    return found | {path.name: path.stat().st_size for path in folder.rglob("*.json")}


async def test_jobs_that_are_gone_leave_nothing_behind(rig: Rig) -> None:
    """F05: after many jobs that were suspended, killed, or never held, the agent keeps no more than after a few: no
    container of it has more in it, its files are as small, and the group's hashes too."""
    async with rig.agent(ttl_s=0.9):
        for number in range(3):
            await _round(rig, number)
        before, sizes = census(), await _sizes(rig)
        for number in range(3, 9):
            await _round(rig, number)
        await until(lambda: grown(before, census(), rounds=6) == {}, "no more is kept")  # but what is under way now
        assert {name: size for name, size in (await _sizes(rig)).items() if size > sizes[name] + 40} == {}


async def test_a_node_that_left_leaves_nothing_behind(rig: Rig) -> None:
    """Nodes with names of their own come and go, as pods do: neither index nor record nor command stream stays."""
    keys, client = Keys(rig.prefix), rig.driver.client
    rig.node = "pod-1"
    async with rig.agent(leave=True):
        await until(lambda: client.exists(keys.commands("pod-1")), "orders are read")
        assert await client.ttl(keys.node_state("pod-1")) > 0
    assert await client.sismember(keys.nodes, "pod-1") == 0
    assert await client.exists(keys.node_state("pod-1"), keys.commands("pod-1")) == 0


async def test_what_a_silent_node_left_expires(rig: Rig) -> None:
    """Its machine is gone without a word: record and command stream do not stay for ever."""
    keys, client = Keys(rig.prefix), rig.driver.client
    async with rig.agent(ttl_s=0.9):
        await until(lambda: _expires(client, keys.commands(rig.node)), "the command stream expires")
        assert await client.ttl(keys.node_state(rig.node)) > 0


async def _expires(client: Any, key: str) -> bool:
    return int(await client.ttl(key)) > 0
