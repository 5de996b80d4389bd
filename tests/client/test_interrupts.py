from __future__ import annotations

import asyncio
import signal

import pytest

import timeslice
from tests.client.world import World
from tests.support.jobs import wait_until

SYNC = """
    try:
        with timeslice.hold("g", lock_only=True):
            say("inside")
            time.sleep(60)
    except KeyboardInterrupt:
        say("interrupted")
"""
ASYNC = """
    async def main():
        async with timeslice.hold("g", lock_only=True):
            say("inside")
            await asyncio.sleep(60)
    try:
        asyncio.run(main())
    except KeyboardInterrupt:
        say("interrupted")
"""


@pytest.mark.parametrize("code", [SYNC, ASYNC], ids=["sync", "async"])
def test_ctrl_c_while_waiting_leaves_the_queue(world: World, code: str) -> None:
    """A real SIGINT ends the wait at once, withdraws the request, and KeyboardInterrupt goes on."""
    with timeslice.hold("g", job="b", lock_only=True):
        job = world.job(code)
        world.until_queued("a")
        job.signal(signal.SIGINT)
        assert job.line() == "interrupted"
        assert world.queue() == []


@pytest.mark.parametrize("code", [SYNC, ASYNC], ids=["sync", "async"])
def test_ctrl_c_inside_yields(world: World, code: str) -> None:
    """A real SIGINT in the body gives the group back, and KeyboardInterrupt goes on."""
    job = world.job(code)
    assert job.line() == "inside"
    job.signal(signal.SIGINT)
    assert job.line() == "interrupted"
    assert not world.holder()


async def until(world: World, *jobs: str) -> None:
    await asyncio.to_thread(world.until_queued, *jobs)


async def test_a_cancelled_waiter_leaves_the_queue(world: World) -> None:
    """L30: CancelledError passes through, after the request is withdrawn."""
    async with timeslice.hold("g", job="b", lock_only=True), timeslice.AsyncClient(job="a") as client:
        task = asyncio.create_task(client.acquire("g", lock_only=True))
        await until(world, "a")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert world.queue() == []


async def test_a_cancelled_holder_yields(world: World) -> None:
    """L30: a task that is cancelled inside gives the group back, and CancelledError passes through."""
    inside = asyncio.Event()

    async def work() -> None:
        async with timeslice.hold("g", job="a", lock_only=True):
            inside.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(work())
    await inside.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not world.holder()


async def test_a_grant_that_lands_during_the_cancellation_is_passed_on(world: World) -> None:
    """L30: the group goes to the next waiter if it was granted to one that is being cancelled."""
    async with timeslice.AsyncClient(job="h") as holder, timeslice.AsyncClient(job="a") as a:
        for _ in range(20):
            lease = await holder.acquire("g", lock_only=True)
            task = asyncio.create_task(a.acquire("g", lock_only=True))
            await until(world, "a")
            async with timeslice.AsyncClient(job="b") as b:
                other = asyncio.create_task(b.acquire("g", lock_only=True))
                await until(world, "a", "b")
                giving = asyncio.create_task(lease.yield_())
                await asyncio.sleep(0.0005)
                task.cancel()
                await asyncio.wait([task])
                if not task.cancelled():
                    await task.result().yield_()
                await giving
                await (await other).yield_()
        assert world.queue() == []
        assert not world.holder()


async def test_a_second_cancellation_does_not_lose_the_yield(world: World) -> None:
    """A task cancelled again while it yields ends at once; the yield arrives all the same."""
    inside = asyncio.Event()

    async def work() -> None:
        async with timeslice.hold("g", job="a", lock_only=True):
            inside.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(work())
    await inside.wait()
    task.cancel()
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.to_thread(wait_until, lambda: not world.holder(), "the group is free")


async def test_a_timeout_around_a_hold(world: World) -> None:
    """L30: `asyncio.timeout` around a hold ends the wait with TimeoutError and leaves the queue."""
    async with timeslice.AsyncClient(job="b") as other:
        lease = await other.acquire("g", lock_only=True)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3), timeslice.hold("g", job="a", lock_only=True):
                pytest.fail("entered")
        assert world.queue() == []
        await lease.yield_()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3), timeslice.hold("g", job="a", lock_only=True):
                await asyncio.Event().wait()
        assert not world.holder()


async def test_several_groups_are_given_back_when_the_wait_is_cancelled(world: World) -> None:
    """A cancelled hold of several groups keeps none of those it had taken."""
    async with timeslice.AsyncClient(job="b") as other:
        await other.acquire("samplers", lock_only=True)

        async def work() -> None:
            async with timeslice.hold("trainers", "samplers", job="a", lock_only=True):
                pytest.fail("entered")

        task = asyncio.create_task(work())
        await asyncio.to_thread(world.until_queued, "a", group="samplers")
        assert world.holder("trainers") == "a"
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert world.holder("trainers") == ""
        assert world.queue("samplers") == []


