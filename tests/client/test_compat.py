from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import pytest

import timeslice
from tests.client.world import World
from timeslice import TimeSliceOrchestratorClient
from timeslice.client.compat import AcquireResult, GroupState, JobState, YieldResult
from timeslice.locks import scripts

# As llm-d publishes it, word for word; users change nothing but TIMESLICE_URL.
PUBLISHED = """\
from timeslice import TimeSliceOrchestratorClient
orchestrator = TimeSliceOrchestratorClient(target="orchestrator:50051")

@orchestrator.on_accelerators(group_id="trainer-group")
def train_phase(model, trajectories): ...
"""


@pytest.fixture
def client(world: World, monkeypatch: pytest.MonkeyPatch) -> Iterator[TimeSliceOrchestratorClient]:
    """A client of a world whose groups are served by a scripted agent."""
    monkeypatch.setenv("TIMESLICE_JOB_ID", "a")
    world.serve("trainer-group", "other")
    with TimeSliceOrchestratorClient(target="orchestrator:50051", group_id="trainer-group") as made:
        yield made


def test_the_published_example_runs_unchanged(world: World) -> None:
    """With TIMESLICE_URL set, llm-d's example holds the group around each call, under its own target."""
    world.serve("trainer-group")
    names: dict[str, object] = {}
    exec(PUBLISHED.replace(": ...", ": return model, trajectories"), names)
    train_phase = names["train_phase"]
    assert callable(train_phase)
    assert train_phase("model", [1]) == ("model", [1])
    assert [kind for kind in world.event_types("trainer-group") if kind.startswith("Lease")] == [
        "LeaseGranted",
        "LeaseYielded",
    ]


