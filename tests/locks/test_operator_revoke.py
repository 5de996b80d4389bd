"""revoke: a group is taken away from its holder; its state is out before anybody is in."""

from __future__ import annotations

import pytest

from tests.locks.lab import Lab
from timeslice.errors import NotHolderError
from timeslice.locks import scripts
from timeslice.locks.scripts import Ended, Granted, Lost, NotHolder, Observed, Revoked

OUT = [Observed("a", "suspended", 5)]


def revoke(lab: Lab, waiter: str, token: int, reason: str = "stuck", *, at_once: bool = False) -> Revoked:
    return lab.run(scripts.revoke(lab.group, waiter[0], waiter, token, "eve@desk", reason, at_once=at_once))


def held(lab: Lab) -> int:
    """Job a holds a served group that a coordinator drives."""
    lab.join("n1")
    lab.own()
    return lab.grant("a1", served=True)


def test_the_state_goes_out_at_once_also_when_nobody_waits(lab: Lab) -> None:
    """A swap with an empty in-side, by force; at its end the group is idle and nothing is left of the order."""
    token = held(lab)
    assert revoke(lab, "a1", token) == Revoked(served=True, quiet_ms=0)
    state = lab.view.state
    assert (lab.holder, state["evict"], state["force"]) == ("", "a", "1")
    assert (state["swap_waiter"], state["swap_job"]) == ("", "")
    assert lab.wakes()[-1] == "swap"
    assert lab.carry_out(lab.own(), "n1", seen=OUT).lease_id == ""
    state = lab.view.state
    assert (lab.view.phase, state["evict"], state["force"], state["evict_how"]) == ("idle", "", "", "")


def test_nobody_is_granted_before_the_state_is_proved_out(lab: Lab) -> None:
    """Neither who waits, nor who comes new, nor the job itself, whose state is still there."""
    token = held(lab)
    lab.queue("b1", served=True)
    revoke(lab, "a1", token)
    lab.queue("a2", served=True)
    assert lab.swap
    assert lab.holder == ""
    lab.carry_out(lab.own(), "n1", seen=OUT)
    assert lab.holder == "b1"


def test_the_holder_learns_who_and_why(lab: Lab) -> None:
    """At its next renewal, and at a yield that comes late; a waiter with its id can't come back."""
    token = held(lab)
    revoke(lab, "a1", token, "hangs since noon")
    lost = lab.renew("a1", token, served=True)
    assert isinstance(lost, Lost)
    assert (lost.by, lost.reason) == ("eve@desk", "hangs since noon")
    late = lab.release("a1", token)
    assert isinstance(late, NotHolder)
    assert (late.by, late.reason) == ("eve@desk", "hangs since noon")
    assert isinstance(lab.ask("a1", served=True), Ended)


def test_a_grant_that_was_not_confirmed_is_revoked_too(lab: Lab) -> None:
    """Its waiter reads that it was cancelled, and by whom."""
    token = held(lab)
    lab.queue("a2", served=True)
    lab.release("a1", token)
    assert lab.holder == "a2"
    revoke(lab, "a2", lab.number("token"))
    assert lab.mail("a2")[-1] == {"kind": "cancelled", "by": "eve@desk", "reason": "stuck"}
    assert lab.view.state["evict"] == "a"


def test_the_event_names_the_operator(lab: Lab) -> None:
    """Once, though the order is sent twice."""
    revoke(lab, "a1", held(lab))
    revoke(lab, "a1", lab.number("token"))
    (event,) = lab.events("LeaseRevoked")
    assert (event["job"], event["by"], event["reason"]) == ("a", "eve@desk", "stuck")


def test_an_order_that_comes_late_hits_no_later_holder(lab: Lab) -> None:
    """The lease that the operator saw is over; who holds now keeps it."""
    token = held(lab)
    lab.release("a1", token)
    later = lab.grant("a2", served=True)
    with pytest.raises(NotHolderError, match=rf"ended before .* job a holds it now \(token {later}\)"):
        revoke(lab, "a1", token)
    assert lab.holder == "a2"


