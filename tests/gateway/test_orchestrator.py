"""llm-d's orchestrator service as its clients see it: over a real channel, with stubs made from the .proto file."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from tests.agent.rig import until
from tests.client.world import World
from tests.gateway.conftest import Caller, Code, Gateway, queued, refused
from timeslice.client.aio import AsyncClient
from timeslice.client.renewal import renewer_for
from timeslice.gateway.proto import timeslice_orchestrator_pb2 as pb
from timeslice.locks import scripts
from timeslice.locks.scripts import Observed

State = pb.GroupStatus.State
pytestmark = pytest.mark.usefixtures("clean_environment")


@pytest.mark.usefixtures("lock")
async def test_a_job_takes_a_group_and_gives_it_up(caller: Caller, world: World) -> None:
    """Acquire answers when it is held, Yield when it is not; the status tells both, as do our own commands."""
    took = await caller.acquire("a")
    assert (took.success, took.waited_ms, took.context_restored) == (True, 0, False)
    group = (await caller.status()).group
    assert (group.group_id, group.group_state, group.locking_job, group.active_job) == (
        "g",
        State.STATE_LOCKED,
        "a",
        "a",
    )
    assert group.state_timestamp.seconds > 0
    assert world.view().state["host"] == "gateway@n1"

    gave = await caller.yield_("a")
    assert (gave.success, gave.pending_waiters, gave.snapshot_deferred) == (True, 0, True)
    assert (await caller.status()).group.group_state == State.STATE_IDLE
    assert world.holder() == ""


@pytest.mark.usefixtures("lock")
async def test_acquire_blocks_and_is_granted_in_order(caller: Caller, world: World) -> None:
    """Who asked first is first; Yield says how many wait, and that then nothing stays on the device for the job."""
    await caller.acquire("a")
    waiting = [caller.acquire("b")]
    await queued(world, "b")
    waiting.append(caller.acquire("c"))
    await queued(world, "b", "c")
    assert (await caller.status()).group.waiter_queue_depth == 2

    gave = await caller.yield_("a")
    assert (gave.pending_waiters, gave.snapshot_deferred) == (2, False)
    assert (await waiting[0]).waited_ms > 0
    assert not waiting[1].done()
    await caller.yield_("b")
    assert (await waiting[1]).success
    assert world.holder() == "c"


@pytest.mark.usefixtures("lock")
async def test_callers_of_grpc_and_python_are_never_both_inside(gateway: Gateway, world: World, prefix: str) -> None:
    """Two channels and a direct client take turns on one group."""
    inside: list[str] = []

    async def through(job: str) -> None:
        caller = gateway.caller()
        for _ in range(8):
            await caller.acquire(job)
            await body(job)
            await caller.yield_(job)

    async def direct() -> None:
        async with AsyncClient(world.url, "c", prefix) as client:
            for _ in range(8):
                async with client.hold("g"):
                    await body("c")

    async def body(job: str) -> None:
        assert inside == []
        inside.append(job)
        await asyncio.sleep(0.005)
        inside.remove(job)

    await asyncio.gather(through("a"), through("b"), direct())
    assert world.event_types().count("LeaseGranted") == 24


async def test_what_does_not_exist_is_not_found(caller: Caller, world: World) -> None:
    """An unknown group is told at once, with a way to find the right one, and asking does not make it."""
    for call in (caller.acquire("a", "nothing"), caller.yield_("a", "nothing"), caller.status("nothing")):
        code, words = await refused(call)
        assert code == Code.NOT_FOUND
        assert "no group nothing" in words
    assert (await caller.stub.ListGroups(pb.ListGroupsRequest())).group_ids == []
    assert not world.view("nothing").exists


async def test_the_groups_are_listed(caller: Caller, declare: Callable[[str], None]) -> None:
    """By name."""
    for name in ("trainers", "samplers"):
        declare(name)
    assert (await caller.stub.ListGroups(pb.ListGroupsRequest())).group_ids == ["samplers", "trainers"]


@pytest.mark.usefixtures("lock")
@pytest.mark.parametrize(("job", "group"), [("", "g"), ("a", ""), ("a/b", "g"), ("a", "{g}"), ("a" * 64, "g")])
async def test_a_bad_name_is_an_invalid_argument(caller: Caller, world: World, job: str, group: str) -> None:
    """Nothing is asked for in its name."""
    for call in (caller.acquire(job, group), caller.yield_(job, group)):
        assert (await refused(call))[0] == Code.INVALID_ARGUMENT
    assert "LeaseGranted" not in world.event_types()


@pytest.mark.usefixtures("lock")
async def test_only_what_the_job_holds_through_a_gateway_can_be_yielded(
    caller: Caller, world: World, prefix: str
) -> None:
    """Not another job's group, nor one that the job's own process holds: PERMISSION_DENIED says who holds it."""
    code, words = await refused(caller.yield_("a"))
    assert (code, "nobody does" in words) == (Code.PERMISSION_DENIED, True)
    await caller.acquire("a")
    code, words = await refused(caller.yield_("b"))
    assert (code, "job a does" in words) == (Code.PERMISSION_DENIED, True)
    await caller.yield_("a")
    async with AsyncClient(world.url, "c", prefix) as client, client.hold("g"):
        code, words = await refused(caller.yield_("c"))
        assert (code, "not through a gateway" in words) == (Code.PERMISSION_DENIED, True)
        assert world.holder() == "c"


@pytest.mark.usefixtures("lock")
async def test_whoever_stops_asking_leaves_the_queue(gateway: Gateway, world: World) -> None:
    """By deadline, by cancellation, or because its connection broke: at once, and who is behind moves up."""
    caller, leaver = gateway.caller(), gateway.caller()
    await caller.acquire("a")
    code, _ = await refused(caller.acquire("b", timeout=0.3))
    assert code == Code.DEADLINE_EXCEEDED
    await queued(world)

    cancelled, cut, last = caller.acquire("c"), leaver.acquire("d"), caller.acquire("e")
    await until(lambda: len(world.queue()) == 3, "three wait")
    cancelled.cancel()
    await leaver.channel.close()
    await queued(world, "e")
    await caller.yield_("a")
    assert (await last).success
    assert cut.done()


@pytest.mark.usefixtures("lock")
async def test_asking_for_what_is_held_is_answered_at_once(gateway: Gateway, caller: Caller, world: World) -> None:
    """A lost reply makes a caller ask again: it has the group already, and there is one lease."""
    await caller.acquire("a")
    again = await gateway.caller().acquire("a")
    assert (again.success, again.waited_ms, again.context_restored) == (True, 0, False)
    assert world.event_types().count("LeaseGranted") == 1
    await caller.yield_("a")
    assert world.holder() == ""


@pytest.mark.usefixtures("lock")
async def test_two_calls_of_one_job_are_one_request(caller: Caller, world: World) -> None:
    """Both are answered by one lease; one of them may leave without the other losing its place."""
    await caller.acquire("a")
    calls = [caller.acquire("b"), caller.acquire("b"), caller.acquire("b")]
    await queued(world, "b")
    calls[0].cancel()
    await caller.yield_("a")
    assert [(await call).success for call in calls[1:]] == [True, True]
    assert world.event_types().count("LeaseGranted") == 2
    await caller.yield_("b")
    assert (world.holder(), world.queue()) == ("", [])


@pytest.mark.usefixtures("lock")
async def test_a_repeated_yield_is_answered_like_the_first(caller: Caller, world: World) -> None:
    """A lost reply makes a caller yield again: it succeeds, and takes nothing from who is inside now."""
    await caller.acquire("a")
    waiting = caller.acquire("b")
    await queued(world, "b")
    await caller.yield_("a")
    await waiting
    assert (await caller.yield_("a")).success
    assert world.holder() == "b"


async def test_a_circle_of_jobs_is_broken(caller: Caller, world: World, declare: Callable[[str], None]) -> None:
    """Two jobs that each hold what the other wants: one of them is told, though all share a gateway."""
    for name in ("g", "h"):
        declare(name)
    await caller.acquire("a", "g")
    await caller.acquire("b", "h")
    calls = [caller.acquire("a", "h"), caller.acquire("b", "g")]
    done, _ = await asyncio.wait(
        [asyncio.ensure_future(refused(call)) for call in calls], timeout=30, return_when=asyncio.FIRST_COMPLETED
    )
    (told,) = done
    assert told.result()[0] == Code.ABORTED
    for call in calls:
        call.cancel()


async def test_a_swap_comes_before_the_answer(caller: Caller, world: World) -> None:
    """Acquire of a served group answers when the state is in, and says whether it was restored. The agents are told
    of no process of the gateway's, though one serves its very node."""
    world.serve("g", node="n1")
    assert not (await caller.acquire("a")).context_restored
    waiting = caller.acquire("b")
    await queued(world, "b")
    assert not (await caller.yield_("a")).snapshot_deferred
    await until(lambda: world.view().swap, "a swap is due")
    assert (await caller.status()).group.group_state == State.STATE_SWITCHING
    assert not waiting.done()
    world.swap("a", "restored")
    assert (await waiting).context_restored
    states = {each.job_id: each.job_state for each in (await caller.status()).agent_job_states}
    assert states["a"] == pb.SnapshotAgentJobState.State.STATE_SAVED
    assert world.view().targets == {}
    assert not [key for key in renewer_for(world.url)._registrations if key[0] == world.keys.prefix]


async def test_an_unknown_device_state_is_unavailable(caller: Caller, world: World) -> None:
    """Nobody is granted before a person has looked, so nobody is made to wait: neither who asks nor who waits."""
    world.serve("g")
    await caller.acquire("a")
    waiting = caller.acquire("b")
    await queued(world, "b")
    world.run(scripts.report(world.group(), "n1", world.view().counter, [Observed("z", "faulted", 0)]))
    await caller.yield_("a")
    for call in (waiting, caller.acquire("c")):
        code, words = await refused(call)
        assert code == Code.UNAVAILABLE
        assert "the device state of job z is unknown" in words
        assert "timeslice repair g" in words
    assert world.queue() == []
