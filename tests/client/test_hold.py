from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

import timeslice
from tests.client.faces import Face, in_thread
from tests.client.world import World
from tests.support.jobs import DEADLINE_S
from timeslice.errors import AcquireTimeoutError, InvalidNameError, LeaseLostError, UsageError


def got(future: Future[Any]) -> Any:
    return future.result(DEADLINE_S)


def test_the_group_is_held_inside_and_free_outside(face: Face, world: World) -> None:
    """The body runs as the holder; after it, the group is free."""
    client = face.client(job="a")
    inside = got(face.hold(client, "g", lock_only=True, phase="train", body=lambda _: world.view()))
    assert (inside.holder, inside.state["label"]) == ("a", "train")
    assert not world.holder()


def test_a_timed_out_hold_does_not_run_its_body(face: Face, world: World, tmp_path: Path) -> None:
    """L06: with a wait limit, the body never runs without the grant."""
    got(face.acquire(face.client(job="a"), "g", lock_only=True))
    marker = tmp_path / "marker"
    with pytest.raises(AcquireTimeoutError):
        got(face.hold(face.client(job="b"), "g", lock_only=True, timeout=0.2, body=lambda _: marker.touch()))
    assert not marker.exists()
    assert world.queue() == []


def test_the_bodys_error_comes_out_and_the_group_is_free(face: Face, world: World) -> None:
    """An exception of the body passes through unchanged, and the hold ends."""

    def body(_: Any) -> None:
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        got(face.hold(face.client(job="a"), "g", lock_only=True, body=body))
    assert not world.holder()


def test_nested_holds_share_one_lease(face: Face, world: World) -> None:
    """A hold inside a hold of the same group enters at once, and only the last one out yields."""
    client = face.client(job="a")
    seen: list[str] = []

    def body(leases: Any) -> None:
        assert leases[0] is leases[1]
        seen.append(world.holder())

    got(face.nested(client, "g", "g", body=body, timeout=0))
    assert seen == ["a"]
    assert not world.holder()
    assert [event for event in world.event_types() if event.startswith("Lease")] == ["LeaseGranted", "LeaseYielded"]


def test_the_inner_exit_keeps_the_outer_hold(world: World) -> None:
    """Leaving a nested hold changes nothing for the outer one, however often."""
    with timeslice.hold("g", job="a", lock_only=True) as outer:
        for _ in range(2):
            with timeslice.hold("g", job="a", lock_only=True):
                pass
            outer.ensure_held()
            assert world.holder() == "a"


def test_nesting_under_another_job_is_refused(face: Face, world: World) -> None:
    """Code that holds a group for one job would wait for itself as another: that is an error, not a hang."""
    with pytest.raises(UsageError, match="job a and would wait for itself as job b"):
        got(face.nested(face.client(job="a"), "g", "g", body=lambda _: None, job="b"))
    assert not world.holder()


def test_another_thread_waits_for_its_own_turn(world: World) -> None:
    """A raw thread inherits no hold: it is a waiter of its own, even for the same job."""
    client = timeslice.Client(job="a")
    with client, client.hold("g", lock_only=True):
        other = in_thread(lambda: client.acquire("g", lock_only=True, timeout=0.2))
        with pytest.raises(AcquireTimeoutError):
            got(other)


async def test_child_tasks_and_to_thread_inherit_the_hold(world: World) -> None:
    """What a hold's body starts with asyncio shares the hold; the group is free when the last of them is out."""
    inner_in, go = asyncio.Event(), asyncio.Event()

    async def child() -> None:
        async with timeslice.hold("g", job="a", lock_only=True, timeout=0):
            inner_in.set()
            await go.wait()

    def in_worker() -> int:
        with timeslice.hold("g", job="a", lock_only=True, timeout=0) as lease:
            token: int = lease.fencing_token
            return token

    async with timeslice.hold("g", job="a", lock_only=True) as lease:
        task = asyncio.create_task(child())
        await inner_in.wait()
    assert world.holder() == "a"  # the child is still inside
    lease.ensure_held()
    go.set()
    await task
    assert not world.holder()
    with timeslice.hold("g", job="a", lock_only=True) as outer:
        assert await asyncio.to_thread(in_worker) == outer.fencing_token


async def test_a_task_that_outlives_the_hold_takes_its_own(world: World) -> None:
    """An inherited hold that is over counts for nothing."""
    go = asyncio.Event()

    async def child() -> int:
        await go.wait()
        async with timeslice.hold("g", job="a", lock_only=True) as own:
            assert world.holder() == "a"
            token: int = own.fencing_token
            return token

    async with timeslice.hold("g", job="a", lock_only=True) as lease:
        task = asyncio.create_task(child())
    go.set()
    assert await task > lease.fencing_token


