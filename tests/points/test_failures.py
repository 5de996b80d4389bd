"""A yield point that can't have the group again: the error is raised, the lease is over, and nothing is left behind."""

from __future__ import annotations

import asyncio
import signal
import threading
from typing import Any

import pytest

from tests.client.faces import Face
from tests.client.world import World
from tests.points.faces import at_point, got
from tests.support.jobs import DEADLINE_S, wait_until
from timeslice import (
    AcquireTimeoutError,
    AsyncClient,
    CancelledByOperatorError,
    Client,
    DeadlockError,
    LeaseLostError,
    RedisUnreachableError,
)
from timeslice.locks import scripts
from timeslice.torture.proxy import Proxy

INTERRUPTED = """
    try:
        with timeslice.hold("g", lock_only=True) as lease:
            say("in")
            hear()
            lease.yield_point(min_slice=0)
    except KeyboardInterrupt:
        say(lease.lost.is_set(), lease.state)
    hear()
"""


def is_over(lease: Any) -> None:
    assert (lease.state, lease.lost.is_set()) == ("lost", True)
    with pytest.raises(LeaseLostError, match="yielded at a yield point and could not be had again"):
        lease.ensure_held()


def test_a_rival_that_stays_too_long(face: Face, world: World) -> None:
    """After `timeout` seconds the wait ends; `on_lost` is told, and leaving the hold does no harm to the rival."""
    told: list[Any] = []
    client, other = face.client(job="a"), face.client(job="b")
    begun, leases = threading.Event(), []

    def body(lease: Any) -> None:
        leases.append(lease)
        begun.set()
        world.until_queued("b")
        got(at_point(face, lease, min_slice=0, timeout=0.2))

    held = face.hold(client, "g", lock_only=True, body=body, on_lost=told.append)
    assert begun.wait(DEADLINE_S)
    rival = got(face.acquire(other, "g", lock_only=True))
    with pytest.raises(AcquireTimeoutError, match=r"job a was not granted within 0.2 s"):
        got(held)
    is_over(leases[0])
    wait_until(lambda: told == leases, "on_lost was called")
    assert (world.holder(), world.queue()) == ("b", [])
    rival.ensure_held()


def test_an_operator_cancels_the_wait(face: Face, world: World) -> None:
    """CancelledByOperatorError, as in any other wait."""
    lease = got(face.acquire(face.client(job="a"), "g", lock_only=True))
    rival = face.acquire(face.client(job="b"), "g", lock_only=True)
    world.until_queued("b")
    point = at_point(face, lease, min_slice=0)
    got(rival)
    world.until_queued("a")
    world.run(scripts.cancel(world.group(), world.view().queue[0].waiter, by="ops"))
    with pytest.raises(CancelledByOperatorError, match="ops"):
        got(point)
    is_over(lease)
    assert world.queue() == []


def test_a_circle(world: World) -> None:
    """It holds samplers and gives trainers to one who then wants samplers: it is out of order, and is told."""
    with Client(job="a") as a, Client(job="b") as b:
        inside = threading.Event()

        def rival() -> None:
            with b.hold("trainers", lock_only=True):
                inside.set()
                with b.hold("samplers", lock_only=True):
                    pass

        with a.hold("trainers", "samplers", lock_only=True) as (trainers, samplers):
            thread = threading.Thread(target=rival)
            thread.start()
            world.until_queued("b", group="trainers")
            with pytest.raises(DeadlockError, match="job a waits for trainers"):
                trainers.yield_point(min_slice=0)
            assert inside.is_set()
            is_over(trainers)
            samplers.ensure_held()
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
    assert (world.queue("trainers"), world.queue("samplers")) == ([], [])


