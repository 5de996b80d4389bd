"""The coordinator process: its share of the groups, outages of Redis, servers it refuses, its end."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.conftest import ServerFactory
from tests.coordinator.scripted import DEADLINE_S, World, eventually
from timeslice.coordinator import swap
from timeslice.coordinator.group import GroupActor
from timeslice.coordinator.service import CoordinatorOptions, run_coordinator, unique_name
from timeslice.errors import InvalidNameError, ServerUnsuitableError
from timeslice.locks import scripts
from timeslice.locks.view import GroupView
from timeslice.names import check_name

LEASE_MS = 900


@pytest.fixture
async def worlds(redis_url: str, prefix: str) -> AsyncIterator[list[World]]:
    """Five groups under one prefix."""
    made = [await World(redis_url, prefix, f"g{i}").open() for i in range(5)]
    yield made
    for world in made:
        await world.close()


async def owners(worlds: list[World]) -> list[str]:
    states = [(await world.view()).state for world in worlds]
    return sorted(state.get("owner", "") for state in states)


async def until_owned(worlds: list[World], expected: list[str]) -> None:
    async def check() -> bool:
        return await owners(worlds) == expected

    await eventually(check, f"owned by {expected}")


async def test_groups_are_shared_among_the_coordinators(worlds: list[World]) -> None:
    """One owns all; with a second each owns at most its share; when one leaves the other takes its groups over."""
    first = await worlds[0].coordinate("one", LEASE_MS)
    await until_owned(worlds, ["one"] * 5)
    await worlds[1].coordinate("two", LEASE_MS)
    await until_owned(worlds, ["one"] * 3 + ["two"] * 2)
    first.set()
    await until_owned(worlds, ["two"] * 5)


async def test_lock_only_groups_have_no_owner(world: World) -> None:
    """Their scripts need none; a group that an agent comes to serve gets one without a restart."""
    await world.driver.client.sadd(world.keys.groups, "plain", world.group.name, "not a name!")
    plain = world.keys.group("plain")
    await world.run(scripts.configure(plain, {}, mode="lock"))
    await world.coordinate("one", LEASE_MS)
    await world.open("n1")
    await world.until(lambda view: view.state.get("owner") == "one", "owned")
    assert "owner" not in (await world.driver.view(plain)).state


async def test_a_deleted_group_stays_deleted(world: World) -> None:
    """Its owner lets it go without writing a word that would bring it back."""
    await world.open()
    await world.coordinate("one", LEASE_MS)
    await world.until(lambda view: view.state.get("owner") == "one", "owned")
    await world.run(scripts.delete(world.group))
    for _ in range(2):  # scans; another group that comes is how we know that they took place
        other = await World(world.url, world.keys.prefix, f"other{_}").open()
        await other.until(lambda view: view.state.get("owner") == "one", "a scan")
        await other.close()
    assert not (await world.view()).exists


async def test_a_clean_stop_leaves_the_groups_free(world: World) -> None:
    """Nobody has to wait for a lease to pass: the group has no owner, and the coordinator is off the list."""
    await world.open("n1")
    stop = await world.coordinate("one")
    await world.until(lambda view: view.state.get("owner") == "one", "owned")
    stop.set()
    await world.until(lambda view: view.state["owner"] == "", "free")

    async def signed_off() -> bool:
        return bool(await world.driver.client.zcard(world.keys.coordinators) == 0)

    await eventually(signed_off, "signed off")


async def test_a_fault_in_one_group_is_not_the_others(
    worlds: list[World], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One group's actor fails: it is logged by name and started again, while another group's swap goes on."""
    decide, broken = swap.decide, {"g1"}

    def faulty(view: GroupView, memory: swap.Memory) -> swap.Action:
        if view.name in broken:
            raise ZeroDivisionError("on purpose")
        return decide(view, memory)

    monkeypatch.setattr(swap, "decide", faulty)
    healthy, sick = worlds[0], worlds[1]
    for world in (healthy, sick):
        await world.open("n1")
        await world.load("a")
    await healthy.coordinate("one", LEASE_MS)
    waiting = sick.ask("b")
    await healthy.ask("b")
    assert [record for record in caplog.records if "group g1: its actor failed" in record.getMessage()]
    broken.clear()
    await waiting


