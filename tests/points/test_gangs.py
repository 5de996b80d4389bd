"""Yield points of a gang: all ranks yield at the same one, or none does."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from typing import Any

import pytest

from tests.client.faces import in_thread
from tests.client.world import Job, World
from tests.points.faces import got
from tests.support.jobs import wait_until
from timeslice import AcquireTimeoutError, AsyncClient, Client, GangEndedError, LeaseLostError, UsageError
from timeslice.client.context import Entered
from timeslice.locks import scripts
from timeslice.locks.loader import load
from timeslice.torture.proxy import Proxy

RANK = """
    with timeslice.hold("g", lock_only=True, rank={rank}, world_size=2) as lease:
        say("in", lease.fencing_token)
        while hear():
            say(lease.yield_point(min_slice=0), lease.fencing_token)
"""


def at_points(rank: Job, count: int) -> list[str]:
    """What the rank says at so many points, one after the other."""
    said = []
    for _ in range(count):
        rank.tell()
        said.append(rank.line().split()[0])
    return said


def test_the_first_rank_at_a_point_decides_for_all(world: World) -> None:
    """However far apart they are: one yields at its fourth point, the other goes on to its own fourth before anybody
    else is let in; and both come back with the same token. In the next slice the other one is ahead."""
    ranks = [world.job(RANK.format(rank=rank), job="a") for rank in (0, 1)]
    before = {rank.line() for rank in ranks}
    assert len(before) == 1
    for ahead, behind in (ranks, ranks[::-1]):
        assert at_points(ahead, 3) == ["False"] * 3
        with Client(job="b") as other:
            rival = in_thread(lambda other=other: other.acquire("g", lock_only=True).yield_())  # type: ignore[misc]
            world.until_queued("b")
            ahead.tell()
            assert at_points(behind, 3) == ["False"] * 3
            assert (world.holder(), rival.done()) == ("a", False)
            behind.tell()
            got(rival)
        after = {rank.line() for rank in ranks}
        assert len(after) == 1
        assert after.pop().startswith("True")
    granted = [event["job"] for event in world.events() if event["type"] == "LeaseGranted"]
    assert granted == ["a", "b", "a", "b", "a"]


async def test_ranks_in_async_code(world: World) -> None:
    """Tasks of two clients: a hundred points while a rival comes and goes; both ranks yield at the same ones."""
    rival_waits = asyncio.Event()

    async def rank(number: int, client: AsyncClient) -> list[tuple[int, int]]:
        yielded = []
        async with client.hold("g", lock_only=True, rank=number, world_size=2) as lease:
            await rival_waits.wait()  # else all points may be over before it comes
            for step in range(100):
                await asyncio.sleep(0.001 * number)
                if await lease.yield_point(min_slice=0):
                    yielded.append((step, lease.fencing_token))
        return yielded

    async def rival(client: AsyncClient) -> None:
        for _ in range(3):
            async with client.hold("g", lock_only=True):
                pass

    async with AsyncClient(job="a") as one, AsyncClient(job="a") as two, AsyncClient(job="b") as other:
        ranks = [asyncio.create_task(rank(number, client)) for number, client in enumerate((one, two))]
        await asyncio.to_thread(world.until_held, "a")
        comes_and_goes = asyncio.create_task(rival(other))
        await asyncio.to_thread(world.until_queued, "b")
        rival_waits.set()
        await comes_and_goes
        first, second = await asyncio.gather(*ranks)
    assert first == second
    assert first
    assert [token for _, token in first] == sorted({token for _, token in first})


def test_what_a_rank_may_not_do_at_a_point(world: World) -> None:
    """Decide alone by `ready`, or stay out of it because a thread of it is inside: both are errors, and the gang keeps
    the group."""
    with Client(job="a") as one, Client(job="a") as two, Client(job="b") as other:
        met, leave = threading.Barrier(2, timeout=60), threading.Event()

        def second() -> None:
            with two.hold("g", lock_only=True, rank=1, world_size=2):
                met.wait()
                leave.wait(60)

        rank = in_thread(second)
        with one.hold("g", lock_only=True, rank=0, world_size=2) as lease:
            met.wait()
            with pytest.raises(UsageError, match="ready"):
                lease.yield_point(ready=lambda: True)
            rival = in_thread(lambda: other.acquire("g", lock_only=True).yield_())
            world.until_queued("b")
            holding: Any = lease.holding
            assert holding.join("a", lease._terms.gang, Entered(one, by=object()))  # as another thread would
            with pytest.raises(UsageError, match="nested hold"):
                lease.yield_point(min_slice=0)
            holding.inside.pop()
            lease.ensure_held()
            leave.set()
            got(rank)
        got(rival)
    wait_until(lambda: not world.holder(), "all have left")


def both_inside(world: World, **options: Any) -> tuple[Any, Any]:
    """The leases of the two ranks of job a."""
    urls = options.pop("urls", [world.url] * 2)
    asking = [
        in_thread(
            lambda rank=rank, url=url: Client(url, job="a").acquire(  # type: ignore[misc]
                "g", lock_only=True, rank=rank, world_size=2, **options
            )
        )
        for rank, url in enumerate(urls)
    ]
    first, second = map(got, asking)
    return first, second


def test_an_outage_at_a_point(proxy: Proxy, world: World) -> None:
    """A rank that can't ask waits for the answer while its lease stands; the answer is that of all."""
    one, two = both_inside(world, urls=[proxy.url, world.url])
    proxy.cut()
    point = in_thread(lambda: one.yield_point(min_slice=0))
    assert two.yield_point(min_slice=0) is False
    rival = in_thread(lambda: Client(job="b").acquire("g", lock_only=True).yield_())
    world.until_queued("b")
    assert not point.done()
    proxy.heal()
    assert got(point) is False
    for lease in (one, two):
        lease.yield_()
    got(rival)


def test_an_outage_at_a_point_that_outlasts_the_lease(
    proxy: Proxy, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then, and no later, the error is about the lease, and not about the server."""
    asking = scripts.gang_point
    monkeypatch.setattr(scripts, "gang_point", lambda *a, **o: replace(asking(*a, **o), deadline_s=1e6))
    one, two = both_inside(world, urls=[proxy.url, world.url], lease=3)
    proxy.cut()
    with pytest.raises(LeaseLostError, match="did not confirm it for 3 s"):
        got(in_thread(lambda: one.yield_point(min_slice=0)))
    assert one.lost.is_set()
    two.yield_()


def test_a_rank_that_can_not_come_back_ends_it_for_all(proxy: Proxy, world: World) -> None:
    """The others are told which one it was; there is nothing left of theirs to withdraw, and nothing is sent."""
    one, two = both_inside(world, urls=[world.url, proxy.url])
    rival = in_thread(lambda: Client(job="b").acquire("g", lock_only=True))
    world.until_queued("b")
    world.redis.script_load(load("cancel").source)
    proxy.lose_reply_to(load("cancel").sha)
    patient = in_thread(lambda: two.yield_point(min_slice=0))
    with pytest.raises(AcquireTimeoutError, match=r"within 2 s"):  # long enough for the other rank to come to its point
        one.yield_point(min_slice=0, timeout=2)
    with pytest.raises(GangEndedError, match="rank 0"):
        got(patient)
    assert proxy.armed
    assert (one.lost.is_set(), two.lost.is_set()) == (True, True)
    got(rival).yield_()