def test_several_groups_are_taken_in_one_order(face: Face, world: World) -> None:
    """Whatever order they are named in, trainers come before samplers, and `as` follows the naming."""
    client = face.client(job="a")
    leases = got(face.hold(client, "samplers", "other", "trainers", lock_only=True, body=lambda leases: leases))
    assert [lease.group for lease in leases] == ["samplers", "other", "trainers"]
    tokens = {lease.group: lease.fencing_token for lease in leases}
    at = {group: next(e for e in world.events(group) if e["type"] == "LeaseGranted") for group in tokens}
    assert int(at["trainers"]["at_ms"]) <= int(at["other"]["at_ms"]) <= int(at["samplers"]["at_ms"])
    assert [world.holder(group) for group in tokens] == ["", "", ""]


def test_the_configured_order_goes_first(face: Face, world: World) -> None:
    """`order` in a group's config decides before the names do: a wait shows where the hold stands."""
    world.redis.hset(world.group("samplers").config, "order", "-1")
    blocker = got(face.acquire(face.client(job="b"), "trainers", lock_only=True))
    waiting = face.hold(face.client(job="a"), "trainers", "samplers", lock_only=True, body=lambda _: None)
    world.until_queued("a", group="trainers")
    assert world.holder("samplers") == "a"
    face.give_up(blocker)
    got(waiting)


def test_several_groups_are_all_or_nothing(face: Face, world: World) -> None:
    """If one of the groups is not had in time, those that were are given back and the body does not run."""
    got(face.acquire(face.client(job="b"), "samplers", lock_only=True))
    ran: list[int] = []
    with pytest.raises(AcquireTimeoutError, match="samplers"):
        got(
            face.hold(
                face.client(job="a"), "samplers", "trainers", lock_only=True, timeout=0.2, body=lambda _: ran.append(1)
            )
        )
    assert not ran
    assert world.holder("trainers") == ""
    assert world.event_types("trainers").count("LeaseYielded") == 1


def test_two_jobs_with_crossed_names_do_not_deadlock(face: Face, world: World) -> None:
    """Jobs that name the same groups in opposite order both finish."""
    one, two = face.client(job="a"), face.client(job="b")
    futures = []
    for _ in range(5):
        futures.append(face.hold(one, "trainers", "samplers", lock_only=True, body=lambda _: None))
        futures.append(face.hold(two, "samplers", "trainers", lock_only=True, body=lambda _: None))
    for future in futures:
        got(future)


def test_a_decorated_function_runs_inside(world: World) -> None:
    """Each call of a decorated function holds the group, and its result comes back."""

    @timeslice.hold("g", job="a", lock_only=True)
    def train(step: int) -> tuple[int, str]:
        """Doc."""
        return step, world.holder()

    assert train(3) == (3, "a")
    assert train(4) == (4, "a")
    assert (train.__name__, train.__doc__) == ("train", "Doc.")
    assert not world.holder()


async def test_a_decorated_coroutine_holds_for_the_whole_await(world: World) -> None:
    """L30: the group is held while the coroutine runs, not only while it is made."""

    @timeslice.hold("g", job="a", lock_only=True)
    async def train() -> list[str]:
        before = world.holder()
        await asyncio.sleep(0)
        return [before, world.holder()]

    made = train()
    assert not world.holder()
    assert await made == ["a", "a"]
    assert not world.holder()


def test_decorated_calls_from_many_threads_take_turns(world: World) -> None:
    """One decorated function may be called from several threads at once; never two are inside."""
    inside: list[int] = []
    most: list[int] = []
    guard = threading.Lock()

    @timeslice.hold("g", job="a", lock_only=True)
    def work(number: int) -> None:
        with guard:
            inside.append(number)
            most.append(len(inside))
        with guard:
            inside.remove(number)

    for future in [in_thread(lambda n=number: work(n)) for number in range(20)]:  # type: ignore[misc]
        got(future)
    assert most == [1] * 20


def test_a_loser_that_leaves_late_does_not_yield_for_its_successor(world: World) -> None:
    """Two threads share a hold; the one whose lease was lost leaves without touching the other's."""
    hold = timeslice.hold("g", job="a", lock_only=True)
    lost, over = threading.Event(), threading.Event()

    def loser() -> None:
        with hold:
            world.redis.hset(world.group().state, "deadline_ms", 1)
            lost.set()
            assert over.wait(DEADLINE_S)

    leaving = in_thread(loser)
    assert lost.wait(DEADLINE_S)
    with hold as lease:
        over.set()
        got(leaving)
        assert world.view().number("token") == lease.fencing_token
        assert world.holder() == "a"
    assert not world.holder()


def test_a_generator_function_is_refused(world: World) -> None:
    """A decorator can't hold around a generator's body, so it says what to do instead."""

    def batches() -> Any:
        yield 1

    async def stream() -> Any:
        yield 1

    for function in (batches, stream):
        with pytest.raises(UsageError, match="inside it"):
            timeslice.hold("g")(function)


