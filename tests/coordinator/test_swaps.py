"""Swaps driven by a real coordinator over a real server, with scripted agents."""

from __future__ import annotations

import asyncio
import time

import pytest
from prometheus_client import REGISTRY

from tests.coordinator.scripted import World


async def test_state_goes_out_and_in_on_every_node(world: World) -> None:
    """A job is let in once the other's state is out everywhere; on its next turn its own state is brought back."""
    await world.open("n1", "n2", "n3")
    await world.coordinate()
    first = await world.load("a")
    assert first.how == "first load"

    second = await world.ask("b")
    assert second.how == "first load"
    assert [agent.states["a"] for agent in world.agents.values()] == ["suspended"] * 3
    for agent in world.agents.values():
        agent.states["b"] = "resident"
    await world.give_up("b", second)

    third = await world.ask("a", "a again")
    assert third.how == "restored"
    assert third.token > second.token > first.token
    assert [agent.states for agent in world.agents.values()] == [{"a": "resident", "b": "suspended"}] * 3


async def test_all_nodes_prepare_before_any_commits(world: World) -> None:
    """While one node is not ready, no other has been told to move anything."""
    await world.open("n1", "n2")
    await world.load("a")
    slow = world.agents["n2"].gates["prepare"] = asyncio.Event()
    await world.coordinate()
    waiting = world.ask("b")
    await world.until(lambda view: view.nodes["n1"].step == "prepared", "n1 is ready")
    await world.until(lambda view: view.nodes["n2"].step == "begun prepare", "n2 is at it")
    assert (await world.view()).state["swap_step"] == "prepare"
    assert [order.step for order in world.agents["n1"].orders] == ["prepare"]
    slow.set()
    await waiting
    assert [order.step for order in world.agents["n1"].orders] == ["prepare", "commit"]


async def test_acks_that_arrive_twice_change_nothing(world: World) -> None:
    """Every report sent twice: one swap, one grant."""
    await world.open("n1", "n2")
    await world.load("a")
    for agent in world.agents.values():
        agent.repeats = 2
    await world.coordinate()
    await world.ask("b")
    assert len(await world.events("SwapFinished")) == 1
    assert [event["job"] for event in await world.events("LeaseGranted")] == ["a", "b"]


async def test_an_agent_that_died_in_the_middle_goes_on_after_its_restart(world: World) -> None:
    """Killed between accepted and ack, for each step; the same order is accepted again after the restart."""
    await world.open("n1", "n2")
    await world.load("a")
    agent = world.agents["n1"]
    agent.die_on = {"prepare", "commit"}
    await world.coordinate()
    waiting = world.ask("b")
    for step in ("prepare", "commit"):
        await world.until(lambda view, step=step: agent.dead and view.nodes["n1"].step == f"begun {step}", step)  # type: ignore[misc]
        agent.start()
    await waiting
    assert [order.step for order in agent.orders] == ["prepare", "prepare", "commit", "commit"]


async def test_a_job_that_is_gone_counts_as_out(world: World) -> None:
    """F02: the job that has to go ended in the middle of its own suspend; the next one gets in, nothing is faulted."""
    await world.open("n1", "n2")
    await world.load("a")
    gates = [agent.gates.setdefault("commit", asyncio.Event()) for agent in world.agents.values()]
    await world.coordinate()
    waiting = world.ask("b")
    await world.until(lambda view: {node.step for node in view.nodes.values()} == {"begun commit"}, "both move")
    for agent, gate in zip(world.agents.values(), gates, strict=True):
        agent.states["a"] = "gone"
        gate.set()
    assert (await waiting).how == "first load"
    assert "a" not in (await world.view()).jobs


async def test_a_lease_that_ended_without_a_word_is_followed_by_an_eviction(world: World) -> None:
    """L04: the holder died; its state is out before its own job's next process is let in, on every node."""
    await world.open("n1", "n2")
    await world.coordinate()
    await world.load("a", yields=False)
    # As a crash does it: the lease is past, and nobody yielded.
    await world.driver.client.hset(world.group.state, "deadline_ms", 1)
    grant = await world.ask("a", "a restarted")
    assert grant.how == "restored"
    assert [order.out for order in world.agents["n2"].orders][:2] == [("a",), ("a",)]
    assert [event["job"] for event in await world.events("LeaseReclaimed")] == ["a"]


async def test_registered_jobs_that_hold_nothing_are_let_in(world: World) -> None:
    """F01: two jobs with processes and no device state: both are first loads, and nothing is blocked."""
    await world.open("n1")
    await world.coordinate()
    for job in ("a", "b"):
        grant = await world.ask(job)
        assert grant.how == "first load"
        await world.agents["n1"].report(**{job: "absent"})
        await world.give_up(job, grant)
    assert await world.events("GroupBlocked") == []


async def test_the_plan_is_stored_before_any_order_goes_out(world: World) -> None:
    """No command stream has an entry while the swap is unplanned; the stored plan is the one in the orders."""
    await world.open("n1")
    await world.load("a")
    world.agents["n1"].deaf = {"prepare"}
    waiting = world.ask("b")
    await world.until(lambda view: view.state.get("swap_step") == "new", "a swap without a coordinator")
    assert await world.driver.client.xlen(world.keys.commands("n1")) == 0
    await world.coordinate()
    view = await world.until(lambda view: view.state.get("swap_step") == "prepare", "planned")
    assert view.state["plan"] == '{"out":["a"],"into":null,"nodes":["n1"],"force":false}'
    waiting.cancel()


async def test_metrics_count_the_swap_and_its_seconds(world: World) -> None:
    """An operator who scrapes the coordinator sees each swap that went well, how long it took, and who waits."""

    def value(name: str, **labels: str) -> float:
        return REGISTRY.get_sample_value(name, {"group": world.group.name, **labels}) or 0.0

    done, timed = value("timeslice_swaps_total", outcome="done"), value("timeslice_swap_seconds_count")
    await world.open("n1")
    await world.load("a")
    gate = world.agents["n1"].gates["commit"] = asyncio.Event()
    await world.coordinate()
    waiting = world.ask("b")
    await world.until(lambda view: view.nodes["n1"].step == "begun commit", "n1 moves")
    assert value("timeslice_waiters") == 1
    gate.set()
    await waiting
    await world.until(lambda _: value("timeslice_swaps_total", outcome="done") == done + 1, "the swap is counted")
    assert value("timeslice_swap_seconds_count") == timed + 1


@pytest.mark.timing
async def test_the_time_lost_to_switching_can_be_read_from_the_metrics(world: World) -> None:
    """C21: two jobs with bodies of nearly nothing and slow switches; the metrics say how long the group only moved."""

    def lost() -> float:
        return REGISTRY.get_sample_value("timeslice_swap_seconds_sum", {"group": world.group.name}) or 0.0

    await world.open("n1")
    grant = await world.load("a")  # has yielded already
    await world.coordinate()
    before, began, jobs = lost(), time.monotonic(), ("b", "a", "b", "a")
    for turn, job in enumerate(jobs):
        gate = world.agents["n1"].gates["commit"] = asyncio.Event()
        asyncio.get_running_loop().call_later(0.2, gate.set)  # a switch takes so long
        asked = world.ask(job, f"{job}{turn}")
        if turn:
            await world.give_up(f"{jobs[turn - 1]}{turn - 1}", grant)
        grant = await asked
        world.agents["n1"].states[job] = "resident"
    await world.until(lambda _: lost() - before >= 0.2 * len(jobs) * 0.9, "the switches are accounted for")
    assert lost() - before <= time.monotonic() - began
