"""`lease.yield_point()`: gives way in the middle of a body, and goes on with the same lease."""

from __future__ import annotations

import time
from typing import Any

import pytest
import redis

from tests.client.faces import Face
from tests.client.world import World
from tests.conftest import ServerFactory
from tests.points.faces import at_point, got
from tests.support.jobs import wait_until
from timeslice import Client, LeaseLostError, LeaseUncertainError, UsageError
from timeslice.locks import scripts

TRAIN = """
    with timeslice.hold("g", lock_only=True) as lease:
        say("in", lease.fencing_token)
        while hear():
            say(lease.yield_point(min_slice=0), lease.fencing_token)
"""


def test_a_waiter_gets_its_turn_and_the_same_lease_goes_on(face: Face, world: World) -> None:
    """The point returns True once the rival has had its turn. All of the lease is new but the object itself."""
    client, other = face.client(job="a"), face.client(job="b")
    lease = got(face.acquire(client, "g", lock_only=True, phase="train", priority=3))
    first = (lease.lease_id, lease.fencing_token, lease.grant)
    rival = face.acquire(other, "g", lock_only=True)
    world.until_queued("b")
    point = at_point(face, lease, min_slice=0)
    between = got(rival)
    world.until_queued("a")
    with pytest.raises(LeaseUncertainError, match="yield point"):
        lease.ensure_held()
    assert between.fencing_token > first[1]
    assert not point.done()
    face.give_up(between)
    assert got(point) is True
    lease.ensure_held()
    assert (lease.state, lease.lost.is_set()) == ("held", False)
    assert lease.fencing_token > between.fencing_token
    assert first[0] != lease.lease_id == world.view().state["lease_id"]
    assert first[2] is not lease.grant
    assert world.view().state["label"] == "train"
    assert [event["priority"] for event in world.events() if event["type"] == "WaiterQueued"][-1] == "3"
    assert face.give_up(lease) is not None
    assert world.holder() == ""


def test_two_processes_take_turns_at_their_points(world: World) -> None:
    """Each comes back behind who waited before it: a, b, a, b, with rising tokens."""
    inside = world.job(TRAIN, job="a")
    assert inside.line().startswith("in")
    waiting = world.job(TRAIN, job="b")
    wait_until(lambda: world.queue() == ["b"], "b waits")
    for turn in range(3):
        inside.tell()
        came = waiting.line()
        assert came.startswith("True" if turn else "in")
        wait_until(lambda: len(world.queue()) == 1, "the other one waits again")
        inside, waiting = waiting, inside
    granted = [event for event in world.events() if event["type"] == "LeaseGranted"]
    assert [event["job"] for event in granted] == ["a", "b", "a", "b"]
    tokens = [int(event["token"]) for event in granted]
    assert tokens == sorted(tokens)


def test_it_goes_behind_who_waits_already(face: Face, world: World) -> None:
    """First come, first served: with two waiting, both have had their turn before the point returns."""
    a, b, c = (face.client(job=job) for job in "abc")
    lease = got(face.acquire(a, "g", lock_only=True))
    second = face.acquire(b, "g", lock_only=True)
    world.until_queued("b")
    third = face.acquire(c, "g", lock_only=True)
    world.until_queued("b", "c")
    point = at_point(face, lease, min_slice=0)
    face.give_up(got(second))
    last = got(third)
    assert not point.done()
    face.give_up(last)
    assert got(point) is True


def test_its_device_state_really_moves(face: Face, world: World) -> None:
    """In a served group the point waits for two swaps: its own state out, and back in."""
    world.serve("g")
    lease = got(face.acquire(face.client(job="a"), "g"))
    rival = face.acquire(face.client(job="b"), "g")
    world.until_queued("b")
    point = at_point(face, lease, min_slice=0)
    world.swap("a", "first load")
    between = got(rival)
    world.until_queued("a")
    face.give_up(between)
    world.swap("b", "restored")
    assert got(point) is True
    assert (lease.grant.how, world.holder()) == ("restored", "a")


def test_while_nobody_waits_next_to_nothing_is_sent(face: Face, world: World, server_factory: ServerFactory) -> None:
    """Two thousand points, past the slice: the server is asked once a second, and all of them return False."""
    server = server_factory()
    client: Any = redis.Redis.from_url(server.url)

    def calls() -> int:
        found = client.info("commandstats")
        return sum(found.get(f"cmdstat_{name}", {"calls": 0})["calls"] for name in ("evalsha", "eval"))

    # However long it takes, no renewal is due in it.
    lease = got(face.acquire(face.client(url=server.url, job="a"), "g", lock_only=True, lease=3600))
    before, began = calls(), time.monotonic()
    many = 2000
    assert not any(got(at_point(face, lease, min_slice=0)) for _ in range(many))
    seconds = time.monotonic() - began
    assert calls() - before <= seconds + 2
    before = calls()
    assert not any(got(at_point(face, lease, min_slice=1000)) for _ in range(many))
    assert calls() == before
    face.give_up(lease)
    client.close()


