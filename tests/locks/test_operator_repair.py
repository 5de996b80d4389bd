"""repair: what needs no guess is put right; L24."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.locks.lab import Lab
from timeslice.locks import scripts
from timeslice.locks.scripts import Observed


def repair(lab: Lab, *, dry: bool = False) -> tuple[str, ...]:
    """What was done. Sent once here: a repeat has nothing left to do."""
    call = scripts.repair(lab.group, "eve@desk", "stuck", dry=dry)
    return call.parse(lab.send(call))


def served(lab: Lab) -> None:
    lab.join("n1")
    lab.own()


def overdue_swap(lab: Lab) -> None:
    lab.release("a1", lab.grant("a1", served=True))
    lab.queue("b1", served=True)
    lab.pass_time(11)
    lab.beat("n1")


def proved(lab: Lab) -> None:
    lab.report("n1", Observed("a", "suspended", 5))
    lab.plant(evict="a", evict_how="must", force="1", evict_until_ms=lab.view.now_ms + 30_000, evict_tried_ms=1)


def put_off(lab: Lab) -> None:
    lab.release("a1", lab.grant("a1", served=True))
    lab.queue("b1", served=True)
    lab.refuse(lab.own(), "n1")


HALF: dict[str, tuple[Callable[[Lab], object], str]] = {
    "a queue entry without record": (
        lambda lab: lab.redis.zadd(lab.group.queue, {"x1": 5}),
        "dropped queue entry x1, which has no record",
    ),
    "a record without entry": (
        lambda lab: lab.redis.hset(lab.group.waiters, mapping={"x1/job": "x", "x1/pid": "7"}),
        "dropped the record of x1, which does not wait",
    ),
    "what is noted of a node that left": (
        lambda lab: lab.redis.hset(lab.group.members, mapping={"n9/@/swap": "5", "n9/a/bytes": "5"}),
        "dropped what was noted of node n9, which left",
    ),
    "a job that no node knows": (
        lambda lab: lab.redis.hset(lab.group.jobs, "x/residency", "faulted"),
        "forgot job x: no node has anything of it",
    ),
    "a swap that nobody began": (overdue_swap, "which no node had begun"),
    "an order that is carried out": (proved, "job a is off the device on every node"),
    "a waiter that is put off": (put_off, "waiter b1 is tried again now"),
}


@pytest.mark.parametrize("half", HALF)
def test_what_needs_no_guess_is_put_right_once(lab: Lab, half: str) -> None:
    """A dry run says the same and changes nothing; the second repair has nothing to do; the event tells who."""
    plant, told = HALF[half]
    served(lab)
    plant(lab)
    before = lab.redis.dump(lab.group.state), lab.redis.dump(lab.group.members), lab.redis.dump(lab.group.queue)
    dry = repair(lab, dry=True)
    assert (
        lab.redis.dump(lab.group.state), lab.redis.dump(lab.group.members), lab.redis.dump(lab.group.queue)
    ) == before  # fmt: skip
    done = repair(lab)
    assert dry == done
    assert len(done) == 1
    assert told in done[0]
    assert repair(lab) == ()
    (event,) = lab.events("GroupRepaired")
    assert (event["by"], event["reason"], event["did"]) == ("eve@desk", "stuck", done[0])
    assert "repair" in lab.wakes()


def test_after_a_repair_the_group_goes_on(lab: Lab) -> None:
    """It was blocked by a job that nobody knows."""
    served(lab)
    lab.redis.hset(lab.group.jobs, "x/residency", "faulted")
    assert lab.queue("b1", served=True).phase == "blocked"
    repair(lab)
    assert lab.holder == "b1"


def test_a_waiter_that_was_put_off_is_tried_at_once(lab: Lab) -> None:
    """Its swap begins anew."""
    served(lab)
    put_off(lab)
    assert lab.swap == 0
    repair(lab)
    assert lab.view.state["swap_waiter"] == "b1"


def test_nothing_is_guessed(lab: Lab) -> None:
    """A swap that a node began, an order that is not proved, state on a node that left, a job on a node that is away:
    nothing of that is touched."""
    lab.join("n1", "n2")
    lab.release("a1", lab.grant("a1", served=True))
    lab.queue("b1", served=True)
    epoch = lab.own()
    lab.run(scripts.plan(lab.group, lab.swap, epoch, "{}", 1000))
    lab.command("n1", epoch, "prepare")
    lab.redis.hset(lab.group.members, mapping={"n9/a/state": "suspended", "n9/a/bytes": "5"})
    lab.plant(evict="a")
    lab.pass_time(5)
    assert repair(lab) == ()
    assert lab.swap
    assert lab.view.state["evict"] == "a"


def test_jobs_are_not_forgotten_on_the_word_of_some(lab: Lab) -> None:
    """Another node is away, or has yet to tell what it has."""
    lab.join("n1", "n2")
    lab.redis.hset(lab.group.jobs, "x/residency", "resident")
    lab.pass_time(16)
    lab.beat("n1")
    assert repair(lab) == ()
    lab.run(scripts.heartbeat(lab.group, "n3", 15_000))
    lab.beat("n2")
    assert repair(lab) == ()


def test_a_gang_that_gathers_is_left_alone(lab: Lab) -> None:
    """A record without a place in the queue whose client gives signs of life is no half record."""
    served(lab)
    lab.redis.hset(lab.group.waiters, mapping={"x1/job": "x"})
    lab.redis.zadd(lab.group.alive, {"x1": lab.view.now_ms + 5000})
    assert repair(lab) == ()
