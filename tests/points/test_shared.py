"""Yield points where several parts of a job share one hold: who may give it away."""

from __future__ import annotations

import asyncio
import os
import threading
from typing import Any

import pytest

from tests.client.faces import in_thread
from tests.client.world import World
from tests.points.faces import got
from tests.support.jobs import wait_until
from timeslice import AcquireTimeoutError, AsyncClient, Client, LeaseLostError, LeaseUncertainError, UsageError
from timeslice.client.context import Entered, enter_point
from timeslice.locks import scripts


def test_the_inner_hold_of_one_stack(world: World) -> None:
    """A function with a hold of its own, called inside another: its point yields what both share, for both."""
    with Client(job="a") as a, Client(job="b") as b, a.hold("g", lock_only=True) as outer:
        rival = in_thread(lambda: b.acquire("g", lock_only=True).yield_())
        world.until_queued("b")
        with a.hold("g", lock_only=True) as inner:
            assert inner is outer
            assert outer.yield_point(min_slice=0) is True
            inner.ensure_held()
        outer.ensure_held()
        got(rival)
        assert world.holder() == "a"
    assert world.holder() == ""


async def test_a_task_inside_keeps_the_group(world: World) -> None:
    """While a child task is in a nested hold, nothing is yielded: only it knows whether it computes."""
    async with AsyncClient(job="a") as a, AsyncClient(job="b") as b, a.hold("g", lock_only=True) as lease:
        inside, leave = asyncio.Event(), asyncio.Event()

        async def child() -> None:
            async with a.hold("g", lock_only=True):
                inside.set()
                await leave.wait()

        task = asyncio.create_task(child())
        await inside.wait()
        rival = asyncio.create_task(b.acquire("g", lock_only=True))
        await asyncio.to_thread(world.until_queued, "b")
        token = lease.fencing_token
        assert await lease.yield_point(min_slice=0) is False
        batches = iter([False, False, True])
        assert await lease.yield_point(ready=lambda: next(batches)) is False
        assert (lease.fencing_token, world.holder()) == (token, "a")
        leave.set()
        await task
        point = asyncio.create_task(lease.yield_point(min_slice=0))
        await (await rival).yield_()
        assert await point is True


async def test_the_task_inside_may_yield_for_all(world: World) -> None:
    """A point in the only nested hold: whoever is around it waits for it, as for any call."""
    async with AsyncClient(job="a") as a, AsyncClient(job="b") as b, a.hold("g", lock_only=True) as lease:

        async def child() -> bool:
            async with a.hold("g", lock_only=True) as same:
                return bool(await same.yield_point(min_slice=0))

        rival = asyncio.create_task(b.acquire("g", lock_only=True))
        await asyncio.to_thread(world.until_queued, "b")
        point = asyncio.create_task(child())
        await (await rival).yield_()
        assert await point is True
        lease.ensure_held()


def test_two_at_a_point_at_once(world: World) -> None:
    """The second one is told to pause, and a nested hold meanwhile waits for the group as anybody would."""
    go = threading.Event()
    with Client(job="a") as a, a.hold("g", lock_only=True) as lease:
        point = in_thread(lambda: lease.yield_point(ready=go.is_set))
        wait_until(lambda: not world.holder(), "it has given the group back")
        with pytest.raises(LeaseUncertainError, match="yield point"):
            lease.yield_point(min_slice=0)
        with a.hold("g", lock_only=True) as other:
            assert other is not lease
            assert world.holder() == "a"
        go.set()
        assert got(point) is True
        lease.ensure_held()


def test_a_forked_child_yields_nothing_of_its_parents(world: World) -> None:
    """The lease is the parent's: a point in the child raises, and the parent keeps the group."""
    with Client(job="a") as a, a.hold("g", lock_only=True) as lease:
        pid = os.fork()
        if not pid:
            try:
                lease.yield_point(min_slice=0)
                os._exit(1)
            except LeaseLostError:
                os._exit(0)
            finally:
                os._exit(2)
        assert os.waitpid(pid, 0)[1] == 0
        lease.ensure_held()
        assert world.holder() == "a"


def test_from_the_first_moment_of_a_point_nobody_joins(world: World) -> None:
    """Nor does a second point begin, before the yield is even sent."""
    with Client(job="a") as a, a.hold("g", lock_only=True) as lease:
        assert enter_point(lease)
        with pytest.raises(LeaseUncertainError, match="yield point"):
            enter_point(lease)
        with a.hold("h", lock_only=True):
            assert lease.holding
            assert not lease.holding.join("a", None, Entered(a))
        lease.at_point = False
        assert enter_point(lease)
        lease.at_point = False


def test_starved_behind_a_thread_that_is_inside(world: World) -> None:
    """The point waits until that has left, but not beyond its `timeout`, and not for a lease that is over."""
    with Client(job="a") as a, a.hold("g", lock_only=True) as lease:
        holding: Any = lease.holding
        holding.inside.append(Entered(a, by=object()))  # as another thread would stand there
        with pytest.raises(AcquireTimeoutError, match="nothing to compute"):
            lease.yield_point(ready=lambda: False, timeout=0.1)
        lease.ensure_held()
        point = in_thread(lambda: lease.yield_point(ready=lambda: False))
        world.run(scripts.yield_(world.group(), lease.lease_id, None, by="ops"))
        lease.note_renewal(world.run(lease.renewal()), 0.0)
        with pytest.raises(LeaseLostError):
            got(point)
        holding.inside.pop()


def test_a_hold_inside_of_ready(world: World) -> None:
    """What `ready` holds meanwhile is its own; afterwards nested holds share the lease of the point again."""
    answers = iter([False, True])
    with Client(job="a") as a, a.hold("g", lock_only=True) as lease:

        def ready() -> bool:
            if not world.holder():
                with a.hold("g", lock_only=True, timeout=0) as other:
                    assert other is not lease
            return next(answers)

        assert lease.yield_point(ready=ready) is True
        with a.hold("g", lock_only=True, timeout=0) as inner:
            assert inner is lease
    assert world.holder() == ""


def test_a_hold_that_was_left_elsewhere_is_not_kept(world: World) -> None:
    """Frameworks enter in one context and leave in another: the first would keep all such leases for ever."""
    with Client(job="a") as a:
        left = a.hold("g", lock_only=True)
        left.__enter__()
        got(in_thread(lambda: left.__exit__(None, None, None)))
        with a.hold("g", lock_only=True) as lease:
            assert lease.holding
            assert lease.holding.outer is None


@pytest.mark.parametrize(
    ("outer", "inner"),
    [({"gang": False}, {"rank": 0, "world_size": 2}), ({"rank": 0, "world_size": 1}, {"rank": 1, "world_size": 2})],
)
def test_a_gang_s_hold_inside_one_of_this_process_alone(
    world: World, outer: dict[str, Any], inner: dict[str, Any]
) -> None:
    """Joined, it would keep the other ranks waiting for this one for ever: an error says what differs."""
    with Client(job="a") as a, a.hold("g", lock_only=True, **outer) as lease:
        told = rf"job a as this process alone, and asks inside that as rank {inner['rank']} of a gang of 2"
        with pytest.raises(UsageError, match=told), a.hold("g", lock_only=True, **inner):
            pass
        assert lease.holding.count == 1
        with a.hold("g", lock_only=True, **outer) as same:
            assert same is lease
