"""One hold object, entered by several threads, tasks and contexts: each exit ends its own entry."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from concurrent.futures import Future
from typing import Any

import pytest

import timeslice
from tests.client.faces import in_thread
from tests.client.world import World
from tests.support.jobs import DEADLINE_S
from timeslice.errors import UsageError
from timeslice.locks import scripts


def got(future: Future[Any]) -> Any:
    return future.result(DEADLINE_S)


def end_turn(world: World) -> None:
    """An operator ends the lease of the group's holder, who does not hear of it yet."""
    world.run(scripts.yield_(world.group(), world.view().state["lease_id"], None))


def test_who_entered_in_another_context_ends_no_turn_but_its_own(world: World) -> None:
    """A callback enters in a context of its own, another thread has the next turn, and the first one leaves outside of
    that context."""
    hold = timeslice.hold("g", job="a", lock_only=True)
    entered, over = threading.Event(), threading.Event()

    def callbacks() -> None:
        contextvars.Context().run(hold.__enter__)
        entered.set()
        assert over.wait(DEADLINE_S)
        hold.__exit__(None, None, None)

    first = in_thread(callbacks)
    assert entered.wait(DEADLINE_S)
    end_turn(world)
    with hold as lease:
        over.set()
        got(first)
        lease.ensure_held()
        assert world.view().number("token") == lease.fencing_token
    assert not world.holder()


def test_who_can_not_be_told_apart_ends_what_is_over(world: World) -> None:
    """Entered on one thread and left on another, while somebody else has a turn through the same object."""
    hold = timeslice.hold("g", job="a", lock_only=True, lease=1)
    first: Any = got(in_thread(hold.__enter__))
    end_turn(world)
    assert first.lost.wait(DEADLINE_S)
    second: Any = got(in_thread(hold.__enter__))
    got(in_thread(lambda: hold.__exit__(None, None, None)))
    second.ensure_held()
    got(in_thread(lambda: hold.__exit__(None, None, None)))
    assert second.state == "yielded"
    assert not world.holder()


def test_a_thread_with_a_copied_context_leaves_its_own_part(world: World) -> None:
    """It shares the lease of the code that it was copied from; whichever leaves first, the other is still inside."""
    hold = timeslice.hold("g", job="a", lock_only=True)
    inside, over = threading.Event(), threading.Event()

    def child() -> str:
        with hold as lease:
            inside.set()
            assert over.wait(DEADLINE_S)
            lease.ensure_held()
            return world.holder()

    with hold as lease:
        context = contextvars.copy_context()
        working = in_thread(lambda: context.run(child))
        assert inside.wait(DEADLINE_S)
    assert lease.state == "held"
    over.set()
    assert got(working) == "a"
    assert not world.holder()


async def test_tasks_that_share_a_hold_object_leave_their_own_turn(world: World) -> None:
    """A task whose lease is over leaves late, while another task is inside by its own grant."""
    hold = timeslice.hold("g", job="a", lock_only=True)
    entered, over = asyncio.Event(), asyncio.Event()

    async def loser() -> None:
        await hold.__aenter__()
        entered.set()
        await over.wait()
        await asyncio.create_task(hold.__aexit__(None, None, None), context=contextvars.Context())

    leaving = asyncio.create_task(loser(), context=contextvars.Context())
    await entered.wait()
    end_turn(world)
    async with hold as lease:
        over.set()
        await leaving
        lease.ensure_held()
        assert world.view().number("token") == lease.fencing_token


async def test_a_thread_may_be_the_last_one_out_of_what_a_task_took(world: World) -> None:
    """asyncio.to_thread inherits the hold; if the task has left before it, the thread gives the group up."""
    inside, over = threading.Event(), threading.Event()

    def worker() -> None:
        with timeslice.hold("g", job="a", lock_only=True):
            inside.set()
            assert over.wait(DEADLINE_S)

    async with timeslice.hold("g", job="a", lock_only=True) as lease:
        working = asyncio.create_task(asyncio.to_thread(worker))
        await asyncio.to_thread(inside.wait, DEADLINE_S)
    assert world.holder() == "a"
    over.set()
    await working
    assert lease.state == "yielded"
    assert not world.holder()


def test_leaving_more_often_than_entering_is_an_error(world: World) -> None:
    """It is told, whatever else the object is used for."""
    hold = timeslice.hold("g", job="a", lock_only=True)
    with hold:
        pass
    with pytest.raises(UsageError, match="left more often"):
        hold.leave(done=True)
