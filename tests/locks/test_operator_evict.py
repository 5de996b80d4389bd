"""evict: a job that does not hold is moved to host memory now."""

from __future__ import annotations

import pytest

from tests.locks.lab import Lab
from timeslice.errors import RefusedError
from timeslice.locks import scripts
from timeslice.locks.scripts import Observed

OUT = [Observed("a", "suspended", 5)]


def evict(lab: Lab, job: str = "a", *, force: bool = False) -> bool:
    return lab.run(scripts.evict(lab.group, job, "eve@desk", "debugging", force=force))


def resident(lab: Lab) -> None:
    """Job a has yielded and is still on the device."""
    lab.join("n1")
    lab.own()
    lab.release("a1", lab.grant("a1", served=True))


def test_the_job_goes_out_though_nobody_waits(lab: Lab) -> None:
    """A swap with an empty in-side, not by force unless told so; the order is in the events, once."""
    resident(lab)
    assert evict(lab)
    assert evict(lab)
    assert (lab.view.state["evict"], lab.view.state["force"]) == ("a", "")
    lab.carry_out(lab.own(), "n1", seen=OUT)
    assert lab.view.resident == ()
    assert evict(lab) is False
    (event,) = lab.events("EvictionOrdered")
    assert (event["job"], event["by"], event["reason"]) == ("a", "eve@desk", "debugging")


def test_by_force_when_told_so(lab: Lab) -> None:
    """The plan is then made with it."""
    resident(lab)
    evict(lab, force=True)
    assert lab.view.state["force"] == "1"


def test_an_order_that_fails_is_dropped(lab: Lab) -> None:
    """The job stays where it is and may hold again; why it failed can be read."""
    resident(lab)
    evict(lab)
    lab.refuse(lab.own(), "n1", reason="no room in host memory")
    state = lab.view.state
    assert (lab.view.phase, state["evict"], state["evict_reason"]) == ("idle", "", "no room in host memory")
    assert lab.grant("a2", served=True)


def test_a_waiter_gets_in_after_the_job_is_out(lab: Lab) -> None:
    """Even the job itself has to come back by way of its saved copy."""
    resident(lab)
    evict(lab)
    lab.queue("a2", served=True)
    lab.carry_out(lab.own(), "n1", seen=OUT)
    assert (lab.holder, lab.view.state["swap_job"]) == ("", "a")


def test_a_reclaimed_job_is_put_out_until_it_is_out(lab: Lab) -> None:
    """Its holder died: an order only makes that happen now, and a failure does not make it undone."""
    lab.join("n1")
    lab.own()
    lab.grant("a1", served=True)
    lab.pass_time(31)
    lab.beat("n1")
    lab.own()
    assert (lab.swap, lab.view.state["evict"]) == (0, "a")
    evict(lab)
    lab.refuse(lab.own(), "n1", reason="no")
    assert lab.view.state["evict"] == "a"


def refused(lab: Lab, job: str = "a") -> str:
    """The reason why an order is refused, twice the same, with nothing begun."""
    before = lab.swap
    reasons = set()
    for _ in range(2):
        with pytest.raises(RefusedError) as caught:
            evict(lab, job)
        reasons.add(str(caught.value))
    assert len(reasons) == 1
    assert (lab.swap, lab.view.state.get("evict_how", "")) == (before, "")
    return reasons.pop()


def test_a_holder_is_not_evicted(lab: Lab) -> None:
    """Its body computes there: taking that away is another order."""
    lab.join("n1")
    lab.own()
    lab.grant("a1", served=True)
    assert "timeslice revoke" in refused(lab)
    assert lab.holder == "a1"


def test_nobody_is_evicted_while_another_holds(lab: Lab) -> None:
    """An intruder goes out with the next swap; the holder is not disturbed."""
    lab.join("n1")
    lab.own()
    lab.grant("b1", served=True)
    lab.report("n1", Observed("a", "resident", 0, 5, unheld=True))
    assert "job b holds the group; wait" in refused(lab)


