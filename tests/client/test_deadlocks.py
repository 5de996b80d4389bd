"""L16: groups taken in crossing orders, by threads, tasks and processes."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from tests.client.faces import Face, in_thread
from tests.client.world import World
from tests.support.jobs import DEADLINE_S, wait_until
from timeslice import AcquireTimeoutError, AsyncClient, Client, DeadlockError

OUTER = """
    with timeslice.hold({outer!r}, lock_only=True):
        say("outer")
        hear()
        try:
            with timeslice.hold({inner!r}, lock_only=True):
                say("inner")
        except timeslice.DeadlockError as error:
            say(error)
            hear()
"""

ROUNDS = """
    import fcntl
    guard = open({guard!r}, "w")

    def round():
        with {holds}:
            fcntl.flock(guard, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises if the other one is in, too
            fcntl.flock(guard, fcntl.LOCK_UN)

    say("up")
    for hundred in range(10):
        hear()
        for _ in range(100):
            round()
        say(hundred)
"""


def got(future: Future[Any]) -> Any:
    return future.result(DEADLINE_S)


def test_jobs_in_crossing_order(world: World) -> None:
    """L16: X takes trainers, then samplers, Y the reverse. Y is told jobs, groups and the way out, keeps what it holds
    until it leaves, and X, who knew nothing of it, finishes."""
    x = world.job(OUTER.format(outer="trainers", inner="samplers"), job="x")
    y = world.job(OUTER.format(outer="samplers", inner="trainers"), job="y")
    assert (x.line(), y.line()) == ("outer", "outer")
    x.tell()
    world.until_queued("x", group="samplers")
    y.tell()
    said = y.line()
    for words in ("job y waits for trainers", "job x waits for samplers", 'hold("trainers", "samplers")'):
        assert words in said
    assert world.holder("samplers") == "y"
    assert world.queue("samplers") == ["x"]
    assert world.queue("trainers") == []
    y.tell()
    assert x.line() == "inner"
    assert (x.process.wait(DEADLINE_S), y.process.wait(DEADLINE_S)) == (0, 0)


def test_who_waited_first_is_told_too(world: World) -> None:
    """L16: Y, out of order, waits already when X closes the circle: it gets the error in the middle of its wait."""
    x = world.job(OUTER.format(outer="trainers", inner="samplers"), job="x")
    y = world.job(OUTER.format(outer="samplers", inner="trainers"), job="y")
    assert (x.line(), y.line()) == ("outer", "outer")
    y.tell()
    world.until_queued("y", group="trainers")
    x.tell()
    assert "job y waits for trainers" in y.line()
    y.tell()
    assert x.line() == "inner"


def test_a_thousand_rounds_with_both_groups(world: World, tmp_path: Path) -> None:
    """L16: one job asks for both groups at once, named the wrong way round; one takes trainers, then samplers. Neither
    ever hangs or gets an error, and they are never in at the same time."""
    at_once = 'timeslice.hold("samplers", "trainers", lock_only=True)'
    nested = 'timeslice.hold("trainers", lock_only=True), timeslice.hold("samplers", lock_only=True)'
    guard = str(tmp_path / "guard")
    jobs = [
        world.job(ROUNDS.format(guard=guard, holds=holds), job=job) for job, holds in (("x", at_once), ("y", nested))
    ]
    assert [job.line() for job in jobs] == ["up", "up"]
    for hundred in range(10):
        for job in jobs:
            job.tell()
        assert [job.line() for job in jobs] == [str(hundred)] * 2
    assert [job.process.wait(DEADLINE_S) for job in jobs] == [0, 0]
    granted = [event["job"] for event in world.events("samplers") if event["type"] == "LeaseGranted"]
    assert {"x", "y"} == set(granted[-100:])


def test_a_job_with_two_processes(world: World) -> None:
    """L16: two processes of one job, one job id, crossing orders: found as between strangers."""
    x = world.job(OUTER.format(outer="trainers", inner="samplers"), job="x")
    y = world.job(OUTER.format(outer="samplers", inner="trainers"), job="x")
    assert (x.line(), y.line()) == ("outer", "outer")
    x.tell()
    world.until_queued("x", group="samplers")
    y.tell()
    assert "job x waits for trainers, which job x holds" in y.line()
    y.tell()
    assert x.line() == "inner"


def test_a_dead_waiter_makes_no_circle(world: World) -> None:
    """X is killed while it waits. Once its wait has expired, Y, which would have closed a circle with it, waits for
    X's lease to end, and gets in."""
    code = OUTER.format(outer="trainers", inner="samplers").replace("lock_only=True", "lock_only=True, lease=6")
    x = world.job(code, job="x", ttl_ms=500)
    y = world.job(OUTER.format(outer="samplers", inner="trainers"), job="y")
    assert (x.line(), y.line()) == ("outer", "outer")
    x.tell()
    world.until_queued("x", group="samplers")
    wait_until(lambda: world.view("trainers").state.get("waits_on", "").startswith("samplers/"), "its wait is noted")
    x.end()
    wait_until(lambda: not any(waiter.alive for waiter in world.view("samplers").queue), "its wait has expired")
    assert world.view("trainers").state["waits_on"]
    y.tell()
    world.until_queued("y", group="trainers")
    assert y.line() == "inner"


def test_nested_holds_against_the_order(face: Face, world: World) -> None:
    """Out of order is allowed, with a wait too, as long as nobody waits the other way round; the note is taken back."""
    client, other = face.client(job="a"), face.client(job="b")
    freed, entered = threading.Event(), threading.Event()

    def keep(_: Any) -> None:
        entered.set()
        freed.wait(DEADLINE_S)

    rival = face.hold(other, "trainers", body=keep, lock_only=True)
    assert entered.wait(DEADLINE_S)
    noted: list[str] = []

    def look(_: Any) -> None:
        noted.append(world.view("samplers").state["waits_on"])

    nested = face.nested(client, "samplers", "trainers", body=look)
    world.until_queued("a", group="trainers")
    freed.set()
    got(rival)
    got(nested)
    assert noted == [""]


def test_settings_that_can_not_be_read_end_no_wait(face: Face, world: World) -> None:
    """Whoever holds another group meanwhile can't be told of circles there; and the order is the one by name."""
    client, other = face.client(job="a"), face.client(job="b")
    rival = got(face.acquire(other, "samplers", lock_only=True))
    world.redis.hset(world.group("samplers").config, "order", "first")
    waits = [
        face.nested(client, "trainers", "samplers", body=lambda _: None),
        face.hold(client, "samplers", "critics", lock_only=True, body=lambda _: None),
    ]
    wait_until(lambda: world.redis.zcard(world.group("samplers").queue) == 2, "both wait")
    assert world.holder("critics") == "a"
    face.give_up(rival)
    for wait in waits:
        got(wait)


def test_threads_and_tasks_in_crossing_order(face: Face, world: World) -> None:
    """Two contexts of one process are told apart; the one in order gets in when the other has let go."""
    client = face.client(job="a")
    met = threading.Barrier(2, timeout=DEADLINE_S)
    done: list[str] = []

    def crossing(outer: str, inner: str) -> Future[Any]:
        def body(_: Any) -> None:
            met.wait()
            with Client(job="a") as own, own.hold(inner, lock_only=True):
                done.append(inner)

        # The body runs in a thread that inherits the context, in both faces.
        return face.hold(client, outer, body=body, lock_only=True)

    x, y = crossing("trainers", "samplers"), crossing("samplers", "trainers")
    with pytest.raises(DeadlockError, match="trainers"):
        got(y)
    got(x)
    assert done == ["samplers"]


def test_leases_had_without_with(world: World) -> None:
    """`acquire` in crossing orders: what a thread has taken and not given back counts as held by it."""
    with Client(job="x") as x, Client(job="y") as y:
        trainers, samplers = x.acquire("trainers", lock_only=True), y.acquire("samplers", lock_only=True)
        x_waits: Future[Any] = Future()

        def work() -> None:
            # The same thread for both: a lease that another thread took might be given back by that one meanwhile.
            trainers.yield_()
            again = x.acquire("trainers", lock_only=True)
            x_waits.set_result(None)
            x.acquire("samplers", lock_only=True).yield_()
            again.yield_()

        finished = in_thread(work)
        got(x_waits)
        world.until_queued("x", group="samplers")
        with pytest.raises(DeadlockError) as raised:
            y.acquire("trainers", lock_only=True)
        assert raised.value.job == "y"
        samplers.ensure_held()
        samplers.yield_()
        got(finished)


def test_a_lease_that_another_thread_took_is_not_held_by_this_one(world: World) -> None:
    """It may be given back while this one waits: no circle. The wait goes on, to its limit or to its end."""
    with Client(job="x") as x, Client(job="y") as y:
        got(in_thread(lambda: x.acquire("trainers", lock_only=True)))
        y_holds = y.acquire("samplers", lock_only=True)
        waiting = in_thread(lambda: x.acquire("samplers", lock_only=True))
        world.until_queued("x", group="samplers")
        with pytest.raises(AcquireTimeoutError):
            y.acquire("trainers", lock_only=True, timeout=0.2)
        y_holds.yield_()
        got(waiting)


def test_a_wait_without_patience_times_out(face: Face, world: World) -> None:
    """With `timeout=0` nobody waits, so nobody is in a circle: the error is that of the limit."""
    client, other = face.client(job="a"), face.client(job="b")
    got(face.acquire(other, "trainers", lock_only=True))
    with pytest.raises(AcquireTimeoutError):
        got(face.nested(client, "samplers", "trainers", body=lambda _: None, timeout=0))


async def test_child_tasks_hold_what_they_inherit(world: World) -> None:
    """A task made inside a hold is part of it: its wait closes a circle as its parent's would."""
    async with AsyncClient(job="x") as x, AsyncClient(job="y") as y:
        entered, go = asyncio.Event(), asyncio.Event()

        async def in_order() -> None:
            async with x.hold("trainers", lock_only=True):
                entered.set()
                await go.wait()
                async with x.hold("samplers", lock_only=True):
                    pass

        async def child() -> None:
            async with y.hold("trainers", lock_only=True):
                pass

        first = asyncio.create_task(in_order())
        await entered.wait()
        async with y.hold("samplers", lock_only=True):
            go.set()
            with pytest.raises(DeadlockError):
                await asyncio.create_task(child())
        await first


def test_several_groups_at_once_time_out_whole(face: Face, world: World) -> None:
    """A hold of two groups that gets only one within its limit keeps neither, and leaves no note and no waiter."""
    client, other = face.client(job="a"), face.client(job="b")
    got(face.acquire(other, "samplers", lock_only=True))
    with pytest.raises(AcquireTimeoutError, match="samplers"):
        got(face.hold(client, "samplers", "trainers", body=lambda _: None, lock_only=True, timeout=0.2))
    assert (world.holder("trainers"), world.queue("trainers"), world.queue("samplers")) == ("", [], [])
    assert world.view("trainers").state.get("waits_on", "") == ""
