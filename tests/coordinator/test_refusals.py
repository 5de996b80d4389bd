"""What goes wrong in a swap: refused, failed, late, hanging; who is told, and who may pass."""

from __future__ import annotations

import asyncio

from tests.coordinator.scripted import ScriptedAgent, World
from timeslice.locks import scripts
from timeslice.locks.view import GroupView

NO_ROOM = "host memory: 4 GiB needed, 1 GiB left"
SHORT = {"prepare_timeout_ms": 800, "suspend_timeout_ms": 800, "restore_timeout_ms": 800}


async def test_a_refused_prepare_puts_off_the_waiter_not_the_group(world: World) -> None:
    """One node refuses: the others unlock, nothing moved, the waiter keeps its place and shows the reason, a job that
    needs no refused step passes; after its yield the waiter is tried again and gets in."""
    await world.open("n1", "n2")
    await world.load("a")
    world.agents["n2"].faults["prepare"] = NO_ROOM
    await world.coordinate()
    waiting = world.ask("b")
    view = await world.until(lambda view: view.queue and view.queue[0].deferred, "put off")
    assert view.queue[0].deferred == f"node n2: {NO_ROOM}"
    assert view.phase == "idle"
    assert [order.step for order in world.agents["n1"].orders] == ["prepare", "rollback"]
    assert [agent.states["a"] for agent in world.agents.values()] == ["resident"] * 2

    passing = await world.ask("a", "a passes")
    assert passing.how == "no-op"
    assert not waiting.done()
    await world.give_up("a passes", passing)
    assert (await waiting).how == "first load"


async def test_a_refused_waiter_is_tried_again_by_itself(world: World) -> None:
    """F03: nothing else happens in the group; the waiter gets in when its time is over, which doubles each time."""
    await world.open("n1")
    await world.load("a")
    await world.coordinate()
    waiting, pauses = None, []
    for reason in ("no room", "still no room"):
        world.agents["n1"].faults["prepare"] = reason
        waiting = waiting or world.ask("b")

        def refused(view: GroupView, reason: str = reason) -> bool:
            return bool(view.queue and view.queue[0].deferred == f"node n1: {reason}")

        await world.until(refused, reason)
        fields = ["b/deferred_at_ms", "b/deferred_until_ms"]
        since, until = await world.driver.client.hmget(world.group.waiters, fields)
        pauses.append(int(until or 0) - int(since or 0))
    assert pauses == [1000, 2000]
    assert waiting
    await waiting


async def test_a_failed_commit_is_undone_on_every_node(world: World) -> None:
    """F03: one node fails to move; its peer, which had moved everything, moves it back; nobody is granted meanwhile
    and the job that was in is whole again on both."""
    await world.open("n1", "n2")
    await world.load("a")
    world.agents["n2"].faults["commit"] = "the checkpoint tool failed"
    await world.coordinate()
    waiting = world.ask("b")
    view = await world.until(lambda view: view.queue and view.queue[0].deferred, "put off")
    assert view.queue[0].deferred == "node n2: the checkpoint tool failed"
    assert [order.step for order in world.agents["n1"].orders] == ["prepare", "commit", "rollback"]
    assert [agent.states["a"] for agent in world.agents.values()] == ["resident"] * 2
    assert len(await world.events("LeaseGranted")) == 1
    assert (await waiting).how == "first load"


async def test_a_node_that_does_not_take_its_order_is_named(world: World) -> None:
    """An agent that looks at no orders: the others are unlocked when its time is over, and the reason names it."""
    await world.open("n1", "n2", **SHORT)
    await world.load("a")
    world.agents["n2"].deaf = {"prepare"}
    await world.coordinate()
    waiting = world.ask("b")
    view = await world.until(lambda view: view.queue and view.queue[0].deferred, "put off")
    assert view.queue[0].deferred.startswith("node n2 did not take its order within 0.8 s")
    assert world.agents["n2"].orders == []
    assert view.nodes["n1"].step == "rolled back"
    waiting.cancel()


async def test_a_node_that_is_gone_before_the_commit_is_named(world: World) -> None:
    """It prepared, then its agent is stopped: what the others moved is moved back, and it too must undo first."""
    await world.open("n1", "n2", **SHORT)
    await world.load("a")
    world.agents["n2"].deaf = {"commit"}
    await world.coordinate()
    waiting = world.ask("b")
    view = await world.until(lambda view: view.queue and view.queue[0].deferred, "put off")
    assert view.queue[0].deferred.startswith("node n2 did not take its order")
    assert [order.step for order in world.agents["n2"].orders] == ["prepare", "rollback"]
    assert [agent.states["a"] for agent in world.agents.values()] == ["resident"] * 2
    waiting.cancel()


async def test_an_unreachable_node_blocks_the_group_with_its_name(world: World) -> None:
    """No swap is begun while a node's heartbeat is overdue; when it beats again the waiter gets in by itself."""
    await world.open("n1", "n2")
    await world.load("a")
    await world.driver.client.zadd(world.group.nodes, {"n2": 1})
    await world.coordinate()
    waiting = world.ask("b")
    view = await world.until(lambda view: view.phase == "blocked", "blocked")
    assert view.reason.startswith("node n2 unreachable since ")
    await world.run(scripts.heartbeat(world.group, "n2", 15_000))
    await waiting


