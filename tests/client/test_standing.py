"""No body begins without all its leases: one that was lost while the next group was waited for is had anew first."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

import pytest

import timeslice
from tests.client.faces import Face, in_thread
from tests.client.world import World
from tests.support.jobs import DEADLINE_S, wait_until
from timeslice.errors import AcquireTimeoutError, LeaseLostError
from timeslice.locks import scripts


def got(future: Future[Any]) -> Any:
    return future.result(DEADLINE_S)


def take_away(world: World, group: str, rival: Any, face: Face) -> Any:
    """End the lease of the group's holder behind its back. Returns that of a rival, who has the group now."""
    lease = world.view(group).state["lease_id"]
    waiting = face.acquire(rival, group, lock_only=True)
    wait_until(lambda: bool(world.queue(group)), "the rival waits")
    world.run(scripts.yield_(world.group(group), lease, None))
    return got(waiting)


def test_a_lease_that_was_lost_in_the_wait_for_the_next_group_is_had_anew(face: Face, world: World) -> None:
    """The groups that were had are given back, and asked for again in order; then the body runs, with both leases."""
    lost: list[Any] = []
    blocker = got(face.acquire(face.client(job="b"), "samplers", lock_only=True))
    waiting = face.hold(
        face.client(job="a"),
        "trainers",
        "samplers",
        lock_only=True,
        on_lost=lost.append,
        body=lambda leases: [lease.state for lease in leases] + [world.holder("trainers"), world.holder("samplers")],
    )
    world.until_queued("a", group="samplers")
    rival = take_away(world, "trainers", face.client(job="c"), face)
    face.give_up(blocker)
    world.until_queued("a", group="trainers")
    assert world.holder("samplers") == ""
    assert not waiting.done()
    face.give_up(rival)
    assert got(waiting) == ["held", "held", "a", "a"]
    assert lost == []  # nothing of it was the body's


def test_the_wait_limit_counts_over_all_attempts(face: Face, world: World) -> None:
    """A hold that has to begin anew does not get its timeout anew."""
    blocker = got(face.acquire(face.client(job="b"), "samplers", lock_only=True))
    body: list[Any] = []
    waiting = face.hold(
        face.client(job="a"), "trainers", "samplers", lock_only=True, timeout=3, body=lambda _: body.append(1)
    )
    world.until_queued("a", group="samplers")
    take_away(world, "trainers", face.client(job="c"), face)
    face.give_up(blocker)
    with pytest.raises(AcquireTimeoutError, match="trainers: job a was not granted within 3 s"):
        got(waiting)
    assert not body
    assert (world.holder("trainers"), world.holder("samplers")) == ("c", "")


def test_an_inner_hold_does_not_begin_when_the_outer_lease_was_lost_in_its_wait(face: Face, world: World) -> None:
    """The inner body is the outer's, too: what it waited for is given back, and the error names the outer group."""
    blocker = got(face.acquire(face.client(job="b"), "samplers", lock_only=True))
    body: list[Any] = []
    waiting = face.nested(face.client(job="a"), "trainers", "samplers", body=body.append)
    world.until_queued("a", group="samplers")
    take_away(world, "trainers", face.client(job="c"), face)
    face.give_up(blocker)
    with pytest.raises(LeaseLostError, match="group trainers: the lease of job a"):
        got(waiting)
    assert not body
    assert (world.holder("trainers"), world.holder("samplers")) == ("c", "")


@pytest.mark.parametrize("groups", [("samplers", "trainers"), ("samplers",)])
def test_a_hold_that_joins_a_lease_which_is_lost_in_its_wait_does_not_begin(
    world: World, groups: tuple[str, ...]
) -> None:
    """Also where the inner hold names the outer's group itself; and nothing but the outer's exit is left to do."""
    with timeslice.Client(job="b") as other, timeslice.Client(job="c") as rival:
        blocker = other.acquire("samplers", lock_only=True)

        def work() -> None:
            with timeslice.hold("trainers", job="a", lock_only=True):
                with pytest.raises(LeaseLostError, match="group trainers"):
                    timeslice.hold(*groups, job="a", lock_only=True).__enter__()
                assert world.holder("samplers") == ""

        working = in_thread(work)
        world.until_queued("a", group="samplers")
        lease = world.view("trainers").state["lease_id"]
        world.run(scripts.yield_(world.group("trainers"), lease, None))
        rival.acquire("trainers", lock_only=True)
        blocker.yield_()
        got(working)
        assert world.holder("trainers") == "c"