@pytest.mark.timing
async def test_a_lone_coordinator_rides_out_a_hung_server(
    server_factory: ServerFactory, prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    """C06: the server is stopped for longer than ownership lasts; then the same coordinator goes on, with the same
    holder and queue as before, and swaps."""
    server = server_factory()
    world = await World(server.url, prefix).open("n1")
    holder = await world.load("a", yields=False)
    await world.coordinate("one", LEASE_MS)
    waiting = world.ask("b")
    before = await world.until(lambda view: view.state.get("owner") == "one" and view.queue, "owned")
    os.kill(server.pid, signal.SIGSTOP)
    await asyncio.sleep(3 * LEASE_MS / 1000)
    os.kill(server.pid, signal.SIGCONT)
    after = await world.view()
    assert (after.state["lease_id"], [entry.waiter for entry in after.queue]) == (before.state["lease_id"], ["b"])
    await world.give_up("a", holder)
    await waiting
    assert (await world.view()).state["owner"] == "one"
    await world.close()


async def test_a_lone_coordinator_rides_out_a_restart_in_mid_swap(
    server_factory: ServerFactory, prefix: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """C06: the server is killed and started again (with AOF) while a swap is under way; the swap is finished."""
    caplog.set_level(logging.INFO)
    server = server_factory(data=tmp_path, args=("--appendfsync", "always"))
    world = await World(server.url, prefix).open("n1", "n2")
    await world.load("a")
    gate = world.agents["n1"].gates["commit"] = asyncio.Event()
    await world.coordinate("one", LEASE_MS)
    waiting = world.ask("b")
    await world.until(lambda view: view.nodes["n1"].step == "begun commit", "it moves")
    await world.until(lambda view: view.nodes["n2"].step == "done", "the other has moved")
    server.kill()

    async def noticed() -> bool:
        return any("does not answer" in record.getMessage() for record in caplog.records)

    await eventually(noticed, "the outage is noticed")
    server.start()
    gate.set()
    assert (await waiting).how == "first load"
    assert len(await world.events("SwapStarted")) == 1
    await world.close()


@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-ttl"])
async def test_a_server_that_evicts_is_refused(server_factory: ServerFactory, policy: str) -> None:
    """Under such a policy holders get lost; the message says what to run."""
    server = server_factory(args=("--maxmemory-policy", policy))
    with pytest.raises(ServerUnsuitableError, match=f"{policy}.*CONFIG SET maxmemory-policy noeviction"):
        await run_coordinator(CoordinatorOptions(url=server.url), stop=asyncio.Event())


@pytest.mark.parametrize(
    ("rule", "warning"), [("-info", "does not tell its eviction policy"), ("-config", "")], ids=["INFO", "CONFIG"]
)
async def test_a_server_that_does_not_tell_is_only_warned_of(
    server_factory: ServerFactory, prefix: str, rule: str, warning: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Hosted servers forbid CONFIG, which is not needed; where INFO is forbidden too, the doubt is logged."""
    server = server_factory()
    admin = World(server.url, prefix)
    await admin.driver.client.execute_command("ACL", "SETUSER", "default", rule)  # type: ignore[no-untyped-call]
    stop = await admin.coordinate("one")
    stop.set()
    warned = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert any(warning in message for message in warned) if warning else not warned
    await admin.close()


async def test_a_server_that_is_too_old_is_refused(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripts need what 7.0 has; the message names the version that was found."""
    from redis.asyncio import Redis

    async def info(self: Redis) -> dict[str, str]:
        return {"redis_version": "6.2.14", "maxmemory_policy": "noeviction"}

    monkeypatch.setattr(Redis, "info", info)
    with pytest.raises(ServerUnsuitableError, match=r"6\.2\.14; timeslice needs 7\.0"):
        await run_coordinator(CoordinatorOptions(url=redis_url), stop=asyncio.Event())


async def test_an_address_where_nothing_answers_is_said_at_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A wrong address is seen at once, though the coordinator waits there until it is told to stop."""
    stop = asyncio.Event()
    waiting = asyncio.create_task(run_coordinator(CoordinatorOptions(url=f"unix://{tmp_path}/none"), stop=stop))
    while "does not answer" not in caplog.text:
        assert not waiting.done()
        await asyncio.sleep(0.01)
    stop.set()
    await waiting


async def test_an_actor_can_be_cancelled_at_any_moment(world: World) -> None:
    """A cancellation is never lost, whatever the actor just waits for: a released group is not driven on."""
    await world.open("n1")
    for turns in range(60):
        actor = GroupActor(world.driver, world.keys, world.group.name, "c1", LEASE_MS)
        task = asyncio.create_task(actor.run())
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task], timeout=DEADLINE_S)
        assert task.cancelled(), f"cancelled after {turns} turns of the event loop, and it lives on"


async def test_names_are_checked_and_unique(redis_url: str) -> None:
    """A name that breaks the rule is refused; by default no two coordinators get the same."""
    with pytest.raises(InvalidNameError):
        await run_coordinator(CoordinatorOptions(url=redis_url, name="a b"), stop=asyncio.Event())
    assert unique_name() != unique_name()
    assert check_name("coordinator", unique_name())
