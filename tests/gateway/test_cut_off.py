"""A workload whose stand-in is gone may live and be on the device: what a rival gets meanwhile, and what ends that."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from tests.agent.rig import NODE, until
from tests.gateway.snapshot_rig import GROUP, FakeWorkload, Place, placed, serving
from tests.support.jobs import process_state
from timeslice.backends.registry import get_backend
from timeslice.errors import RefusedError
from timeslice.gateway import holds, leases, workloads
from timeslice.gateway.proto import timeslice_orchestrator_pb2 as pb
from timeslice.gateway.proto.snapshot_agent_pb2 import SUSPEND_MODE_OFFLOAD
from timeslice.gateway.proto.timeslice_orchestrator_pb2_grpc import TimeSliceOrchestratorServiceStub
from timeslice.gateway.server import GatewayOptions, run_gateway
from timeslice.locks import scripts
from timeslice.models import Target


@pytest.fixture
async def place(redis_url: str, prefix: str, tmp_path: Path) -> AsyncIterator[Place]:
    async with placed(redis_url, prefix, tmp_path) as made:
        yield made


async def stand_in(place: Place, job: str) -> Target:
    """The newest of the job."""
    records = (await place.rig.view()).targets.values()
    return max((t for t in map(Target.model_validate_json, records) if t.job == job), key=lambda t: (t.start, t.pid))


async def kill(place: Place, *jobs: str) -> None:
    for job in jobs:
        os.kill((await stand_in(place, job)).pid, signal.SIGKILL)


async def watched(place: Place) -> bool:
    return (place.rig.folder / "state" / "groups" / GROUP / "targets.json").exists()


async def forgotten(place: Place, job: str) -> bool:
    """Whether an operator could give up the node, and the job's state on it."""
    try:
        await place.rig.driver.run(scripts.forget(place.rig.group, NODE, "eve", "it is gone", lose=[job]))
    except RefusedError:  # its agent was alive a moment ago
        return False
    return True


async def only(place: Place, *jobs: str) -> bool:
    return {name.partition("/")[0] for name in (await place.rig.view()).targets} == {*jobs}


async def lose_data(place: Place) -> None:
    client = place.rig.driver.client
    await client.delete(*await client.keys(f"{place.rig.prefix}*"))
    assert await place.residency("a") == "absent"


async def deferred(place: Place, job: str) -> bool:
    return any(each.job == job and "cut off" in each.deferred for each in (await place.rig.view()).queue)


@asynccontextmanager
async def orchestrating(url: str, prefix: str) -> AsyncIterator[TimeSliceOrchestratorServiceStub]:
    """A gateway that holds leases for its callers."""
    port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    stop = asyncio.Event()
    options = GatewayOptions(url=url, prefix=prefix, node=NODE, listen="127.0.0.1:0")
    gateway = asyncio.create_task(run_gateway(options, ready=port.set_result, stop=stop))
    async with grpc.aio.insecure_channel(f"127.0.0.1:{await port}") as channel:
        yield TimeSliceOrchestratorServiceStub(channel)
    stop.set()
    await gateway


async def shown(place: Place, job: str, residency: str) -> None:
    async def so() -> bool:
        return await place.residency(job) == residency

    await until(so, f"job {job} is {residency}")


async def kept_out(place: Place, turn: asyncio.Task[None]) -> None:
    """Its rival waits, and the group knows why."""

    async def refused() -> bool:
        return "state of job a is unknown" in (await place.rig.view()).reason

    await until(refused, "nobody is granted, and it is told why")
    assert not turn.done()


async def test_a_stand_in_that_is_killed_lets_no_rival_in(place: Place) -> None:
    """Not before the workload, which is told to register again, has been asked to save its state."""
    a, b = await place.workload("a"), await place.workload("b")
    await place.turn("a")
    await kill(place, "a")
    assert await a.call.code() == grpc.StatusCode.UNAVAILABLE
    turn = asyncio.create_task(place.turn("b"))
    await shown(place, "a", "faulted")
    await kept_out(place, turn)
    again = await place.workload("a", silent=True)
    await again.told("snapshot")
    assert not turn.done()
    again.silent = False
    await again.answer(again.commands[0])
    await turn
    assert await place.residency("a") == "suspended"
    await place.turn("a")
    assert (again.kinds(), b.kinds()) == (["snapshot", "restore"], ["snapshot"])