def test_a_decorated_function_does_not_run_without_all_its_leases(world: World) -> None:
    """As of `with`."""
    inside = threading.Event()

    @timeslice.hold("trainers", "samplers", job="a", lock_only=True)
    def work() -> list[str]:
        inside.set()
        return [world.holder("trainers"), world.holder("samplers")]

    with timeslice.Client(job="b") as other, timeslice.Client(job="c") as rival:
        blocker = other.acquire("samplers", lock_only=True)
        working = in_thread(work)
        world.until_queued("a", group="samplers")
        world.run(scripts.yield_(world.group("trainers"), world.view("trainers").state["lease_id"], None))
        taken = rival.acquire("trainers", lock_only=True)
        blocker.yield_()
        world.until_queued("a", group="trainers")
        assert not inside.is_set()
        taken.yield_()
        assert got(working) == ["a", "a"]


def test_a_yield_point_does_not_go_on_when_another_group_of_its_hold_was_lost_meanwhile(world: World) -> None:
    """The point takes its own group again and says which one is over; the hold's end gives up the rest."""
    with timeslice.Client(job="b") as other, timeslice.Client(job="c") as rival:

        def work() -> None:
            with timeslice.hold("trainers", "samplers", job="a", lock_only=True) as (_, samplers):
                inside.set()
                assert go.wait(DEADLINE_S)
                samplers.yield_point(min_slice=0)

        inside, go = threading.Event(), threading.Event()
        working = in_thread(work)
        assert inside.wait(DEADLINE_S)
        guest = in_thread(lambda: other.acquire("samplers", lock_only=True))
        world.until_queued("b", group="samplers")
        go.set()
        blocker = got(guest)
        world.until_queued("a", group="samplers")
        world.run(scripts.yield_(world.group("trainers"), world.view("trainers").state["lease_id"], None))
        rival.acquire("trainers", lock_only=True)
        blocker.yield_()
        with pytest.raises(LeaseLostError, match="group trainers: the lease of job a"):
            got(working)
        assert (world.holder("trainers"), world.holder("samplers")) == ("c", "")


def test_a_hold_inside_another_that_is_granted_at_once_asks_nothing_more(world: World) -> None:
    """Looking at the outer lease costs a question only after a wait: alone, a hold stays one call in and one out."""
    with timeslice.hold("trainers", job="a", lock_only=True) as outer:
        told = outer.told_at
        with timeslice.hold("samplers", job="a", lock_only=True):
            pass
        assert outer.told_at == told


def test_a_gang_that_lost_its_first_group_in_the_wait_for_the_next_has_it_anew(world: World) -> None:
    """All ranks give back what they had and ask again; none is inside before all are, with both leases."""
    inside: list[int] = []

    def rank(number: int) -> list[str]:
        hold = timeslice.hold("trainers", "samplers", job="a", lock_only=True, rank=number, world_size=2)
        with hold as leases:
            inside.append(number)
            return [lease.state for lease in leases]

    with timeslice.Client(job="b") as other, timeslice.Client(job="c") as rival:
        blocker = other.acquire("samplers", lock_only=True)
        ranks = [in_thread(lambda number=number: rank(number)) for number in range(2)]  # type: ignore[misc]
        world.until_queued("a", group="samplers")
        world.run(scripts.revoke(world.group("trainers"), *_holder(world, "trainers"), "ops", "drill", at_once=True))
        taken = rival.acquire("trainers", lock_only=True)
        blocker.yield_()
        world.until_queued("a", group="trainers")
        assert inside == []
        taken.yield_()
        assert [got(each) for each in ranks] == [["held", "held"]] * 2


def _holder(world: World, group: str) -> tuple[str, str, int]:
    state = world.view(group).state
    return state["job"], state["lease_id"], int(state["token"])