def test_a_target_of_host_and_port_is_a_redis_server(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without TIMESLICE_URL, `localhost:6379` is read as `redis://localhost:6379`."""
    monkeypatch.delenv("TIMESLICE_URL")
    unreachable = pytest.raises(timeslice.OrchestratorConnectionError, match=r"redis://127\.0\.0\.1:1 ")
    with TimeSliceOrchestratorClient(target="127.0.0.1:1", group_id="g") as made, unreachable:
        made.acquire(timeout_sec=0)


@pytest.mark.parametrize("target", ["127.0.0.1:1", "orchestrator.invalid:50051"])
def test_a_target_that_does_not_answer_says_what_overrides_it(
    world: World, monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    """Who runs llm-d's code without TIMESLICE_URL reads that it is missing, whatever was called."""
    monkeypatch.delenv("TIMESLICE_URL")
    with TimeSliceOrchestratorClient(target=target, group_id="g") as made:
        calls = (
            lambda: made.acquire(timeout_sec=0),
            lambda: made.on_accelerators(timeout_sec=0).__enter__(),
            made.get_status,
            made.list_groups,
        )
        for call in calls:
            with pytest.raises(timeslice.OrchestratorConnectionError, match="set TIMESLICE_URL, which overrides it"):
                call()


def test_acquire_and_release(client: TimeSliceOrchestratorClient, world: World) -> None:
    """The pair holds the group in between; asking again while holding succeeds at once."""
    first = client.acquire()
    assert (first.success, first.context_restored) == (True, False)
    assert world.holder("trainer-group") == "a"
    assert client.acquire() == AcquireResult(success=True, waited_ms=0, context_restored=False)
    assert client.release() == YieldResult(success=True, pending_waiters=0, snapshot_deferred=True)
    assert not world.holder("trainer-group")
    client.acquire(group_id="other", job_id="b")
    assert world.holder("other") == "b"
    assert client.yield_(group_id="other", job_id="b").success


def test_a_release_counts_the_waiters(client: TimeSliceOrchestratorClient, world: World) -> None:
    """`pending_waiters` and `snapshot_deferred` tell whether somebody waits."""
    client.acquire()
    world.run(scripts.acquire(world.group("trainer-group"), scripts.Request("w", "b", "n1", 1, 1)))
    assert client.release() == YieldResult(success=True, pending_waiters=1, snapshot_deferred=False)


def test_restored_state_is_told(client: TimeSliceOrchestratorClient, world: World) -> None:
    """`context_restored` is true after a swap that brought the job's state back."""
    world.run(scripts.acquire(world.group("trainer-group"), scripts.Request("w", "b", "n9", 1, 1)))
    token = world.view("trainer-group").number("token")
    world.run(scripts.yield_(world.group("trainer-group"), "w", token))
    from tests.client.faces import in_thread

    result = in_thread(client.acquire)
    world.swap(out="b", how="restored", group="trainer-group")
    assert result.result(20).context_restored


def test_missing_and_wrong_ids(client: TimeSliceOrchestratorClient, world: World) -> None:
    """Missing ids are ValueErrors; an unknown group and a release without a hold are invalid arguments."""
    with TimeSliceOrchestratorClient() as bare:
        for call in (bare.acquire, bare.release, bare.get_status, bare.on_accelerators):
            with pytest.raises(ValueError, match="group_id is missing"):
                call()
    with pytest.raises(timeslice.OrchestratorInvalidArgumentError, match="trainer-group"):
        client.acquire(group_id="trainer-groop")
    with pytest.raises(timeslice.OrchestratorInvalidArgumentError, match="call acquire first"):
        client.release()
    with pytest.raises(timeslice.OrchestratorInvalidArgumentError, match="no group nothing"):
        client.get_status("nothing")
    with pytest.raises(ValueError, match="can't name a group"):
        client.on_accelerators(group_id="a b")


def test_a_wait_limit_is_a_timeout_error(client: TimeSliceOrchestratorClient, world: World) -> None:
    """`timeout_sec` ends the wait with llm-d's error, whose cause is ours."""
    world.run(scripts.acquire(world.group("trainer-group"), scripts.Request("w", "b", "n1", 1, 1)))
    enters: tuple[Callable[[], object], ...] = (
        lambda: client.acquire(timeout_sec=0.1),
        lambda: client.on_accelerators(timeout_sec=0.1).__enter__(),
    )
    for enter in enters:
        with pytest.raises(timeslice.OrchestratorTimeoutError) as caught:
            enter()
        assert isinstance(caught.value, timeslice.OrchestratorError)
        assert isinstance(caught.value.__cause__, timeslice.AcquireTimeoutError)
    assert world.queue("trainer-group") == []


def test_on_accelerators_gives_the_result(client: TimeSliceOrchestratorClient, world: World) -> None:
    """As context manager it gives an AcquireResult, in sync and async code, and passes the body's errors on."""
    with client.on_accelerators() as result:
        assert result.success
        assert world.holder("trainer-group") == "a"

    @client.on_accelerators(group_id="other")
    async def generate() -> str:
        return world.holder("other")

    assert asyncio.run(generate()) == "a"
    with pytest.raises(ZeroDivisionError), timeslice.on_accelerators(group_id="other"):
        raise ZeroDivisionError
    assert not world.holder("other")


def test_a_lost_lease_is_an_internal_error(client: TimeSliceOrchestratorClient, world: World) -> None:
    """A release of a hold that had been lost says so."""
    client.acquire()
    world.redis.hset(world.group("trainer-group").state, "deadline_ms", 1)
    world.run(scripts.own(world.group("trainer-group"), "c1"))
    with pytest.raises(timeslice.OrchestratorInternalError, match="is over"):
        client.release()


def test_status_and_groups(client: TimeSliceOrchestratorClient, world: World) -> None:
    """Status speaks llm-d's words for the group and for each job on each agent."""
    assert client.list_groups() == ["other", "trainer-group"]
    assert client.get_status().group_state == GroupState.IDLE
    client.acquire()
    world.run(scripts.acquire(world.group("trainer-group"), scripts.Request("w", "b", "n1", 1, 1)))
    status = client.get_status()
    assert (status.group_state, status.locking_job, status.loaded_job) == (GroupState.LOCKED, "a", "a")
    assert status.waiter_queue_depth == 1
    client.release()
    assert client.get_status().group_state == GroupState.SWITCHING
    world.swap(out="a", how="first load", group="trainer-group")
    states = {each.job_id: each.job_state for each in client.get_status().agent_job_states}
    assert states["a"] == JobState.SAVED
    world.run(scripts.yield_(world.group("trainer-group"), "w", world.view("trainer-group").number("token")))
    assert client.get_status().group_state == GroupState.IDLE_YIELDED


def test_disabled(monkeypatch: pytest.MonkeyPatch) -> None:
    """With TIMESLICE_DISABLE=1 the published code runs without any server."""
    monkeypatch.setenv("TIMESLICE_DISABLE", "1")
    with TimeSliceOrchestratorClient(group_id="g") as made:
        assert made.acquire().success
        assert made.release().success
        with made.on_accelerators() as result:
            assert result.success