async def test_a_node_that_is_late_with_its_move_blocks_until_it_reports(world: World) -> None:
    """A commit beyond its deadline is neither undone nor granted on a guess: the group says which node moves what
    since when, and goes on by itself when the report arrives."""
    await world.open("n1", "n2", **SHORT)
    await world.load("a")
    gate = world.agents["n2"].gates["commit"] = asyncio.Event()
    await world.coordinate()
    waiting = world.ask("b")
    view = await world.until(lambda view: view.phase == "blocked", "blocked")
    assert view.reason.startswith("node n2 has not finished moving job a since ")
    assert "goes on by itself" in view.reason
    assert not waiting.done()
    gate.set()
    assert (await waiting).how == "first load"
    assert len(await world.events("SwapStarted")) == 1


async def test_a_node_that_falls_silent_in_a_commit_is_named(world: World) -> None:
    """F01: its agent dies in mid-commit: the group says which node, long before the deadline, and the same swap is
    finished when the agent is back."""
    await world.open("n1")
    await world.load("a")
    agent = world.agents["n1"]
    gate = agent.gates["commit"] = asyncio.Event()
    await world.coordinate(lease_ms=900)
    waiting = world.ask("b")
    await world.until(lambda view: view.nodes["n1"].step == "begun commit", "it moves")
    await world.run(scripts.heartbeat(world.group, "n1", 1))
    view = await world.until(lambda view: view.phase == "blocked", "blocked")
    assert view.reason.startswith("node n1 unreachable since 2")
    assert view.reason.endswith(" UTC; goes on by itself when its agent returns")
    await world.run(scripts.heartbeat(world.group, "n1", 60_000))
    view = await world.until(lambda view: view.phase == "swapping", "going on")
    assert view.reason == ""
    gate.set()
    assert (await waiting).how == "first load"
    assert len(await world.events("SwapStarted")) == 1


async def test_a_rollback_beyond_its_deadline_is_ordered_again(world: World) -> None:
    """One node fails, the other one's agent sleeps through the rollback's whole deadline: its order has become too
    late to be taken, so it gets a new one, and the swap ends."""
    await world.open("n1", "n2", **SHORT)
    await world.load("a")
    agent = world.agents["n1"]
    agent.deaf = {"rollback"}
    world.agents["n2"].faults["prepare"] = NO_ROOM
    await world.coordinate()
    waiting = world.ask("b")
    view = await world.until(lambda view: view.phase == "blocked", "blocked")
    assert view.reason.startswith("node n1 has not finished moving job a since ")
    agent.deaf = set()
    view = await world.until(lambda view: view.queue and view.queue[0].deferred, "put off")
    assert view.queue[0].deferred == f"node n2: {NO_ROOM}"
    assert [order.step for order in agent.orders][-1] == "rollback"
    waiting.cancel()


async def test_nobody_is_granted_beside_a_job_that_is_still_there(world: World) -> None:
    """A job comes on the device in the middle of the swap: all nodes are done, but the waiter is refused, and gets
    in by the next swap, which moves the intruder too."""
    await world.open("n1")
    await world.load("a")
    agent = world.agents["n1"]
    gate = agent.gates["commit"] = asyncio.Event()
    await world.coordinate()
    waiting = world.ask("b")
    await world.until(lambda view: view.nodes["n1"].step == "begun commit", "it moves")
    await agent.report(c="resident")
    gate.set()
    view = await world.until(lambda view: view.queue and view.queue[0].deferred, "put off")
    assert view.queue[0].deferred == "job c is still on the device"
    await waiting
    assert agent.states == {"a": "suspended", "c": "suspended"}


async def test_a_node_that_joins_in_the_middle_makes_the_swap_start_again(world: World) -> None:
    """What is on the newcomer's devices is in no plan: the swap is undone, and the next one has both nodes."""
    await world.open("n1")
    await world.load("a")
    gate = world.agents["n1"].gates["commit"] = asyncio.Event()
    await world.coordinate()
    waiting = world.ask("b")
    await world.until(lambda view: view.nodes["n1"].step == "begun commit", "it moves")
    world.agents["n2"] = await ScriptedAgent(world, "n2").join()
    gate.set()
    view = await world.until(lambda view: view.queue and view.queue[0].deferred, "put off")
    assert view.queue[0].deferred == "node n2 joined while the swap was under way"
    await waiting
    assert [order.step for order in world.agents["n2"].orders] == ["prepare", "commit"]


async def test_an_unknown_device_state_blocks_the_group(world: World) -> None:
    """A node loses track of a job in a failed move: nobody is put in beside it, and the group says why."""
    await world.open("n1")
    await world.load("a")
    agent = world.agents["n1"]
    agent.faults["commit"] = "neither here nor there"
    agent.states["a"] = "faulted"
    await world.coordinate()
    waiting = world.ask("b")
    view = await world.until(lambda view: view.phase == "blocked", "blocked")
    assert view.reason == "the device state of job a is unknown"
    await agent.report(a="gone")
    assert (await waiting).how == "first load"


async def test_a_refused_eviction_is_not_hammered(world: World) -> None:
    """A reclaimed job can't be moved out, and only its own next process waits: it is put off like anybody else, and
    tried again after a pause."""
    await world.open("n1")
    await world.load("a", yields=False)
    agent = world.agents["n1"]
    agent.faults["prepare"] = NO_ROOM
    await world.coordinate()
    await world.driver.client.hset(world.group.state, "deadline_ms", 1)
    waiting = world.ask("a", "a restarted")
    view = await world.until(lambda view: view.queue and view.queue[0].deferred, "put off")
    assert view.queue[0].deferred == f"node n1: {NO_ROOM}"
    assert (await waiting).how == "restored"
    times = [int(event["at_ms"]) for event in await world.events("SwapPlanned")]
    assert times[1] - times[0] >= 1000