def test_the_server_goes_away(proxy: Proxy, face: Face, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between yield and return: RedisUnreachableError; whoever waits gets in when the server is back."""
    client = face.client(url=proxy.url, job="a")
    lease = got(face.acquire(client, "g", lock_only=True, lease=3))
    rival = face.acquire(face.client(job="b"), "g", lock_only=True)
    world.until_queued("b")

    answers = iter([False, True])

    def away() -> bool:
        proxy.cut()
        return next(answers)

    with pytest.raises(RedisUnreachableError):
        got(at_point(face, lease, ready=away, timeout=3))
    is_over(lease)
    proxy.heal()
    got(rival)
    assert (world.holder(), world.queue()) == ("b", [])


def test_a_yield_that_arrives_too_late(proxy: Proxy, face: Face, world: World) -> None:
    """The server was away until the lease had run out and the rival was in. Off the device nothing was lost by that:
    the point goes on to wait for its turn."""
    client, batch = face.client(url=proxy.url, job="a"), threading.Event()
    lease = got(face.acquire(client, "g", lock_only=True, lease=3))
    rival = face.acquire(face.client(job="b"), "g", lock_only=True)
    world.until_queued("b")
    asked = iter([proxy.cut])

    def ready() -> bool:
        for cut in asked:
            cut()
        return batch.is_set()

    point = at_point(face, lease, ready=ready)
    between = got(rival)
    proxy.heal()
    wait_until(lambda: client.renewer._errands == [], "the yield was answered")
    batch.set()
    world.until_queued("a")
    assert not lease.lost.is_set()
    face.give_up(between)
    assert got(point) is True
    lease.ensure_held()


def test_without_an_answer_nobody_is_let_in_and_the_body_goes_on(proxy: Proxy, face: Face, world: World) -> None:
    """A point that can't ask who waits yields nothing, and asks no more until the renewal thread has had an answer."""
    lease = got(face.acquire(face.client(url=proxy.url, job="a"), "g", lock_only=True))
    face.acquire(face.client(job="b"), "g", lock_only=True)
    world.until_queued("b")
    proxy.cut()
    assert got(at_point(face, lease, min_slice=0)) is False
    proxy.heal()
    assert got(at_point(face, lease, min_slice=0)) is False
    lease.ensure_held()


def test_an_interrupt_in_the_wait(world: World) -> None:
    """Ctrl-C leaves the queue before KeyboardInterrupt goes on."""
    a = world.job(INTERRUPTED, job="a")
    assert a.line() == "in"
    with Client(job="b") as other:
        rival: list[Any] = []
        thread = threading.Thread(target=lambda: rival.append(other.acquire("g", lock_only=True)))
        thread.start()
        world.until_queued("b")
        a.tell()
        thread.join(DEADLINE_S)
        world.until_queued("a")
        a.signal(signal.SIGINT)
        assert a.line() == "True lost"
        assert (world.holder(), world.queue()) == ("b", [])


async def test_a_cancelled_task(world: World) -> None:
    """A task that is cancelled at the point leaves the queue; the hold around it ends without harm."""
    async with AsyncClient(job="a") as a, AsyncClient(job="b") as b:
        leases: list[Any] = []

        async def work() -> None:
            async with a.hold("g", lock_only=True) as lease:
                leases.append(lease)
                await asyncio.to_thread(world.until_queued, "b")
                await lease.yield_point(min_slice=0)

        task = asyncio.create_task(work())
        await asyncio.to_thread(world.until_held, "a")
        rival = await b.acquire("g", lock_only=True)
        await asyncio.to_thread(world.until_queued, "a")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        is_over(leases[0])
        assert (world.holder(), world.queue()) == ("b", [])
        await rival.yield_()


def test_a_lease_that_the_yield_finds_lost(face: Face, world: World) -> None:
    """It was taken away, and nobody had told us yet: the point raises, and asks for nothing."""
    lease = got(face.acquire(face.client(job="a"), "g", lock_only=True))
    world.run(scripts.revoke(world.group(), "a", lease.lease_id, lease.fencing_token, "ops", "drill", at_once=True))
    with pytest.raises(LeaseLostError, match="ops revoked it"):
        got(at_point(face, lease, ready=lambda: False))
    assert (lease.lost.is_set(), world.queue()) == (True, [])
