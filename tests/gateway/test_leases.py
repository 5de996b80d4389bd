"""How long a group is held for a caller that has no heartbeat: the rule of docs/gateway.md."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.agent.rig import Rig, until
from tests.client.world import World
from tests.gateway.conftest import Code, MakeGateway, queued, refused
from timeslice.backends.registry import get_backend
from timeslice.coordinator.service import CoordinatorOptions, run_coordinator
from timeslice.errors import RedisUnreachableError
from timeslice.gateway.holds import GatewayClient
from timeslice.gateway.leases import Leases
from timeslice.locks import scripts
from timeslice.locks.scripts import Granted, Request
from timeslice.models import Target

pytestmark = pytest.mark.usefixtures("clean_environment")

CALLER = """
import grpc
from timeslice.gateway.proto import timeslice_orchestrator_pb2 as pb
from timeslice.gateway.proto.timeslice_orchestrator_pb2_grpc import TimeSliceOrchestratorServiceStub

channel = grpc.insecure_channel(os.environ["TARGET"])
stub = TimeSliceOrchestratorServiceStub(channel)
if os.environ.get("REGISTER"):
    timeslice.register_workload("g", on_suspend=lambda mode, tags: 0, on_restore=lambda tags: 0)
say("asks")
stub.Acquire(pb.AcquireRequest(job_id="a", group_id="g"))
say("in")
hear()
"""


@pytest.fixture
def of_the_world(world: World, prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes started from now on are on node n1 of this world."""
    for name, value in (("URL", world.url), ("PREFIX", prefix), ("NODE", "n1")):
        monkeypatch.setenv(f"TIMESLICE_{name}", value)


@pytest.fixture
async def leases(world: World, prefix: str) -> AsyncIterator[Leases]:
    """What a gateway of node n1 holds, without its watch and its server."""
    made = Leases(GatewayClient(world.url, prefix, "n1"), 3600.0, 3)
    yield made
    await made.stop()


def grant(world: World, job: str, *, lease_ms: int = 30_000, host: str = "gateway@n1") -> Granted:
    """A lease that a gateway of the node took in a former life."""
    request = Request(f"w-{job}", job, host, 1, 1, lease_ms=lease_ms)
    granted = world.run(scripts.acquire(world.group(), request))
    assert isinstance(granted, Granted)
    return granted


def register(world: World, job: str, pid: int) -> None:
    target = Target(job=job, host="n1", pid=pid, start=1, uid=0, pid_namespace="")
    assert world.run(scripts.register(world.group(), job, "n1", pid, target.model_dump_json()))


@pytest.mark.usefixtures("lock")
async def test_a_silent_callers_lease_is_renewed(make_gateway: MakeGateway, world: World) -> None:
    """The group stays the job's for longer than the lease's term, though nobody calls."""
    grant(world, "a", lease_ms=4000)
    began = world.view().number("granted_at_ms")
    await make_gateway()
    await until(lambda: world.view().number("renewed_at_ms") > began + 4000, "it is renewed again and again")
    assert world.holder() == "a"


