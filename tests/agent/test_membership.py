"""Joining, leaving, losing Redis's data, and being the only agent of a node."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.agent.knobs import make
from tests.agent.rig import Rig, until
from tests.conftest import ServerFactory
from timeslice.backends.base import Backend, Context, Job, Probe
from timeslice.errors import GroupModeError, RefusedError, ServerUnsuitableError, UsageError
from timeslice.locks import scripts

AHEAD = time.time_ns() // 1_000_000 + 10**9  # a floor that the clock does not reach for days


async def test_a_stopped_agent_has_not_left(rig: Rig) -> None:
    """Stopping is not leaving: the node stays a member until somebody says otherwise. †"""
    async with rig.agent():
        await rig.job("a", 600)
    assert set((await rig.view()).nodes) == {rig.node}


async def test_an_agent_that_is_told_to_leave_is_gone_from_the_group(rig: Rig) -> None:
    """With `leave` the node is no member any more after the stop."""
    async with rig.agent(leave=True):
        assert set((await rig.view()).nodes) == {rig.node}
    assert (await rig.view()).nodes == {}


async def test_an_agent_with_nothing_to_tell_says_so(rig: Rig) -> None:
    """The group waits for the first word of a node that joined, be it that there is nothing."""
    async with rig.agent():
        pulse = await rig.driver.run(scripts.heartbeat(rig.group, rig.node, 3000))
        assert pulse.known


async def test_the_record_of_the_node_says_who_serves_it(rig: Rig) -> None:
    """The node's hash and the indexes are there before the first use, and they expire."""
    async with rig.agent():
        record = await rig.driver.client.hgetall(rig.keys.node_state(rig.node))
        assert {b"heartbeat_at_ms", b"instance", b"version", b"capabilities", b"memory", b"groups"} <= set(record)
        assert await rig.driver.client.ttl(rig.keys.node_state(rig.node)) > 0
        assert await rig.driver.client.sismember(rig.keys.nodes, rig.node)
        assert await rig.driver.client.sismember(rig.keys.groups, rig.name)


async def test_after_flushall_the_agent_is_back_with_members_and_floor(
    server_factory: ServerFactory, prefix: str, tmp_path: Path
) -> None:
    """All of Redis's data is lost: the node, its jobs' states and the counter return by themselves, and nobody is
    granted meanwhile."""
    rig = Rig(server_factory().url, prefix, tmp_path)
    try:
        async with rig.agent(ttl_s=1.5):
            await rig.job("a", 600)
            await rig.job("b", 500)
            await rig.swap("a", into="b")
            await rig.driver.run(scripts.heartbeat(rig.group, rig.node, 3000, floor=AHEAD))
            await until(lambda: _counter_on_disk(rig, AHEAD), "the floor is on disk")
            await rig.driver.client.flushall()

            async def back() -> bool:
                states = {job: await rig.member_state(job) for job in "ab"}
                return states == {"a": "suspended", "b": "resident"}

            await until(back, "the members are back")
            view = await rig.view()
            assert view.counter >= AHEAD
            assert view.holder == ""
            assert isinstance(await rig.acquire("c"), scripts.Queued)
    finally:
        await rig.close()


async def test_processes_that_redis_lost_are_written_back_for_the_next_agent(rig: Rig) -> None:
    """The agent heard of a process, then the registrations are lost: it repeats them, so that whoever loses its own
    memory next still finds the job."""
    async with rig.agent(ttl_s=0.9):
        process = await rig.job("a", 600)
        await until(lambda: rig.member("a"), "the agent has looked")
        before = (await rig.view()).targets
        await rig.driver.client.delete(rig.group.targets)

        async def back() -> bool:
            return (await rig.view()).targets == before

        await until(back, f"process {process.pid} is registered again")


async def test_what_the_agent_passes_on_proves_a_loss_from_the_first_beat(
    server_factory: ServerFactory, prefix: str, tmp_path: Path
) -> None:
    """The number that the group was at when the agent joined is on disk before anything else happens, and the
    heartbeat carries it: a server that forgot all of it is told at once, and grants nobody."""
    rig = Rig(server_factory().url, prefix, tmp_path)
    try:
        await rig.driver.run(scripts.heartbeat(rig.group, "n2", 60_000, floor=AHEAD))
        async with rig.agent(ttl_s=600.0):
            assert _counter_on_disk(rig, AHEAD)
            await rig.driver.client.flushall()
        async with rig.agent(ttl_s=600.0):
            assert (await rig.view()).counter >= AHEAD
            assert [event["floor"] for event in await rig.events("StateLost")] == [str(AHEAD)]
    finally:
        await rig.close()