@pytest.mark.parametrize("where", ["Holding", "Entered", "put"])
def test_an_interrupt_just_after_the_grant_loses_no_lease(
    world: World, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """A KeyboardInterrupt between the grant and the body gives the group back."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(f"timeslice.client.hold.{where}", interrupt)
    with pytest.raises(KeyboardInterrupt):
        timeslice.hold("g", job="a", lock_only=True).__enter__()
    wait_until(lambda: not world.holder(), "the group is free")


def test_an_interrupt_just_before_the_yield_loses_no_lease(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A KeyboardInterrupt on the way out still ends with a yield."""
    hold = timeslice.hold("g", job="a", lock_only=True)
    lease = hold.__enter__()

    def interrupt(*_: object) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(type(lease), "begin_yield", interrupt)
    with pytest.raises(KeyboardInterrupt):
        hold.__exit__(None, None, None)
    wait_until(lambda: not world.holder(), "the group is free")


ABANDONED = """
    async def main():
        async with timeslice.hold("g", lock_only=True):
            say("inside")
            await asyncio.Event().wait()
    coroutine = main()
    loop = asyncio.new_event_loop()
    task = loop.create_task(coroutine)
    threading.Thread(target=lambda: (hear(), loop.call_soon_threadsafe(loop.stop))).start()
    loop.run_forever()
    try:
        coroutine.close()
    except RuntimeError:
        pass  # redis-py awaits while it is being closed
    say("closed")
    hear()
"""


def test_a_wait_that_is_thrown_away_with_its_event_loop_is_withdrawn(world: World) -> None:
    """A coroutine that nobody resumes any more leaves no waiter behind."""
    with timeslice.hold("g", job="b", lock_only=True):
        job = world.job(ABANDONED)
        world.until_queued("a")
        job.tell()
        assert job.line() == "closed"
        wait_until(lambda: world.queue() == [], "the request is withdrawn")


def test_a_body_that_is_thrown_away_with_its_event_loop_yields(world: World) -> None:
    """A hold whose coroutine nobody resumes any more is not renewed for ever."""
    job = world.job(ABANDONED)
    assert job.line() == "inside"
    job.tell()
    assert job.line() == "closed"
    wait_until(lambda: not world.holder(), "the group is free")


FORK = """
    with timeslice.hold("g", lock_only=True, lease=2) as lease:
        child = os.fork()
        if not child:
            try:
                lease.ensure_held()
            except timeslice.LeaseLostError:
                say("not mine")
        else:
            os.waitpid(child, 0)
            lease.ensure_held()
            say("still mine")
            hear()
    say("child out" if not child else "parent out")
    if not child:
        os._exit(0)
"""


def test_a_forked_child_owns_nothing(world: World) -> None:
    """A child that leaves the parent's `with` yields nothing; the parent holds on and yields."""
    job = world.job(FORK)
    assert [job.line(), job.line(), job.line()] == ["not mine", "child out", "still mine"]
    deadline = world.view().number("deadline_ms")
    wait_until(lambda: world.view().number("deadline_ms") > deadline, "the parent still renews")
    assert world.holder() == "a"
    job.tell()
    assert job.line() == "parent out"
    assert not world.holder()


def test_a_forked_child_waits_for_its_own_turn(world: World) -> None:
    """A child uses the client that it inherited, on connections of its own, and is a waiter like any other."""
    job = world.job("""
        client = timeslice.Client()
        lease = client.acquire("g", lock_only=True)
        child = os.fork()
        if not child:
            with client.hold("g", lock_only=True, lease=3) as own:
                say("child inside", own.fencing_token > lease.fencing_token)
                hear()
                own.ensure_held()
            say("child out")
            os._exit(0)
        say("waiting")
        while not client.status("g").queue:
            time.sleep(0.01)
        lease.yield_()
        os.waitpid(child, 0)
        with client.hold("g", lock_only=True):
            say("parent inside")
    """)
    assert [job.line(), job.line()] == ["waiting", "child inside True"]
    deadline = world.view().number("deadline_ms")
    wait_until(lambda: world.view().number("deadline_ms") > deadline, "the child renews")
    job.tell()
    assert [job.line(), job.line()] == ["child out", "parent inside"]


def test_waiters_of_parent_and_child_differ(world: World) -> None:
    """Two processes of one fork never make the same request id."""
    job = world.job("""
        from timeslice.client.identity import new_waiter_id
        child = os.fork()
        say(new_waiter_id())
        if not child:
            os._exit(0)
        os.waitpid(child, 0)
    """)
    assert job.line() != job.line()