async def test_a_holder_whose_stand_in_is_killed_goes_on_holding(
    redis_url: str, prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By Acquire, with a body that computes: for its lease nothing has ended, and when it yields it has to be moved."""
    monkeypatch.setattr(holds, "GONE_S", 0.2)
    monkeypatch.setattr(leases, "LOOK_S", 0.1)
    async with placed(redis_url, prefix, tmp_path) as place, orchestrating(redis_url, prefix) as jobs:
        await place.workload("a")
        await jobs.Acquire(pb.AcquireRequest(job_id="a", group_id=GROUP))
        dead = await stand_in(place, "a")
        os.kill(dead.pid, signal.SIGKILL)
        turn = asyncio.create_task(place.turn("b"))
        await asyncio.wait({turn}, timeout=2.0)  # many looks of the gateway, and a beat of the agent
        assert (await place.rig.view()).holder == "a"
        assert await stand_in(place, "a") == dead
        await jobs.Yield(pb.YieldRequest(job_id="a", group_id=GROUP))
        await kept_out(place, turn)
        again = await place.workload("a")
        await turn
        assert again.kinds() == ["snapshot"]


@pytest.mark.parametrize("order", ["snapshot", "restore"])
async def test_a_stand_in_that_is_killed_in_the_middle_of_an_order(place: Place, order: str) -> None:
    """Nobody knows how far the workload came. So once it is back it has to save all before anybody is let in, and is
    brought back before it runs itself."""
    a = await place.workload("a")
    await place.turn("a")
    if order == "restore":
        await place.turn("b")
        a.commands.clear()
    a.silent = True
    turns = [asyncio.create_task(place.turn("b" if order == "snapshot" else "a"))]
    await a.told(order)
    await kill(place, "a")
    assert await a.call.code() == grpc.StatusCode.UNAVAILABLE
    again = await place.workload("a", silent=True)
    await again.told("snapshot")
    turns.append(asyncio.create_task(place.turn("c")))
    assert not any(turn.done() for turn in turns)
    again.silent = False
    await again.answer(again.commands[0])
    await asyncio.gather(*turns)
    await place.turn("a")
    assert again.kinds()[:2] == ["snapshot", "restore"]
    assert await place.residency("a") == "resident"


async def test_a_gateway_that_is_killed_with_all_stand_ins_lets_no_rival_in(place: Place, redis_url: str) -> None:
    """As a service manager ends them: until the workload is back at the next gateway and has saved its state."""
    a = await place.workload("a")
    await place.workload("idle")  # never had anything, so nobody waits for it
    await place.turn("a")
    found = [each for each in place.service._workloads._known.values() if each]
    place.service._workloads._known.clear()
    for each in found:
        each._process.kill()
        each._process.wait()
    await a.close()
    turn = asyncio.create_task(place.turn("b"))
    await kept_out(place, turn)
    await until(lambda: only(place, "a", "b"), "what never had anything is forgotten")
    async with serving(redis_url, place.rig.prefix) as (stub, *_):
        again = FakeWorkload(stub, "a")
        again.silent = True
        await again.register()
        await again.told("snapshot")
        assert not turn.done()
        await again.answer(again.commands[0])
        await turn
        again.silent = False
        await place.turn("a")
        assert again.kinds() == ["snapshot", "restore"]
        await again.close()


@pytest.mark.parametrize("before", ["resident", "suspended"])
async def test_a_workload_that_does_not_come_back_is_not_gone(
    before: str, redis_url: str, prefix: str, tmp_path: Path
) -> None:
    """No time proves that it ended. One that was saved keeps nobody out, and is saved as long as nobody orders it back;
    any other keeps all out until it speaks."""
    async with placed(redis_url, prefix, tmp_path, reconnect_s=0.2) as place:
        a = await place.workload("a")
        await place.turn("a")
        if before == "suspended":
            await place.turn("b")
        pid = (await stand_in(place, "a")).pid
        await a.close()
        await until(lambda: not Path("/proc", str(pid)).exists(), "its stand-in gave up")
        turn = asyncio.create_task(place.turn("c"))
        if before == "suspended":
            await turn
            assert await place.residency("a") == "suspended"
            turn = asyncio.create_task(place.turn("a"))
            await until(lambda: deferred(place, "a"), "job a is not let in without its state")
        else:
            await kept_out(place, turn)
        again = await place.workload("a")
        await turn
        assert again.kinds() == (["restore"] if before == "suspended" else ["snapshot"])


CLIENT = """
import sys, time, grpc
from timeslice.gateway.proto import snapshot_agent_pb2 as pb
from timeslice.gateway.proto.snapshot_agent_pb2_grpc import SnapshotAgentServiceStub
def messages():
    yield pb.WorkloadMessage(register=pb.RegisterWorkload(job_id="a", group="g"))
    time.sleep(600)
call = SnapshotAgentServiceStub(grpc.insecure_channel(sys.argv[1])).WorkloadChannel(messages())
call.initial_metadata()
print("up", flush=True)
next(call)
"""


async def test_a_workload_that_is_killed_said_no_good_bye(redis_url: str, prefix: str, tmp_path: Path) -> None:
    """Its children may still be on the device."""
    async with placed(redis_url, prefix, tmp_path, reconnect_s=0.2) as place:
        process = await asyncio.to_thread(place.rig.spawn, CLIENT, place.address)
        pid = (await stand_in(place, "a")).pid
        await place.turn("a")
        process.kill()
        await until(lambda: not Path("/proc", str(pid)).exists(), "its stand-in gave up")
        turn = asyncio.create_task(place.turn("b"))
        await kept_out(place, turn)
        again = await place.workload("a")
        await turn
        assert again.kinds() == ["snapshot"]


async def test_a_good_bye_ends_what_is_unknown(place: Place) -> None:
    """Also one that comes later, by whoever speaks for the job then. Nobody is asked, nor told, anything."""
    await place.workload("a")
    await place.turn("a")
    await kill(place, "a")
    turn = asyncio.create_task(place.turn("b"))
    await kept_out(place, turn)
    again = await place.workload("a", silent=True)
    await again.finish()
    await turn
    assert await place.residency("a") == "absent"


async def test_what_is_unknown_outlives_the_agent(redis_url: str, prefix: str, tmp_path: Path) -> None:
    """One that is started anew keeps a rival out as well, also when it had heard of nothing before."""
    async with placed(redis_url, prefix, tmp_path, agent_runs=False) as place:
        async with place.rig.agent(make_backend=get_backend, backends={}):
            await place.workload("a")
            await place.turn("a")
            await until(lambda: watched(place), "the agent has seen it")
        await kill(place, "a")
        turn = asyncio.create_task(place.turn("b"))
        for _ in range(2):
            async with place.rig.agent(make_backend=get_backend, backends={}):
                await kept_out(place, turn)
        async with place.rig.agent(make_backend=get_backend, backends={}):
            again = await place.workload("a")
            await turn
            assert again.kinds() == ["snapshot"]


async def test_what_is_unknown_outlives_the_servers_data(redis_url: str, prefix: str, tmp_path: Path) -> None:
    """A server that lost it all is told by the agent, also by one that was started anew meanwhile."""
    async with placed(redis_url, prefix, tmp_path, agent_runs=False) as place:
        async with place.rig.agent(make_backend=get_backend, backends={}):
            await place.workload("a")
            await place.turn("a")
            await kill(place, "a")
            await shown(place, "a", "faulted")
        await lose_data(place)
        async with place.rig.agent(make_backend=get_backend, backends={}):
            await shown(place, "a", "faulted")
            await lose_data(place)
            await shown(place, "a", "faulted")


@pytest.mark.slow
async def test_an_operator_may_give_it_up(redis_url: str, prefix: str, tmp_path: Path) -> None:
    """By forgetting the node while its agent is stopped: the agent believes that when it comes back."""
    async with placed(redis_url, prefix, tmp_path, agent_runs=False) as place:
        async with place.rig.agent(make_backend=get_backend, backends={}):
            await place.workload("a")
            await place.turn("a")
            await kill(place, "a")
            turn = asyncio.create_task(place.turn("b"))
            await kept_out(place, turn)
        await until(lambda: forgotten(place, "a"), "the node is forgotten")
        async with place.rig.agent(make_backend=get_backend, backends={}):
            await turn
            assert await place.residency("a") == "absent"


async def test_other_capabilities_leave_no_gap(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who comes back able to do more has somebody standing in for it all the time, and is where it was."""
    a = await place.workload("a")
    await place.turn("a")
    old = await stand_in(place, "a")
    await a.close()
    spawn = workloads._spawn

    def look_and_spawn(*arguments: str) -> subprocess.Popen[bytes]:
        assert process_state(old.pid) in "RS"
        return spawn(*arguments)

    monkeypatch.setattr(workloads, "_spawn", look_and_spawn)
    again = FakeWorkload(place.stub, "a")
    place.workloads.append(again)
    await again.register(SUSPEND_MODE_OFFLOAD, tags=["weights"])
    await until(lambda: not Path("/proc", str(old.pid)).exists(), "the former one has ended")
    await place.turn("b")
    assert again.kinds() == ["snapshot"]