def test_a_short_slice_is_kept_whoever_waits(face: Face, world: World) -> None:
    """Before `min_slice` nothing is yielded; the default is five seconds."""
    lease = got(face.acquire(face.client(job="a"), "g", lock_only=True))
    face.acquire(face.client(job="b"), "g", lock_only=True)
    world.until_queued("b")
    token = lease.fencing_token
    assert got(at_point(face, lease)) is False
    assert got(at_point(face, lease, min_slice=1000)) is False
    assert (lease.fencing_token, world.queue()) == (token, ["b"])


def test_a_waiter_that_comes_later_is_noticed(face: Face, world: World) -> None:
    """A point that found nobody looks again a second later."""
    lease = got(face.acquire(face.client(job="a"), "g", lock_only=True))
    assert got(at_point(face, lease, min_slice=0)) is False
    rival = face.acquire(face.client(job="b"), "g", lock_only=True)
    world.until_queued("b")
    points = []

    def gives_way() -> bool:
        points.append(at_point(face, lease, min_slice=0))
        wait_until(lambda: points[-1].done() or bool(world.queue() == ["a"]), "it returned or waits")
        return not points[-1].done()

    wait_until(gives_way, "it gives way")
    face.give_up(got(rival))
    assert got(points[-1]) is True


def test_a_renewal_under_way_does_no_harm(face: Face, world: World) -> None:
    """An answer about the lease as it was before the point changes nothing of what it is now."""
    lease = got(face.acquire(face.client(job="a"), "g", lock_only=True))
    before = lease.lease_id
    rival = face.hold(face.client(job="b"), "g", lock_only=True, body=lambda _: None)
    world.until_queued("b")
    assert got(at_point(face, lease, min_slice=0)) is True
    got(rival)
    stood = lease.expires_at
    lease.note_renewal(scripts.Lost("b", 7, 7), time.monotonic(), before)
    lease.note_renewal(scripts.Renewed(7, 0), time.monotonic() + 50, before)
    lease.end_yield(scripts.NotHolder("b", 7), before)
    assert (lease.state, lease.expires_at) == ("held", stood)


def test_it_is_renewed_after_the_point(face: Face, world: World) -> None:
    """The renewal thread follows the lease to its new id."""
    lease = got(face.acquire(face.client(job="a"), "g", lock_only=True, lease=2))
    rival = face.hold(face.client(job="b"), "g", lock_only=True, body=lambda _: None)
    world.until_queued("b")
    assert got(at_point(face, lease, min_slice=0)) is True
    got(rival)
    stood = lease.expires_at
    wait_until(lambda: lease.expires_at > stood + 1.2, "it was renewed twice")
    lease.ensure_held()


def test_a_lease_that_was_lost_raises(face: Face, world: World) -> None:
    """As `ensure_held` does, and so does one that was yielded; nothing is asked for again."""
    lease = got(face.acquire(face.client(job="a"), "g", lock_only=True))
    world.run(scripts.yield_(world.group(), lease.lease_id, None, by="ops"))
    lease.renew_at = 0.0
    got(face.acquire(face.client(job="b"), "g", lock_only=True))
    face.acquire(face.client(job="c"), "g", lock_only=True)
    world.until_queued("c")
    with pytest.raises(LeaseLostError):
        got(at_point(face, lease, min_slice=0))
    with pytest.raises(LeaseLostError):
        got(at_point(face, lease, min_slice=0))
    assert world.queue() == ["c"]


def test_bad_values_are_refused(world: World) -> None:
    """Before anything is asked, with what to give instead."""
    with Client(job="a") as client, client.hold("g", lock_only=True) as lease:
        for bad in (
            {"min_slice": -1},
            {"min_slice": None},
            {"timeout": float("nan")},
            {"min_slice": True},
            {"ready": 1},
        ):
            with pytest.raises(UsageError, match=next(iter(bad))):
                lease.yield_point(**bad)


def test_disabled_it_does_nothing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """With TIMESLICE_DISABLE=1 it returns False; with `ready`, once that is true."""
    monkeypatch.setenv("TIMESLICE_DISABLE", "1")
    answers = iter([False, True])
    with Client(job="a") as client, client.hold("g", lock_only=True) as lease:
        assert lease.yield_point(min_slice=0) is False
        assert lease.yield_point(ready=lambda: next(answers)) is False
    assert next(answers, "asked twice") == "asked twice"