async def test_a_grant_reaches_the_fence_on_disk(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    """An order older than a grant that the agent has seen is refused without asking Redis, also after a restart."""
    async with rig.agent(ttl_s=0.9):
        granted = await rig.acquire("a")
        await until(lambda: f'"fence":{granted.token}' in _journal(rig), "the grant is on disk")
    async with rig.agent(ttl_s=600.0):
        await rig.send(rig.command(granted.token - 1, "prepare", "a", into="b", epoch=1))
        await rig.idle()
        assert f"swap or grant {granted.token} was seen already; nothing was touched" in caplog.text
        assert rig.fake.calls() == []


async def test_jobs_are_looked_at_before_the_node_joins(rig: Rig) -> None:
    """At the start an agent probes what it remembers, and only then says that it lives: until then nobody is granted
    on the word of a node that has not looked."""
    async with rig.agent():
        await rig.job("a", 600)
        await until(lambda: rig.member("a"), "the agent has looked")
    await rig.driver.client.zadd(rig.group.nodes, {rig.node: 1})
    await rig.driver.run(scripts.forget(rig.group, rig.node, "operator", "", lose=["a"]))
    joined: list[bool] = []

    def spying(name: str, context: Context) -> Backend:
        backend = make(name, context)
        probe = backend.probe

        async def look(job: Job) -> Probe:
            joined.append(rig.node in (await rig.view()).nodes)
            return await probe(job)

        backend.probe = look  # type: ignore[method-assign]
        return backend

    async with rig.agent(make_backend=spying, ttl_s=600.0):
        assert joined[0] is False


async def test_a_heartbeat_carries_the_highest_number(rig: Rig) -> None:
    """An agent with nothing to tell still proves a loss: the number that the server forgot comes with each beat."""
    async with rig.agent(ttl_s=0.9):
        await rig.driver.run(scripts.heartbeat(rig.group, rig.node, 3000, floor=AHEAD))
        await until(lambda: _counter_on_disk(rig, AHEAD), "the floor is on disk")
        await rig.driver.client.hset(rig.group.state, "counter", "5")

        async def told() -> bool:
            return (await rig.view()).counter >= AHEAD

        await until(told, "the server knows the number again")


async def test_numbers_from_the_far_future_do_not_reach_the_disk(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    """Something wrote one into Redis. A node that took it over would bring it back for ever."""
    async with rig.agent(ttl_s=0.9):
        await rig.driver.client.hset(rig.group.state, "counter", str(2**53))
        await until(lambda: "more than a year ahead of the server's clock" in caplog.text, "the agent has seen it")
        assert str(2**53) not in _journal(rig)
        await rig.driver.client.hset(rig.group.state, "counter", "5")
        granted = await rig.acquire("a")
        await until(lambda: f'"fence":{granted.token}' in _journal(rig), "the agent serves on")


def _journal(rig: Rig) -> str:
    return (rig.folder / "state" / "groups" / rig.name / "journal.json").read_text()


def _counter_on_disk(rig: Rig, floor: int) -> bool:
    return f'"floor":{floor}' in _journal(rig)


async def test_a_restarted_agent_knows_what_redis_lost(
    server_factory: ServerFactory, prefix: str, tmp_path: Path
) -> None:
    """What is on disk is enough to find the jobs again, to report their true states, and to keep tokens rising."""
    rig = Rig(server_factory().url, prefix, tmp_path)
    try:
        async with rig.agent(ttl_s=0.9):
            await rig.job("a", 600)
            await rig.swap("a", into="b")
            await rig.driver.run(scripts.heartbeat(rig.group, rig.node, 3000, floor=AHEAD))
            await until(lambda: _counter_on_disk(rig, AHEAD), "the floor is on disk")
        await rig.driver.client.flushall()
        async with rig.agent():
            assert await rig.member_state("a") == "suspended"
            assert (await rig.view()).counter >= AHEAD
    finally:
        await rig.close()


async def test_a_second_agent_on_the_same_folder_is_refused(rig: Rig) -> None:
    """One instance per state folder, and the message names the process that has it."""
    process = rig.spawn_agent()
    with pytest.raises(RefusedError, match=f"process {process.pid}"):
        async with rig.agent():
            pass


async def test_a_second_agent_for_the_same_node_is_refused(rig: Rig) -> None:
    """Two agents with one node id: the second one, elsewhere, says who runs."""
    process = rig.spawn_agent(ttl_s=4.5)
    with pytest.raises(RefusedError, match=rf"node {rig.node} is served by another agent: process {process.pid} "):
        async with rig.agent(state_dir=str(rig.folder / "elsewhere"), ttl_s=4.5):
            pass


async def test_an_agent_whose_node_was_taken_over_stops(rig: Rig) -> None:
    """It was out of reach for longer than its lease, and another instance serves the node now: it gives way."""

    async def outlive_it() -> None:
        async with rig.agent(ttl_s=0.9) as running:
            await rig.driver.client.hset(rig.keys.node_state(rig.node), "instance", "another")
            await until(running.done, "the agent ends")

    with pytest.raises(RefusedError, match="served by another agent"):
        await outlive_it()


async def test_the_node_of_a_dead_agent_is_taken_over(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    """An agent whose folder is lost starts elsewhere once the dead one's lease is over. What it waits for is said."""
    process = rig.spawn_agent(ttl_s=4.5)
    process.kill()
    process.wait()
    async with rig.agent(state_dir=str(rig.folder / "elsewhere"), ttl_s=4.5):
        assert set((await rig.view()).nodes) == {rig.node}
    (said,) = [line for line in caplog.messages if "waiting until" in line]
    assert f"node {rig.node}: process {process.pid} on host " in said


async def test_an_agent_that_stopped_lets_its_node_go_at_once(rig: Rig) -> None:
    """No lease has to run out after a clean stop."""
    async with rig.agent(ttl_s=600.0):
        pass
    async with rig.agent(ttl_s=600.0, state_dir=str(rig.folder / "elsewhere")):
        pass


async def test_an_agent_survives_an_outage_of_redis(server_factory: ServerFactory, prefix: str, tmp_path: Path) -> None:
    """The server is killed and comes back empty: the agent joins again and carries out orders."""
    server = server_factory(folder=tmp_path / "server")
    rig = Rig(server.url, prefix, tmp_path)
    try:
        async with rig.agent(ttl_s=1.5):
            await rig.job("a", 600)
            await until(lambda: rig.member("a"), "the agent has looked")
            server.kill()
            server.start()

            async def back() -> bool:
                return await rig.member_state("a") == "resident"

            await until(back, "the node is back")
            await rig.driver.client.hset(rig.group.state, "quiet_until_ms", "0")
            swap = await rig.begin_swap("a", into="b")
            assert (await rig.order(rig.command(swap, "prepare", "a", into="b")))["step"] == "prepared"
    finally:
        await rig.close()


async def test_a_server_that_evicts_keys_is_refused(server_factory: ServerFactory, prefix: str, tmp_path: Path) -> None:
    """Any policy but noeviction could evict a lease: the agent does not start and says how to change it."""
    rig = Rig(server_factory(args=("--maxmemory-policy", "allkeys-lru")).url, prefix, tmp_path)
    try:
        with pytest.raises(ServerUnsuitableError, match=r"maxmemory-policy allkeys-lru.*CONFIG SET"):
            async with rig.agent():
                pass
    finally:
        await rig.close()


async def test_a_lock_only_group_can_not_be_served(rig: Rig) -> None:
    """The agent does not start, and says what to do."""
    await rig.driver.run(scripts.configure(rig.group, {}, mode="lock"))
    with pytest.raises(GroupModeError, match="lock-only"):
        async with rig.agent():
            pass


async def test_options_that_contradict_each_other_are_refused(rig: Rig) -> None:
    """A device or backend for a group that is not served, or no group at all, is a usage error."""
    with pytest.raises(UsageError, match="not served"):
        async with rig.agent(emulate={"other": 4096}):
            pass
    with pytest.raises(UsageError, match="at least one group"):
        async with rig.agent(groups=()):
            pass
