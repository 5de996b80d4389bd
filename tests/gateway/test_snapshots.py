"""Snapshot, Restore and GetOperation: real moves by a real agent, asked for over a real channel."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from grpc.aio import AioRpcError

from tests.agent.knobs import make
from tests.agent.rig import until
from tests.gateway.snapshot_rig import GROUP, Place, placed
from timeslice.gateway import moves
from timeslice.gateway.proto import snapshot_agent_pb2 as pb
from timeslice.locks import scripts

COMPLETE, FAILED, PENDING = pb.OPERATION_STATUS_COMPLETE, pb.OPERATION_STATUS_FAILED, pb.OPERATION_STATUS_PENDING


@pytest.fixture
async def place(redis_url: str, prefix: str, tmp_path: Path) -> AsyncIterator[Place]:
    async with placed(redis_url, prefix, tmp_path) as made:
        yield made


async def test_a_snapshot_puts_a_job_out_and_a_restore_brings_it_back(place: Place) -> None:
    """Both go on by themselves, tell no bytes that nobody measured, and do nothing when there is nothing to do."""
    a = await place.workload("a")
    await place.turn("a")
    done = await place.outcome(await place.snapshot("a"))
    assert done.status == COMPLETE
    assert (done.HasField("storage_bytes"), done.HasField("snapshot_device_bytes"), done.error) == (False, False, "")
    assert done.elapsed_ms > 0
    assert (await place.residency("a"), a.kinds()) == ("suspended", ["snapshot"])
    assert (await place.outcome(await place.snapshot("a"))).status == COMPLETE
    assert (await place.outcome(await place.restore("a"))).status == COMPLETE
    assert (await place.residency("a"), a.kinds()) == ("resident", ["snapshot", "restore"])
    assert (await place.rig.view()).holder == ""
    assert (await place.outcome(await place.restore("a"))).status == COMPLETE
    assert a.kinds() == ["snapshot", "restore"]


async def test_measured_bytes_are_told(redis_url: str, prefix: str, tmp_path: Path) -> None:
    """Where a backend measures: what is in host memory, and what was or is on the device."""
    backends = {GROUP: [f"knobs:folder={tmp_path / 'fake'}"]}
    async with placed(redis_url, prefix, tmp_path, make_backend=make, backends=backends) as place:
        await place.rig.job("a", 600)
        await place.turn("a")

        async def told() -> bool:
            return bool((await place.rig.member("a")).device_bytes)

        await until(told, "the agent has told of job a")
        out = await place.outcome(await place.snapshot("a"))
        assert (out.status, out.storage_bytes, out.snapshot_device_bytes) == (COMPLETE, 600, 600)
        back = await place.outcome(await place.restore("a"))
        assert (back.status, back.storage_bytes, back.snapshot_device_bytes) == (COMPLETE, 600, 600)
        assert place.rig.fake.state("a") == "resident"


async def test_a_holder_is_not_put_out(place: Place) -> None:
    """It computes; the operation fails and says what an operator could do."""
    a = await place.workload("a")
    lease = await place.hold("a")
    found = await place.outcome(await place.snapshot("a"))
    assert found.status == FAILED
    assert "it holds the group" in found.error
    assert a.kinds() == []
    await place.rig.driver.run(scripts.yield_(place.rig.group, lease, None))
    assert (await place.outcome(await place.snapshot("a"))).status == COMPLETE


async def test_a_workload_that_never_acquired_is_asked_and_moved(place: Place) -> None:
    """Its caller takes no turns: what is on the device only the workload knows. Then it can be brought back."""
    a = await place.workload("a")
    assert (await place.outcome(await place.snapshot("a"))).status == COMPLETE
    assert (await place.residency("a"), a.kinds()) == ("suspended", ["snapshot"])
    assert (await place.outcome(await place.restore("a"))).status == COMPLETE
    assert (await place.residency("a"), a.kinds()) == ("resident", ["snapshot", "restore"])


async def test_a_workload_that_never_acquired_and_fails_fails_the_operation(place: Place) -> None:
    """In its own words; nobody is told that it is out."""
    await place.workload("a", error="no room here")
    found = await place.outcome(await place.snapshot("a"))
    assert (found.status, "no room here" in found.error) == (FAILED, True)


async def test_a_workload_that_never_acquired_stays_while_another_job_holds(place: Place) -> None:
    """Nothing is moved beside a holder; the operation fails and says who holds."""
    a = await place.workload("a")
    await place.hold("b")
    found = await place.outcome(await place.snapshot("a"))
    assert (found.status, "job b holds the group" in found.error) == (FAILED, True)
    assert a.kinds() == []


async def test_there_has_to_be_something_to_restore(place: Place) -> None:
    """A job of which nothing is saved fails, and is not taken for one that has loaded. To put it out is done."""
    await place.workload("a")
    for job in ("a", "never-seen"):
        found = await place.outcome(await place.restore(job))
        assert (found.status, "nothing of it is saved" in found.error) == (FAILED, True)
        assert await place.residency(job) == "absent"
        assert (await place.outcome(await place.snapshot(job))).status == COMPLETE


async def test_a_workload_that_fails_fails_the_operation(place: Place) -> None:
    """With its own words, and its state stays where it was: on the device, or in its copy. Later it goes well."""
    a = await place.workload("a", error="no room here")
    await place.turn("a")
    out = await place.outcome(await place.snapshot("a"))
    assert (out.status, "no room here" in out.error) == (FAILED, True)
    assert await place.residency("a") == "resident"
    a.error = ""
    assert (await place.outcome(await place.snapshot("a"))).status == COMPLETE
    a.error = "no way back"
    back = await place.outcome(await place.restore("a"))
    assert (back.status, "no way back" in back.error) == (FAILED, True)
    assert await place.residency("a") == "suspended"
    assert (await place.rig.view()).queue == ()
    a.error = ""
    assert (await place.outcome(await place.restore("a"))).status == COMPLETE
    assert await place.residency("a") == "resident"


@pytest.mark.slow
async def test_a_workload_that_hangs_fails_the_operation_by_its_groups_deadlines(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody is granted meanwhile; when it answers after all, the group goes on by itself."""
    monkeypatch.setattr(moves, "GRACE_S", 0.5)
    await place.configure(prepare=1000, suspend=1000, restore=1000)
    a = await place.workload("a", silent=True)
    await place.turn("a")
    operation = await place.snapshot("a")
    await a.told("snapshot")
    assert (await place.operation(operation)).status == PENDING
    found = await place.outcome(operation)
    assert (found.status, "not out within 3.5 s" in found.error) == (FAILED, True)
    a.silent = False
    await a.answer(a.commands[0])
    await place.turn("a")
    assert await place.residency("a") == "resident"
    assert a.kinds()[:2] in (["snapshot"], ["snapshot", "restore"])


