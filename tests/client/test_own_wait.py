"""Code that waits for what it holds itself would wait for ever: it is told at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

import timeslice
from tests.client.world import World
from timeslice import AcquireTimeoutError, AsyncClient, Client, DeadlockError, TimeSliceOrchestratorClient


def hold(client: Client) -> None:
    with client.hold("g", lock_only=True):
        pytest.fail("entered")


def hold_by_default_client(_: Client) -> None:
    with timeslice.hold("g", job="a", lock_only=True):
        pytest.fail("entered")


def acquire(client: Client) -> None:
    client.acquire("g", lock_only=True)


def decorated(client: Client) -> None:
    client.hold("other", "g", lock_only=True)(lambda: pytest.fail("entered"))()


@pytest.mark.parametrize("again", [hold, hold_by_default_client, acquire, decorated])
def test_a_thread_that_asks_for_what_it_acquired_is_told(world: World, again: Callable[[Client], None]) -> None:
    """The error names group, job and token, the wait is withdrawn, and the lease stands."""
    with Client(job="a") as client:
        lease = client.acquire("g", lock_only=True)
        with pytest.raises(DeadlockError, match=rf"group g: .*for job a by acquire \(token {lease.fencing_token}\)"):
            again(client)
        lease.ensure_held()
        assert world.queue() == []
        assert world.holder("other") == ""


def test_an_acquire_inside_a_hold_of_the_group_is_told(world: World) -> None:
    """Only holds share a lease; each acquire is a request of its own."""
    with Client(job="a") as client, client.hold("g", lock_only=True):
        with pytest.raises(DeadlockError, match="for job a by a hold"):
            client.acquire("g", lock_only=True)
        assert world.holder() == "a"


async def test_a_task_that_asks_for_what_it_acquired_is_told(world: World) -> None:
    """As a thread is, whether it asks by hold or acquire."""
    async with AsyncClient(job="a") as client:
        lease = await client.acquire("g", lock_only=True)
        with pytest.raises(DeadlockError, match="for job a by acquire"):
            async with client.hold("g", lock_only=True):
                pytest.fail("entered")
        with pytest.raises(DeadlockError):
            await client.acquire("g", lock_only=True)
        lease.ensure_held()


def test_the_client_of_llm_d_is_told_too(world: World) -> None:
    """`acquire` and then `on_accelerators` around a block, as its own error with the cause."""
    world.serve("g")
    with TimeSliceOrchestratorClient(job_id="a", group_id="g") as client:
        client.acquire()
        with (
            pytest.raises(timeslice.OrchestratorError, match="group g: this code holds it already") as caught,
            client.on_accelerators(),
        ):
            pytest.fail("entered")
        assert isinstance(caught.value.__cause__, DeadlockError)
        client.release()
        with client.on_accelerators():
            assert world.holder() == "a"


def test_who_does_not_wait_is_in_no_deadlock(world: World) -> None:
    """timeout=0 asks whether the group is free, and the answer is no."""
    with Client(job="a") as client:
        client.acquire("g", lock_only=True)
        with pytest.raises(AcquireTimeoutError):
            client.acquire("g", lock_only=True, timeout=0)


async def test_what_others_can_yield_is_waited_for(world: World) -> None:
    """Another task's lease, one that a pool's thread took for another task, and another job's on the same thread."""

    async def yield_when_queued(lease: Any, job: str) -> None:
        await asyncio.to_thread(world.until_queued, job)
        await asyncio.to_thread(lease.yield_) if isinstance(lease, timeslice.Lease) else await lease.yield_()

    async with AsyncClient(job="a") as client:
        lease: Any = await asyncio.create_task(client.acquire("g", lock_only=True))
        await asyncio.gather(yield_when_queued(lease, "a"), _enter(client))
    with Client(job="a") as threads:
        first: Any = await asyncio.to_thread(threads.acquire, "g", lock_only=True)
        ends = asyncio.create_task(yield_when_queued(first, "a"))
        second = await asyncio.to_thread(threads.acquire, "g", lock_only=True)
        await ends
        third = asyncio.create_task(asyncio.to_thread(threads.acquire, "g", lock_only=True, job="b"))
        await asyncio.to_thread(world.until_queued, "b")
        second.yield_()
        (await third).yield_()


async def _enter(client: AsyncClient) -> None:
    async with client.hold("g", lock_only=True):
        pass
