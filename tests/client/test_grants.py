"""How a grant that comes to a waiter turns into a running body, and what becomes of one that does not."""

from __future__ import annotations

import signal
from concurrent.futures import Future
from typing import Any

import pytest

from tests.client.faces import Face
from tests.client.world import World
from tests.support.jobs import DEADLINE_S, wait_until

WAITER = """
    with timeslice.hold("g", lock_only=True) as lease:
        say("inside", lease.fencing_token)
        hear()
    say("out")
"""


def got(future: Future[Any]) -> Any:
    return future.result(DEADLINE_S)


def test_a_grant_is_confirmed_before_the_body_runs(face: Face, world: World) -> None:
    """A waiter whose grant came by the stream has renewed it when its body starts, so it has its full lease."""
    holder = got(face.acquire(face.client(job="a"), "g", lock_only=True))
    waiting = face.hold(face.client(job="b"), "g", lock_only=True, body=lambda _: world.view().state)
    world.until_queued("b")
    face.give_up(holder)
    inside = got(waiting)
    assert (inside["job"], inside["confirmed"]) == ("b", "1")
    assert int(inside["deadline_ms"]) - int(inside["renewed_at_ms"]) == int(inside["lease_ms"])


def test_an_unconfirmed_grant_expires_without_a_reclaim(face: Face, world: World) -> None:
    """A waiter that stands still when its turn comes loses it, without its device state being suspected."""
    holder = got(face.acquire(face.client(job="a"), "g", lock_only=True))
    sleeper = world.job(WAITER, job="s", ttl_ms=1500)
    world.until_queued("s")
    sleeper.signal(signal.SIGSTOP)
    next_one = face.acquire(face.client(job="b"), "g", lock_only=True)
    world.until_queued("s", "b")
    face.give_up(holder)
    assert world.holder() == "s"
    assert got(next_one).job == "b"
    assert "GrantExpired" in world.event_types()
    assert "LeaseReclaimed" not in world.event_types()


def test_a_refused_confirmation_goes_back_to_its_old_place(face: Face, world: World) -> None:
    """A waiter that comes too late for its grant does not run; it waits again, ahead of those who came after it."""
    holder = got(face.acquire(face.client(job="a"), "g", lock_only=True))
    sleeper = world.job(WAITER, job="s", ttl_ms=1500)
    world.until_queued("s")
    sleeper.signal(signal.SIGSTOP)
    b = face.acquire(face.client(job="b"), "g", lock_only=True)
    world.until_queued("s", "b")
    c = face.acquire(face.client(job="c"), "g", lock_only=True)
    world.until_queued("s", "b", "c")
    face.give_up(holder)
    lease = got(b)
    sleeper.signal(signal.SIGCONT)
    world.until_queued("s", "c")
    face.give_up(lease)
    said, token = sleeper.line().split()
    assert (said, int(token)) == ("inside", world.view().number("token"))
    assert not c.done()
    sleeper.tell()
    assert got(c).fencing_token > int(token)


def test_a_waiter_reaped_though_alive_keeps_its_place(
    face: Face, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A waiter that was away too long re-enters where it was, not at the end."""
    monkeypatch.setattr("timeslice.client.core.WAITER_TTL_MS", 1500)
    got(face.acquire(face.client(job="a"), "g", lock_only=True))
    sleeper = world.job(WAITER, job="s", ttl_ms=1500)
    world.until_queued("s")
    score = world.redis.zrange(world.group().queue, 0, -1, withscores=True)[0][1]
    sleeper.signal(signal.SIGSTOP)
    face.acquire(face.client(job="b"), "g", lock_only=True)
    world.until_queued("b")
    assert "WaiterReaped" in world.event_types()
    sleeper.signal(signal.SIGCONT)
    world.until_queued("s", "b")
    assert world.redis.zrange(world.group().queue, 0, -1, withscores=True)[0][1] == score


def test_a_dead_waiter_holds_up_nobody_for_longer_than_its_term(face: Face, world: World) -> None:
    """Waiters that were killed are passed over together."""
    holder = got(face.acquire(face.client(job="a"), "g", lock_only=True))
    dead = [world.job(WAITER, job=f"d{number}", ttl_ms=1500) for number in range(3)]
    wait_until(lambda: len(world.queue()) == 3, "three wait")
    for job in dead:
        job.signal(signal.SIGKILL)
    living = face.acquire(face.client(job="b"), "g", lock_only=True)
    wait_until(lambda: "b" in world.queue(), "b waits")
    face.give_up(holder)
    assert got(living).job == "b"
    assert len([event for event in world.events() if event["type"] == "GrantExpired"]) <= 1