def test_a_function_that_only_makes_a_coroutine_is_refused(world: World) -> None:
    """L30: a plain function that returns a coroutine would run it without the hold; it is closed unrun."""
    ran: list[int] = []

    async def work() -> None:
        ran.append(1)

    @timeslice.hold("g", job="a", lock_only=True)
    def train() -> Any:
        return work()

    with pytest.raises(UsageError, match="async def"):
        train()
    assert not ran


def test_leaving_in_another_context_still_yields(world: World) -> None:
    """A framework may enter in one callback and leave in another, on another thread."""
    hold = timeslice.hold("g", job="a", lock_only=True)
    got(in_thread(hold.__enter__))
    assert world.holder() == "a"
    got(in_thread(lambda: hold.__exit__(None, None, None)))
    assert not world.holder()


def test_a_nested_hold_of_a_lost_lease_does_not_enter(world: World) -> None:
    """When the outer lease is lost, an inner hold says so instead of running its body."""
    with timeslice.hold("g", job="a", lock_only=True, lease=1) as lease:
        world.redis.delete(*world.group().all)
        with timeslice.Client(job="b") as other:
            other.acquire("g", lock_only=True)
            assert lease.lost.wait(DEADLINE_S)
            with pytest.raises(LeaseLostError), timeslice.hold("g", job="a", lock_only=True):
                pytest.fail("entered")


@pytest.mark.parametrize(
    "make",
    [
        timeslice.hold,
        lambda: timeslice.hold("a", "a"),
        lambda: timeslice.hold("not a name"),
        lambda: timeslice.hold("g", job="{x}"),
        lambda: timeslice.hold("g", timeout=-1),
        lambda: timeslice.hold("g", lease=0),
        lambda: timeslice.hold("g", phase="two words"),
        lambda: timeslice.hold("g", timeout="5"),  # type: ignore[call-overload]
        lambda: timeslice.hold("g", lease="x"),  # type: ignore[call-overload]
        lambda: timeslice.hold("g")(type("Trainer", (), {})),
        lambda: timeslice.Client(5),  # type: ignore[arg-type]
        lambda: timeslice.TimeSliceOrchestratorClient(target=5),  # type: ignore[arg-type]
    ],
)
def test_a_hold_that_makes_no_sense_is_refused_where_it_is_written(make: Any) -> None:
    """Mistakes show when the hold is made, before any server is known."""
    with pytest.raises((UsageError, InvalidNameError)):
        make()


async def test_the_wrong_kind_of_with_is_refused(world: World) -> None:
    """A hold of a sync client in async code, or the reverse, says which to use."""
    with timeslice.Client() as client, pytest.raises(UsageError, match="AsyncClient"):
        async with client.hold("g"):
            pytest.fail("entered")
    async with timeslice.AsyncClient() as other:
        with pytest.raises(UsageError, match="async with"), other.hold("g"):
            pytest.fail("entered")


def test_disabled_holds_do_nothing_and_say_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With TIMESLICE_DISABLE=1 bodies run without any server, and the log says so once."""
    monkeypatch.setattr("timeslice.client.once._said", set())
    monkeypatch.setenv("TIMESLICE_DISABLE", "1")

    @timeslice.hold("g")
    async def train() -> int:
        return 7

    for _ in range(2):
        with timeslice.hold("trainers", "samplers") as leases:
            for lease in leases:
                lease.ensure_held()
                assert not lease.lost.is_set()
    assert asyncio.run(train()) == 7
    with timeslice.Client() as client:
        client.acquire("g").yield_()
    assert caplog.text.count("TIMESLICE_DISABLE") == 1


def test_a_new_event_loop_gets_connections_of_its_own(world: World) -> None:
    """Module-level holds work in one event loop after another, and leave no open connection behind."""

    @timeslice.hold("g", job="a", lock_only=True)
    async def train() -> str:
        return world.holder()

    before = len(world.redis.client_list())
    assert [asyncio.run(train()) for _ in range(3)] == ["a", "a", "a"]
    assert len(world.redis.client_list()) <= before + 1  # the renewal thread's may have come


def test_the_environment_is_read_at_each_hold(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job id that a launcher sets later counts for the next hold."""
    seen = []
    for job in ("first", "second"):
        monkeypatch.setenv("TIMESLICE_JOB", job)
        with timeslice.hold("g", lock_only=True):
            seen.append(world.holder())
    assert seen == ["first", "second"]


def test_the_server_of_timeslice_up_is_found(
    world: World, monkeypatch: pytest.MonkeyPatch, clean_environment: Path
) -> None:
    """Without TIMESLICE_URL, the URL file is used, and a new file is noticed."""
    monkeypatch.delenv("TIMESLICE_URL")
    (clean_environment / "url").write_text("redis://127.0.0.1:1\n")
    with pytest.raises(timeslice.RedisUnreachableError):
        timeslice.hold("g", lock_only=True, timeout=0).__enter__()
    (clean_environment / "url").unlink()
    (clean_environment / "url").write_text(world.url + "\n")
    with timeslice.hold("g", job="a", lock_only=True):
        assert world.holder() == "a"