def test_nobody_is_evicted_in_the_middle_of_a_swap(lab: Lab) -> None:
    """Its plan stands."""
    resident(lab)
    lab.queue("b1", served=True)
    assert "a swap for job b is under way; wait" in refused(lab)


def test_nothing_is_ordered_that_nobody_could_carry_out(lab: Lab) -> None:
    """A silent node, a job of unknown state, no coordinator: the reason is the answer, and others are not held up."""
    resident(lab)
    lab.pass_time(16)
    assert "node n1 unreachable since" in refused(lab)
    lab.beat("n1")
    assert "no coordinator drives the swap" in refused(lab)
    lab.own()
    lab.report("n1", Observed("c", "faulted", 0, 5))
    assert "the device state of job c is unknown" in refused(lab)


def test_there_is_nothing_to_move_of_who_is_out(lab: Lab) -> None:
    """Suspended, unknown to the group, or in a group that is only a lock."""
    lab.join("n1")
    lab.report("n1", Observed("a", "suspended", 5))
    assert evict(lab) is False
    assert evict(lab, "z") is False
    assert lab.events("EvictionOrdered") == []


def test_a_job_that_was_never_granted_is_asked_where_its_processes_are(lab: Lab) -> None:
    """It may have loaded without a turn. Each order is carried out, also if the job has nothing there."""
    lab.join("n1")
    lab.own()
    lab.run(scripts.register(lab.group, "a", "n1", 77, "{}"))
    assert evict(lab, "aa") is False
    for seen in ([], OUT):
        assert evict(lab)
        assert lab.view.state["evict"] == "a"
        lab.carry_out(lab.own(), "n1", seen=seen)
        assert (lab.swap, lab.view.state["evict"], lab.view.phase) == (0, "", "idle")
    assert evict(lab) is False
    assert lab.view.jobs["a"].residency == "suspended"


def test_an_order_to_ask_is_refused_like_any_other(lab: Lab) -> None:
    """While somebody holds, and while nobody could carry it out: the reason is the answer, never that it is out."""
    lab.join("n1")
    lab.run(scripts.register(lab.group, "a", "n1", 77, "{}"))
    assert "no coordinator drives the swap" in refused(lab)
    lab.own()
    lab.grant("b1", served=True)
    assert "job b holds the group; wait" in refused(lab)


def test_a_lock_has_no_state_to_move(lab: Lab) -> None:
    """Its holder is named as such."""
    lab.grant("a1")
    assert "it holds the group" in refused(lab)
    assert evict(lab, "b") is False


def test_the_doubt_about_another_job_outlasts_an_order_that_fails(lab: Lab) -> None:
    """Job a's lease was reclaimed while its body may still run: it must leave before anybody enters, a itself too."""
    lab.join("n1")
    lab.grant("a1", served=True)
    lab.report("n1", Observed("x", "resident", device_bytes=5))
    for _ in range(4):
        lab.pass_time(9)
        lab.beat("n1")
        lab.own()
    assert (lab.holder, lab.view.state["evict"]) == ("", "a")
    evict(lab, "x")
    lab.refuse(lab.own(), "n1")
    lab.report("n1", Observed("x", "gone"))
    assert lab.view.state["evict"] == "a"
    lab.queue("a2", served=True)
    assert lab.holder == ""


def test_without_a_coordinator_it_is_refused_while_an_order_is_open_too(lab: Lab) -> None:
    """Nobody would ever carry it out; the order that is open stays, and goes on when one is there again."""
    resident(lab)
    evict(lab)
    lab.pass_time(11)
    lab.beat("n1")
    for _ in range(2):
        with pytest.raises(RefusedError, match="no coordinator drives the swap; start one: timeslice coordinator"):
            evict(lab)
    assert lab.view.state["evict"] == "a"
    lab.own()
    assert evict(lab)


def test_a_refusal_tells_times_in_words(lab: Lab) -> None:
    """Since when a node is away."""
    resident(lab)
    lab.pass_time(20)
    lab.own()
    assert "node n1 unreachable since 20" in refused(lab)
    assert "@" not in refused(lab)