async def test_a_swap_that_is_under_way_is_waited_for(place: Place) -> None:
    """A snapshot of the job that a rival's turn puts out is done when that is; asked twice it is one operation."""
    a = await place.workload("a", silent=True)
    await place.workload("b")
    await place.turn("a")
    waiting = place.rig.request("b")
    await place.rig.driver.run(scripts.acquire(place.rig.group, waiting))
    await a.told("snapshot")
    operation = await place.snapshot("a")
    assert await place.snapshot("a") == operation
    assert (await place.operation(operation)).status == PENDING
    await a.answer(a.commands[0])
    assert (await place.outcome(operation)).status == COMPLETE
    assert a.kinds() == ["snapshot"]


TARGET = pb.ProcessTarget(pids=[1])
MODES = pb.SuspendMode


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (pb.BackendConfig(cuda=pb.CudaBackendConfig(explicit_target=TARGET)), "cuda.explicit_target"),
        (pb.BackendConfig(direct_memory=pb.DirectMemoryBackendConfig(explicit_target=TARGET)), "direct_memory"),
        (pb.BackendConfig(memory_regions=pb.MemoryRegionsBackendConfig(snapshot_name="x")), "memory_regions"),
        (pb.BackendConfig(app_endpoint=pb.AppEndpointConfig(endpoints=["http://x"])), "app_endpoint"),
        (pb.BackendConfig(app_channel=pb.AppChannelConfig(mode=pb.SUSPEND_MODE_DISCARD)), "mode DISCARD"),
        (pb.BackendConfig(app_channel=pb.AppChannelConfig(tags=["weights"])), "app_channel.tags"),
        (pb.BackendConfig(), ""),
        (pb.BackendConfig(cuda=pb.CudaBackendConfig()), ""),
        (pb.BackendConfig(direct_memory=pb.DirectMemoryBackendConfig()), ""),
        (pb.BackendConfig(app_channel=pb.AppChannelConfig()), ""),
        (pb.BackendConfig(app_channel=pb.AppChannelConfig(mode=pb.SUSPEND_MODE_OFFLOAD)), ""),
    ],
    ids=lambda value: value if isinstance(value, str) and value else "accepted" if value == "" else "",
)
def test_a_configuration_that_would_not_be_followed_is_refused(config: pb.BackendConfig, named: str) -> None:
    """What names a target, or a part of a job's state, is no wish that could be left aside."""
    from timeslice.errors import UsageError
    from timeslice.gateway.selection import check_backend

    if not named:
        check_backend(config)
        return
    with pytest.raises(UsageError, match=named):
        check_backend(config)


async def test_bad_requests_are_refused_before_anything_begins(place: Place) -> None:
    """Each with the status that llm-d's clients know."""
    await place.rig.driver.run(scripts.configure(place.rig.keys.group("locked"), {}, mode="lock"))
    pids = pb.BackendConfig(cuda=pb.CudaBackendConfig(explicit_target=TARGET))
    for code, request in (
        (grpc.StatusCode.INVALID_ARGUMENT, pb.SnapshotRequest(job_id="", group=GROUP)),
        (grpc.StatusCode.INVALID_ARGUMENT, pb.SnapshotRequest(job_id="a", group="{x}" * 100_000)),
        (grpc.StatusCode.INVALID_ARGUMENT, pb.SnapshotRequest(job_id="a", group=GROUP, backend_config=pids)),
        (grpc.StatusCode.NOT_FOUND, pb.SnapshotRequest(job_id="a", group="nowhere")),
        (grpc.StatusCode.FAILED_PRECONDITION, pb.SnapshotRequest(job_id="a", group="locked")),
    ):
        for call in (place.stub.Snapshot, place.stub.Restore):
            with pytest.raises(AioRpcError) as caught:
                await call(request)  # type: ignore[arg-type]  # both requests have the same fields
            assert caught.value.code() == code, caught.value.details()


async def test_an_unknown_operation_is_not_found(place: Place) -> None:
    """Also one with a name that nobody would want in a message."""
    for name in ("", "no", "x" * 100_000, "\x1b[2J"):
        with pytest.raises(AioRpcError) as caught:
            await place.operation(name)
        assert caught.value.code() == grpc.StatusCode.NOT_FOUND
        assert (caught.value.details() or "").isprintable()
        assert len(caught.value.details() or "") < 400