def test_a_lease_that_ran_out_is_reclaimed_not_revoked(lab: Lab) -> None:
    """The holder is gone without a word: the event says so."""
    token = held(lab)
    lab.pass_time(31)
    with pytest.raises(NotHolderError, match="nobody holds it now"):
        revoke(lab, "a1", token)
    assert lab.events("LeaseReclaimed")


def test_a_move_that_fails_is_tried_again_and_the_group_says_why(lab: Lab) -> None:
    """With pauses; nobody is granted meanwhile; it goes on at once when a process of the job ends."""
    token = held(lab)
    lab.queue("b1", served=True)
    revoke(lab, "a1", token)
    lab.refuse(lab.own(), "n1", reason="no backend can", defer_ms=30_000)
    view = lab.view
    assert (view.phase, view.swap) == ("blocked", 0)
    assert "job a could not be moved off the device: no backend can" in view.reason
    assert lab.queue("b1", served=True).phase == "blocked"
    lab.pass_time(10)
    lab.beat("n1")
    lab.own()
    assert lab.swap == 0
    lab.report("n1", Observed("a", "gone"))
    assert lab.swap
    lab.carry_out(lab.own(), "n1", seen=[Observed("a", "gone")])
    assert lab.holder == "b1"


def test_a_move_that_failed_is_tried_when_its_pause_is_over(lab: Lab) -> None:
    """Whoever looks first, the owner's housekeeping included."""
    token = held(lab)
    revoke(lab, "a1", token)
    lab.refuse(lab.own(), "n1", defer_ms=4000)
    lab.pass_time(5)
    lab.beat("n1")
    assert lab.swap


def test_a_paused_group_is_cleared_all_the_same(lab: Lab) -> None:
    """And stays paused."""
    token = held(lab)
    lab.run(scripts.pause(lab.group, True, "eve"))
    revoke(lab, "a1", token)
    lab.carry_out(lab.own(), "n1", seen=OUT)
    assert (lab.view.phase, lab.holder, lab.view.state["evict"]) == ("paused", "", "")


def test_a_lock_only_group_waits_for_the_old_lease(lab: Lab) -> None:
    """Its body may run on until it renews: the next grant comes when the old lease's time is over."""
    token = lab.grant("a1")
    lab.queue("b1")
    found = revoke(lab, "a1", token)
    assert not found.served
    assert 29_000 < found.quiet_ms <= 30_000
    assert "eve@desk took it from job a" in lab.queue("b1").reason
    assert lab.view.state.get("evict", "") == ""
    lab.pass_time(29)
    lab.queue("b1")
    lab.pass_time(2)
    assert isinstance(lab.ask("b1"), Granted)


def test_a_lock_only_group_is_free_at_once_if_told_so(lab: Lab) -> None:
    """At the first order, or at a second one that says so."""
    token = lab.grant("a1")
    lab.queue("b1")
    assert revoke(lab, "a1", token, at_once=True).quiet_ms == 0
    assert lab.holder == "b1"
    token = lab.number("token")
    lab.renew("b1", token)
    lab.queue("c1")
    assert revoke(lab, "b1", token).quiet_ms > 0
    assert lab.holder == ""
    assert revoke(lab, "b1", token, at_once=True).quiet_ms == 0
    assert lab.holder == "c1"


def test_an_outage_does_not_shorten_the_wait_for_a_long_lease(lab: Lab) -> None:
    """The old holder's lease is ten minutes; nobody could reach the server for a while."""
    token = lab.grant("a1", lease_ms=600_000)
    revoke(lab, "a1", token)
    lab.jump(20)
    lab.queue("b1")
    lab.pass_time(60)
    lab.queue("b1")
    assert lab.holder == ""


def test_data_loss_in_the_middle_loses_no_order(lab: Lab) -> None:
    """The swap is dropped with what was lost; the job is still put out before anybody is granted."""
    token = held(lab)
    revoke(lab, "a1", token)
    lab.queue("b1", served=True, floor=lab.counter + 10**6)
    assert lab.swap == 0
    lab.pass_time(31)
    lab.report("n1", Observed("a", "resident", 0, 5))
    lab.beat("n1")
    lab.queue("b1", served=True)
    assert (lab.view.state["evict"], lab.view.state["swap_job"]) == ("a", "")
    assert lab.swap
