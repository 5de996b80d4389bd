"""Swaps that don't come off: pokes, silent waiters, refusals, and how long each is put off."""

from __future__ import annotations

import pytest

from tests.locks.lab import Lab, start_swap
from timeslice.errors import StaleCommandError
from timeslice.locks import scripts
from timeslice.locks.scripts import Granted, Observed, Open


def test_settle_asked_again_gives_the_same_answer(lab: Lab) -> None:
    """Its reply was lost; the deferral is not renewed and the group not disturbed. †"""
    epoch = start_swap(lab)
    swap = lab.swap
    lab.refuse(epoch, "n1")
    assert lab.run(scripts.settle(lab.group, swap, epoch, "no room", 30_000)) is None
    assert len(lab.events("SwapDeferred")) == 1
    with pytest.raises(StaleCommandError):
        lab.run(scripts.promote(lab.group, swap, epoch, "restored"))


def test_an_unplanned_swap_is_dropped_with_its_waiter(lab: Lab) -> None:
    """Nothing was ordered yet, so nothing is owed; a is granted again without a swap."""
    start_swap(lab)
    lab.cancel("b1")
    assert (lab.swap, lab.view.phase) == (0, "idle")
    assert isinstance(lab.ask("a2", served=True), Granted)


def test_a_waiter_that_just_spoke_is_not_poked_and_a_quiet_one_is(lab: Lab) -> None:
    """The poke lies in its own stream; its refresh wakes the coordinator. †"""
    epoch = start_swap(lab)
    assert lab.run(scripts.poke(lab.group, lab.swap, epoch)) <= 1000
    assert lab.mail("b1") == []
    lab.pass_time(4)
    assert lab.run(scripts.poke(lab.group, lab.swap, epoch)) > 3000
    assert {mail["kind"] for mail in lab.mail("b1")} == {"poke"}
    lab.queue("b1", served=True)
    assert lab.wakes()[-1] == "answered"


def test_a_silent_waiter_is_passed_over_and_keeps_its_place(lab: Lab) -> None:
    """Others go first; a refresh brings it back to where it was at once. †"""
    epoch = start_swap(lab)
    lab.queue("a2", served=True)
    swap = lab.swap
    lab.run(scripts.settle(lab.group, swap, epoch, "silent", 15_000))
    assert lab.holder == "a2"
    assert lab.waiting == ["b1"]
    assert lab.view.queue[0].deferred == "silent"
    lab.queue("b1", served=True)
    assert lab.view.queue[0].deferred == ""
    lab.release("a2", lab.number("token"))
    assert lab.view.state["swap_waiter"] == "b1"


def test_a_silent_waiter_is_not_tried_again_before_it_speaks(lab: Lab) -> None:
    """A yield ends other deferrals; to this one it says nothing new. †"""
    epoch = start_swap(lab)
    lab.queue("a2", served=True)
    lab.run(scripts.settle(lab.group, lab.swap, epoch, "silent", 15_000))
    lab.pass_time(1)
    lab.release("a2", lab.number("token"))
    assert lab.swap == 0
    assert lab.waiting == ["b1"]


def test_a_refused_swap_defers_the_waiter_not_the_group(lab: Lab) -> None:
    """It keeps its place and shows the reason; who needs no swap passes. †"""
    epoch = start_swap(lab)
    lab.refuse(epoch, "n1", reason="n1: 3 GB needed, 1 GB free")
    assert lab.view.phase == "idle"
    reply = lab.queue("b1", served=True)
    assert "3 GB needed" in reply.reason
    assert lab.swap == 0
    assert isinstance(lab.ask("a2", served=True), Granted)
    assert lab.waiting == ["b1"]


@pytest.mark.parametrize("news", ["yield", "exit", "memory"])
def test_a_deferral_ends_when_something_changed(lab: Lab, news: str) -> None:
    """At a yield, at the end of a process, and when a job's state went elsewhere, it is tried again. †"""
    lab.join("n1")
    lab.run(scripts.register(lab.group, "z", "n1", 99, '{"start":1}'))
    epoch = start_swap(lab)
    lab.refuse(epoch, "n1")
    assert lab.swap == 0
    lab.pass_time(1)
    if news == "yield":
        lab.release("a2", lab.grant("a2", served=True))
    elif news == "exit":
        lab.report("n1", ended=[scripts.Exited("z", 99, 1)])
    else:
        lab.report("n1", Observed("y", "suspended", 5))
    assert lab.view.state["swap_waiter"] == "b1"


def test_a_deferral_ends_by_itself(lab: Lab) -> None:
    """After its time the waiter is tried again by whoever looks in."""
    epoch = start_swap(lab)
    lab.refuse(epoch, "n1", defer_ms=5_000)
    lab.pass_time(4)
    lab.own()
    assert lab.swap == 0
    lab.pass_time(2)
    lab.own()
    assert lab.view.state["swap_waiter"] == "b1"


def test_the_longest_deferral_defers(lab: Lab) -> None:
    """However long a coordinator would put it off, it is put off, for at most two minutes: no swap starts at once."""
    epoch = start_swap(lab)
    lab.refuse(epoch, "n1", defer_ms=3_600_000)
    assert lab.swap == 0
    for _ in range(14):
        lab.pass_time(9)
        lab.beat("n1")
        lab.queue("b1", served=True)
    assert lab.view.state["swap_waiter"] == "b1"


def test_a_late_or_doubled_ack_undoes_no_deferral(lab: Lab) -> None:
    """An ack that arrives again after the swap was settled starts no new attempt."""
    epoch = start_swap(lab)
    swap = lab.swap
    lab.run(scripts.plan(lab.group, swap, epoch, "{}", 10_000))
    command = lab.command("n1", epoch, "prepare")
    lab.ack("n1", command, outcome="failed", error="busy")
    lab.run(scripts.settle(lab.group, swap, epoch, "busy", 30_000))
    lab.pass_time(1)
    lab.ack("n1", command, swap=swap, outcome="failed", error="busy")
    assert lab.swap == 0


def test_settle_waits_for_what_was_begun(lab: Lab) -> None:
    """A prepared node still holds its job locked: it must undo that first."""
    epoch = start_swap(lab)
    swap = lab.swap
    lab.prepare(epoch, "n1")
    assert lab.run(scripts.settle(lab.group, swap, epoch, "no", 1000)) == Open(node="n1")
    lab.run(scripts.step(lab.group, swap, epoch, "prepare", "rollback", 10_000))
    lab.ack("n1", lab.command("n1", epoch, "rollback"), outcome="rolled back")
    assert lab.run(scripts.settle(lab.group, swap, epoch, "no", 1000)) is None
