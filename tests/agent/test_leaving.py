"""An agent that was told to leave: what it looks at and tells before it is gone, and what keeps it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from tests.agent.knobs import make
from tests.agent.rig import Rig, until
from tests.conftest import ServerFactory
from timeslice.agent.choice import MakeBackend
from timeslice.backends.base import Backend, Context, Job, Probe
from timeslice.locks import scripts

QUIET_S = 600.0  # no heartbeat comes by itself


async def test_a_group_that_can_not_be_left_keeps_it_in_no_other(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    """One group's keys are spoilt. The next one would wait for a node that nobody serves any more."""
    other = rig.keys.group("other")
    async with rig.agent(groups=(rig.name, other.name), leave=True, ttl_s=QUIET_S):
        await rig.driver.client.delete(rig.group.state)
        await rig.driver.client.set(rig.group.state, "spoilt")
    assert (await rig.driver.view(other)).nodes == {}
    assert f"group {rig.name}: node {rig.node} could not take its leave" in caplog.text
    async with rig.agent(groups=(other.name,), ttl_s=QUIET_S, state_dir=str(rig.folder / "elsewhere")):
        pass  # nor does its node id have to run out


async def test_a_node_that_stays_in_one_group_is_still_listed(rig: Rig) -> None:
    """It has left the other one; its record and orders are kept for the group that waits for it."""
    other, client = rig.keys.group("other"), rig.driver.client
    async with rig.agent(groups=(rig.name, other.name), leave=True, ttl_s=QUIET_S):
        await rig.job("a", 600)
        await rig.swap("a", into="b")
    assert (set((await rig.view()).nodes), (await rig.driver.view(other)).nodes) == ({rig.node}, {})
    assert await client.sismember(rig.keys.nodes, rig.node)
    assert await client.exists(rig.keys.node_state(rig.node))


async def test_what_redis_forgot_of_the_node_is_told_before_it_leaves(
    server_factory: ServerFactory, prefix: str, tmp_path: Path
) -> None:
    """All data was lost a moment ago, and with it that a job is on the device: the node has to stay."""
    rig = Rig(server_factory().url, prefix, tmp_path)
    try:
        async with rig.agent(leave=True, ttl_s=QUIET_S):
            await rig.job("a", 600)
            await rig.swap("a", into="b")
            await rig.driver.client.flushall()
        node = (await rig.view()).nodes[rig.node]
        assert (node.alive, await rig.member_state("a")) == (False, "suspended")
        assert isinstance(await rig.acquire("c"), scripts.Queued)
    finally:
        await rig.close()


async def test_a_job_that_ended_a_moment_ago_keeps_no_node(rig: Rig) -> None:
    """It was suspended here, and the group has not heard yet that its processes ended."""
    async with rig.agent(leave=True, ttl_s=QUIET_S):
        process = await rig.job("a", 600)
        await rig.swap("a", into="b")
        process.kill()
        process.wait()
    assert (await rig.view()).nodes == {}


async def test_who_is_let_in_while_the_agent_looks_keeps_no_node(rig: Rig) -> None:
    """The group takes the new holder to be on every node. The agent had not heard of it, and so looks again."""
    granted: list[object] = []
    leaving = False

    async def meanwhile() -> None:
        if leaving and not granted:
            granted.append(await rig.acquire("b"))

    async with rig.agent(make_backend=_probing(meanwhile), leave=True, ttl_s=QUIET_S):
        await rig.job("c")
        leaving = True
    view = await rig.view()
    assert isinstance(granted[0], scripts.Granted)
    assert (view.holder, view.nodes) == ("b", {})


async def test_a_process_that_the_agent_may_not_watch_keeps_the_node(rig: Rig) -> None:
    """A registration of the holder is refused here: nobody knows what that process has on the devices."""
    async with rig.agent(leave=True, ttl_s=0.9):
        assert isinstance(await rig.acquire("a"), scripts.Granted)
        await rig.register(rig.target("a", rig.spawn(job="b").pid))
        await until(lambda: _complained(rig), "the registration is refused")
    assert set((await rig.view()).nodes) == {rig.node}


async def _complained(rig: Rig) -> bool:
    record = await rig.driver.client.hget(rig.keys.node_state(rig.node), "complaints")
    return b"is ignored" in (record or b"")


def _probing(meanwhile: Callable[[], Awaitable[None]]) -> MakeBackend:
    """A backend that is told to probe, and something else happens first."""

    def made(name: str, context: Context) -> Backend:
        backend = make(name, context)
        probe = backend.probe

        async def look(job: Job) -> Probe:
            await meanwhile()
            return await probe(job)

        backend.probe = look  # type: ignore[method-assign]
        return backend

    return made
