"""Asynchronous trainers: the pool is asked for when there is a batch, and given back while there is none."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

import timeslice
from tests.client.faces import Face, in_thread
from tests.client.world import World
from tests.points.faces import at_point, got
from tests.support.jobs import wait_until
from timeslice import AcquireTimeoutError, AsyncClient, Client, UsageError


def test_starved_it_gives_the_group_back(face: Face, world: World) -> None:
    """At once, whoever waits and however short the slice; and takes it again when there is a batch."""
    batch = threading.Event()
    lease = got(face.acquire(face.client(job="a"), "g", lock_only=True))
    token = lease.fencing_token
    point = at_point(face, lease, min_slice=1000, ready=batch.is_set)
    wait_until(lambda: world.holder() == "", "it has given the group back")
    assert world.queue() == []  # it does not even ask while there is nothing to compute
    got(face.hold(face.client(job="b"), "g", lock_only=True, body=lambda _: None))
    assert not point.done()
    batch.set()
    assert got(point) is True
    lease.ensure_held()
    assert lease.fencing_token > token
    assert world.holder() == "a"


def test_with_a_batch_it_is_a_point_like_any_other(face: Face, world: World) -> None:
    """`ready` true: others get their turn after `min_slice`, and not before."""
    lease = got(face.acquire(face.client(job="a"), "g", lock_only=True))
    assert got(at_point(face, lease, min_slice=0, ready=lambda: True)) is False
    rival = face.hold(face.client(job="b"), "g", lock_only=True, body=lambda _: None)
    world.until_queued("b")
    assert got(at_point(face, lease, min_slice=1000, ready=lambda: True)) is False
    lease.ask_at = 0.0
    assert got(at_point(face, lease, min_slice=0, ready=lambda: True)) is True
    got(rival)


def test_an_error_of_ready_ends_the_wait(face: Face, world: World) -> None:
    """Off the group the lease is over, and nothing waits; before that it is still held."""
    answers = iter([False, False])

    def ready() -> bool:
        try:
            return next(answers)
        except StopIteration:
            raise ZeroDivisionError from None

    client = face.client(job="a")
    lease = got(face.acquire(client, "g", lock_only=True))
    with pytest.raises(ZeroDivisionError):
        got(at_point(face, lease, ready=ready))
    assert (lease.state, lease.lost.is_set()) == ("lost", True)
    assert (world.holder(), world.queue()) == ("", [])
    lease = got(face.acquire(client, "g", lock_only=True))
    with pytest.raises(ZeroDivisionError):
        got(at_point(face, lease, ready=ready))
    lease.ensure_held()


def test_nothing_to_do_for_too_long(face: Face, world: World) -> None:
    """`timeout` counts from the start of the point: for the batch and the group together."""
    lease = got(face.acquire(face.client(job="a"), "g", lock_only=True))
    with pytest.raises(AcquireTimeoutError, match=r"nothing to compute within 0\.1 s"):
        got(at_point(face, lease, ready=lambda: False, timeout=0.1))
    assert (lease.state, world.holder(), world.queue()) == ("lost", "", [])


def test_the_loop_of_an_async_trainer(world: World) -> None:
    """Nothing is asked for before the first batch, and a rival trains whenever this one starves."""
    batches: list[int] = []
    trained: list[int] = []

    def train() -> None:
        timeslice.until_ready(lambda: bool(batches), poll=0.005)
        with Client(job="a") as client, client.hold("g", lock_only=True) as lease:
            for _ in range(3):
                lease.yield_point(ready=lambda: bool(batches))
                trained.append(batches.pop())

    with Client(job="b") as rival:
        trainer = in_thread(train)
        for number in range(3):
            with rival.hold("g", lock_only=True):
                assert "a" not in {world.holder(), *world.queue()}
                batches.append(number)
                world.until_queued("a")
            wait_until(lambda number=number: trained[-1:] == [number], "it has trained")  # type: ignore[misc]
    got(trainer)
    assert trained == [0, 1, 2]
    assert [e["job"] for e in world.events() if e["type"] == "LeaseGranted"] == ["b", "a"] * 3


def test_waiting_for_the_first_batch() -> None:
    """`until_ready` answers whether it came within the limit; its error goes through; coroutines need the twin."""
    answers = iter([False, False, True])
    assert timeslice.until_ready(lambda: next(answers), poll=0.001) is True
    assert timeslice.until_ready(lambda: False, timeout=0.02, poll=0.001) is False
    assert timeslice.until_ready(lambda: True, timeout=0) is True
    with pytest.raises(ZeroDivisionError):
        timeslice.until_ready(lambda: bool(1 / 0))

    async def later() -> bool:
        return True

    with pytest.raises(UsageError, match="until_ready_async"):
        timeslice.until_ready(later)  # type: ignore[arg-type]
    for bad in ({"poll": -1}, {"timeout": "1"}, {"ready": None}):
        with pytest.raises(UsageError):
            timeslice.until_ready(**{"ready": lambda: True, **bad})  # type: ignore[arg-type]


async def test_coroutine_functions_tell_whether_there_is_a_batch(world: World) -> None:
    """Both of the async twins await them, and the loop goes on meanwhile."""
    queue: asyncio.Queue[int] = asyncio.Queue()

    async def ready() -> bool:
        await asyncio.sleep(0)
        return not queue.empty()

    asyncio.get_running_loop().call_later(0.02, queue.put_nowait, 1)
    assert await timeslice.until_ready_async(ready, poll=0.001)
    queue.get_nowait()
    async with AsyncClient(job="a") as client, client.hold("g", lock_only=True) as lease:
        asyncio.get_running_loop().call_later(0.02, queue.put_nowait, 2)
        assert await lease.yield_point(ready=ready)
        lease.ensure_held()
    assert await timeslice.until_ready_async(lambda: False, timeout=0.01) is False


def test_a_coroutine_function_in_sync_code_is_refused(world: World) -> None:
    """It would always count as true."""

    async def ready() -> bool:
        return False

    wrong: Any = ready
    with (
        Client(job="a") as client,
        client.hold("g", lock_only=True) as lease,
        pytest.raises(UsageError, match="coroutine"),
    ):
        lease.yield_point(ready=wrong)
