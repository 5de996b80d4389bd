"""Kinds of trouble that come back under many names: crossing messages, mass deaths, odd names."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

import pytest

from tests.client.faces import Face, in_thread
from tests.client.world import World
from tests.support.jobs import DEADLINE_S, wait_until
from timeslice import AcquireTimeoutError, Client, InvalidNameError
from timeslice.locks import scripts

ROUNDS = 25
LIMIT_S = 0.02


def got(future: Future[Any]) -> Any:
    return future.result(DEADLINE_S)


def _until_queued_or_out(world: World, waiting: Future[Any]) -> None:
    wait_until(lambda: waiting.done() or world.queue() == ["b"], "b waits, or has given up already")


def test_a_timeout_that_meets_its_grant(face: Face, world: World) -> None:
    """The holder yields just when the waiter gives up: either the waiter is in, or it has its error and the group is
    free for the next; never is the group held by one that has left."""
    holder, waiter = face.client(job="a"), face.client(job="b")
    outcomes = set()
    for number in range(ROUNDS):
        lease = got(face.acquire(holder, "g", lock_only=True))
        waiting = face.acquire(waiter, "g", lock_only=True, timeout=LIMIT_S)
        _until_queued_or_out(world, waiting)
        threading.Event().wait(LIMIT_S * (0.5 + number / ROUNDS))
        face.give_up(lease)
        try:
            face.give_up(got(waiting))
            outcomes.add("in")
        except AcquireTimeoutError:
            outcomes.add("out")
        assert (world.holder(), world.queue()) == ("", [])
    assert outcomes  # how many of each is the machine's business


def test_a_second_yield_and_a_late_one_touch_nobody(face: Face, world: World) -> None:
    """The next job is inside: whoever yields again, or is told late that its yield arrived, changes nothing."""
    first = got(face.acquire(face.client(job="a"), "g", lock_only=True))
    late = first.yield_call()
    assert face.give_up(first) is not None
    second = got(face.acquire(face.client(job="b"), "g", lock_only=True))
    assert face.give_up(first) is None
    for _ in range(2):
        assert isinstance(world.run(late), scripts.Yielded)
    assert world.holder() == "b"
    second.ensure_held()


def test_two_hundred_waiters_die_at_once(world: World) -> None:
    """A process with 200 waiting threads is killed: who queued behind them is in within one term of a waiter in all,
    not one for each of the dead."""
    holder, waiter = Client(job="a"), Client(job="b")
    lease = holder.acquire("g", lock_only=True)
    crowd = world.job(
        """
        client = timeslice.Client()
        for _ in range(200):
            threading.Thread(target=client.acquire, args=("g",), kwargs={"lock_only": True}, daemon=True).start()
        say("started")
        hear()
        """,
        job="crowd",
        ttl_ms=3000,
    )
    assert crowd.line() == "started"
    wait_until(lambda: len(world.queue()) == 200, "all of them wait")
    waiting = in_thread(lambda: waiter.acquire("g", lock_only=True))
    wait_until(lambda: world.queue()[-1:] == ["b"], "and b behind them")
    crowd.end()
    lease.yield_()
    got(waiting).ensure_held()
    wait_until(lambda: world.queue() == [], "none of the dead is left")
    holder.close()
    waiter.close()


NAMES = ["0", "a.b-c_D", "x" * 63, "A..b", "None", "a-", "", " a", "a b", "{a}", "ü", "a/b", "a\n", "*", "x" * 64, "@"]


@pytest.mark.parametrize("name", NAMES, ids=repr)
def test_odd_names(face: Face, world: World, name: str) -> None:
    """What the rule allows works as group, job and phase; anything else is refused before a byte is sent."""
    if name in NAMES[:5]:
        client = face.client(job=name)
        held = got(face.hold(client, name, body=lambda lease: world.holder(lease.group), lock_only=True, phase=name))
        assert held == name
        return
    client = face.client(job="a")
    for group, job in ((name, "a"), ("g", name)):
        with pytest.raises(InvalidNameError):
            got(face.hold(client, group, body=lambda _: None, job=job, lock_only=True))
    assert world.redis.keys(f"{world.keys.prefix}:*") == []


def test_a_wait_whose_connection_is_cut_again_and_again(face: Face, world: World, observer: Any) -> None:
    """Each blocking read of the waiter is killed by the server; the grant arrives all the same, once."""
    lease = got(face.acquire(face.client(job="a"), "g", lock_only=True))
    waiting = face.acquire(face.client(job="b"), "g", lock_only=True)
    world.until_queued("b")

    def blocked() -> list[str]:
        return [each["id"] for each in observer.client_list() if each["cmd"] == "xread" and "b" in each["flags"]]

    for _ in range(3):
        wait_until(lambda: bool(blocked()), "it reads")
        for client in blocked():
            observer.client_kill_filter(_id=client)
    face.give_up(lease)
    got(waiting).ensure_held()
    assert world.event_types().count("LeaseGranted") == 2