@pytest.mark.usefixtures("lock")
async def test_a_caller_that_vanished_is_waited_for_until_the_maximum(
    make_gateway: MakeGateway, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody knows a process of the job: the group is taken away after the maximum hold, and the next one gets in when
    the old term is over. The late yield is refused, and says why."""
    monkeypatch.setattr("timeslice.client.core.WAITER_TTL_MS", 1500)  # a waiter asks again after a third of it
    gateway = await make_gateway(max_hold_s=1.5)
    gone, caller = gateway.caller(), gateway.caller()
    grant(world, "a", lease_ms=3000)
    await gone.acquire("a")
    await gone.channel.close()
    assert (await caller.acquire("b")).success
    (told,) = [event for event in world.events() if event["type"] == "LeaseRevoked" and event["job"] == "a"]
    assert (told["by"], told["reason"]) == ("gateway@n1", "held for 1.5 s, the gateway's maximum")
    code, words = await refused(caller.yield_("a"))
    assert (code, "held for 1.5 s" in words) == (Code.PERMISSION_DENIED, True)


async def test_a_served_job_is_put_out_by_force_after_the_maximum(make_gateway: MakeGateway, world: World) -> None:
    """It may still compute: nobody is granted before agents have moved it off the device."""
    world.serve("g")
    caller = (await make_gateway(max_hold_s=0.5)).caller()
    await caller.acquire("a")
    waiting = caller.acquire("b")
    await until(lambda: "LeaseRevoked" in world.event_types(), "it is taken away")
    state = world.view().state
    assert (state["evict"], state["evict_how"], state["force"], world.holder()) == ("a", "must", "1", "")
    assert not waiting.done()


async def test_the_end_of_all_its_processes_ends_the_lease(
    leases: Leases, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all that an agent knew, and by the agent's word: what lost data took along has not ended. One that was
    started anew in time goes on."""
    monkeypatch.setattr("timeslice.gateway.holds.GONE_S", 3600.0)
    world.serve("g")
    await leases.take("g", "a")
    keys, counter = world.group(), world.view().counter

    async def holder() -> str:
        await leases.look_after_all()
        return world.holder()

    assert await holder() == "a"  # nobody has registered: nobody can vouch
    for pid in (11, 12):
        register(world, "a", pid)
    assert await holder() == "a"
    world.run(scripts.report(keys, "n1", counter, [], [scripts.Exited("a", 11, 1)]))
    assert await holder() == "a"
    world.redis.delete(keys.targets, keys.nodes)  # as a server that lost them
    assert await holder() == "a"
    world.run(scripts.heartbeat(keys, "n1", 600_000))  # its agent comes back, and has yet to tell
    assert await holder() == "a"
    register(world, "a", 12)
    world.run(scripts.report(keys, "n1", counter, [], whole=True))
    assert await holder() == "a"
    world.run(scripts.report(keys, "n1", counter, [], [scripts.Exited("a", 12, 1)]))
    assert await holder() == "a"
    register(world, "a", 13)
    assert await holder() == "a"
    (hold,) = leases._held.values()
    assert hold.gone_at is None
    world.run(scripts.heartbeat(keys, "n1", 1))
    await until(lambda: not world.view().nodes["n1"].alive, "the agent is silent")
    world.redis.delete(keys.targets)
    assert await holder() == "a"
    assert hold.gone_at is None
    world.run(scripts.heartbeat(keys, "n1", 600_000))
    register(world, "a", 13)
    world.run(scripts.report(keys, "n1", counter, [], [scripts.Exited("a", 13, 1)]))
    assert await holder() == "a"
    monkeypatch.setattr("timeslice.gateway.holds.GONE_S", 0.0)
    assert await holder() == ""
    (told,) = [event for event in world.events() if event["type"] == "LeaseRevoked"]
    assert told["reason"] == "all processes of the job have ended"
    assert not leases._client.renewer.of(leases._client)  # else lost data could bring it back


@pytest.mark.usefixtures("of_the_world")
async def test_a_killed_caller_makes_room(
    make_gateway: MakeGateway,
    world: World,
    prefix: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """With agent and coordinator: the caller's process, which had registered, is killed; the next job is in soon."""
    caplog.set_level("DEBUG", "timeslice.gateway")
    monkeypatch.setattr("timeslice.gateway.holds.GONE_S", 0.0)
    rig, stop = Rig(world.url, prefix, tmp_path), asyncio.Event()
    async with rig.agent(make_backend=get_backend, backends={}):
        coordinator = asyncio.create_task(run_coordinator(CoordinatorOptions(url=world.url, prefix=prefix), stop=stop))
        gateway = await make_gateway()
        monkeypatch.setenv("TARGET", gateway.target)
        monkeypatch.setenv("REGISTER", "1")
        process = world.job(CALLER)
        assert [await asyncio.to_thread(process.line) for _ in "ab"] == ["asks", "in"]
        await until(lambda: "agents see processes of job a" in caplog.text, "agents vouch for it")
        waiting = gateway.caller().acquire("b")
        await queued(world, "b")
        process.signal(signal.SIGKILL)
        assert (await waiting).success
        stop.set()
        await coordinator
    await rig.close()


@pytest.mark.usefixtures("lock", "of_the_world")
async def test_a_caller_that_does_not_answer_waits_no_longer(
    make_gateway: MakeGateway, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its machine hangs or is cut off, and no connection is closed: pings tell, and it leaves the queue."""
    gateway = await make_gateway(keepalive_s=1.0)
    monkeypatch.setenv("TARGET", gateway.target)
    await gateway.caller().acquire("b")
    process = world.job(CALLER)
    assert await asyncio.to_thread(process.line) == "asks"
    await queued(world, "a")
    process.signal(signal.SIGSTOP)
    await queued(world)


@pytest.mark.usefixtures("lock")
async def test_a_lease_whose_yield_is_under_way_is_not_had_again(
    leases: Leases, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The yield was not answered and is tried on; who asks meanwhile is granted anew, after it, never by the old
    lease."""
    old, _ = await leases.take("g", "a")

    async def unanswered(*_: object) -> None:
        """As a client whose server is silent."""

    with monkeypatch.context() as silent:
        silent.setattr(GatewayClient, "yield_", unanswered)
        with pytest.raises(RedisUnreachableError, match="Repeat it"):
            await leases.give_up("g", "a")
    taking = asyncio.create_task(leases.take("g", "a"))
    await queued(world, "a")
    assert (await leases.give_up("g", "a")).pending == 1
    new, fresh = await taking
    assert fresh
    assert new.fencing_token > old.fencing_token


@pytest.mark.usefixtures("lock")
async def test_gateways_share_their_leases(make_gateway: MakeGateway, world: World) -> None:
    """Behind one address there may be several: what was taken through one is held, and can be yielded, at another."""
    first, second = [(await make_gateway(node=node)).caller() for node in ("n1", "n2")]
    await first.acquire("a")
    assert (await second.yield_("a")).success
    assert world.holder() == ""
    await first.acquire("a")
    assert (await second.acquire("a")).waited_ms == 0
    assert world.event_types().count("LeaseGranted") == 2
    assert (await second.yield_("a")).success
    assert world.holder() == ""
    await second.acquire("b")
    waiting = first.acquire("a")  # it is not the job's any more, whatever this gateway remembers
    await queued(world, "a")
    await second.yield_("b")
    await waiting
    assert world.holder() == "a"
