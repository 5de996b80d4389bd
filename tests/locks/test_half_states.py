"""Case L24: something else left half a state behind. It is repaired by the next call, and a new hold succeeds."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.locks.lab import Lab
from timeslice.locks import scripts
from timeslice.locks.scripts import Granted

HALF: dict[str, Callable[[Lab], object]] = {
    "a lock without owner": lambda lab: lab.plant(mode="lock", lease_id="x1"),
    "a lock without lease": lambda lab: lab.plant(mode="lock", lease_id="x1", job="x", token="5", confirmed="1"),
    "an owner without lock": lambda lab: lab.plant(mode="lock", job="x", host="n9", deadline_ms="99999999999999"),
    "a lease that is no number": lambda lab: lab.plant(mode="lock", lease_id="x1", deadline_ms="soon", lease_ms=""),
    "numbers that are none": lambda lab: lab.plant(mode="lock", counter="many", clock_ms="noon", token="nan?"),
    "a phase that nobody is in": lambda lab: lab.plant(mode="lock", phase="held", reason="x"),
    "a queue entry without record": lambda lab: lab.redis.zadd(lab.group.queue, {"x1": 5, "x2": 6}),
    "many queue entries without record": lambda lab: lab.redis.zadd(lab.group.queue, {f"x{n}": n for n in range(50)}),
    "a record without queue entry": lambda lab: lab.redis.hset(lab.group.waiters, mapping={"x1/job": "x"}),
    "a sign of life alone": lambda lab: lab.redis.zadd(lab.group.alive, {"x1": 99_999_999_999_999}),
    "a grant in a stream alone": lambda lab: lab.redis.xadd(lab.group.grant("b1"), {"kind": "grant", "token": "9"}),
}


@pytest.mark.parametrize("half", HALF)
def test_a_new_hold_succeeds_over_half_a_state(lab: Lab, half: str) -> None:
    """The first to ask gets the group, with a token that is above all seen."""
    HALF[half](lab)
    reply = lab.ask("b1")
    assert isinstance(reply, Granted), reply
    assert reply.token > 10**12
    assert lab.view.phase == "held"
    assert lab.waiting == []


def test_a_half_record_is_no_waiter(lab: Lab) -> None:
    """An entry whose record lost its lease time is granted with the usual one, and expires like any other."""
    lab.redis.zadd(lab.group.queue, {"x1": 5})
    lab.redis.hset(lab.group.waiters, mapping={"x1/job": "x"})
    lab.redis.zadd(lab.group.alive, {"x1": lab.view.now_ms + 5_000})
    lab.queue("b1")
    assert lab.holder == "x1"
    assert lab.number("lease_ms") == 30_000
    lab.pass_time(6)
    assert isinstance(lab.ask("b1"), Granted)


def test_a_swap_without_plan_or_waiter_can_be_settled(lab: Lab) -> None:
    """A coordinator that finds one closes it, and the group goes on."""
    lab.join("n1")
    lab.plant(swap_id="5", phase="swapping")
    lab.queue("b1", served=True)
    epoch = lab.own()
    assert lab.run(scripts.settle(lab.group, 5, epoch, "half a swap", 1000)) is None
    assert lab.holder == "b1"


def test_an_owner_without_deadline_is_followed_at_once(lab: Lab) -> None:
    """The group is not left to somebody who never renews."""
    lab.join("n1")
    lab.plant(owner="c9")
    assert lab.own("c1") > 0


def test_a_job_without_members_is_put_out_by_the_next_swap(lab: Lab) -> None:
    """Somebody wrote that it is resident; no node knows it. The swap proves it and forgets it."""
    lab.join("n1")
    lab.redis.hset(lab.group.jobs, "x/residency", "resident")
    lab.queue("b1", served=True)
    closed = lab.carry_out(lab.own(), "n1", seen=[scripts.Observed("x", "absent")], how="first load")
    assert closed.lease_id == "b1"
    assert list(lab.view.jobs) == ["b"]
