"""own, plan, poke, step, accepted, ack, promote and settle: a swap played by hand."""

from __future__ import annotations

from typing import Any

import pytest

from tests.locks.lab import Lab, start_swap
from timeslice.errors import GroupModeError, StaleCommandError, UnknownNodeError
from timeslice.locks import scripts
from timeslice.locks.scripts import Call, Mine, Observed, Open, OwnedBy, Planned, Promoted


def test_a_group_has_one_owner(lab: Lab) -> None:
    """Another coordinator is told whose it is and for how long."""
    lab.join("n1")
    epoch = lab.own("c1")
    assert lab.own("c1") == epoch
    reply = lab.run(scripts.own(lab.group, "c2"))
    assert isinstance(reply, OwnedBy)
    assert reply.owner == "c1"
    assert 0 < reply.ms_left <= 10_000


def test_a_silent_owner_is_followed_by_a_newer_epoch(lab: Lab) -> None:
    """Whoever comes next draws its epoch from the one counter."""
    lab.join("n1")
    old = lab.own("c1")
    lab.pass_time(11)
    assert lab.own("c2") > old
    assert isinstance(lab.run(scripts.own(lab.group, "c1")), OwnedBy)


def test_an_owner_lets_go_and_only_of_what_is_its_own(lab: Lab) -> None:
    """After disown another takes the group at once; a disown by somebody else does nothing."""
    lab.join("n1")
    lab.own("c1")
    lab.run(scripts.disown(lab.group, "c2"))
    assert isinstance(lab.run(scripts.own(lab.group, "c2")), OwnedBy)
    lab.run(scripts.disown(lab.group, "c1"))
    assert isinstance(lab.run(scripts.own(lab.group, "c2")), Mine)


def test_only_a_served_group_is_owned(lab: Lab) -> None:
    """A lock needs no coordinator, and a group that is not there is not brought to life by one."""
    assert lab.run(scripts.own(lab.group, "c1")) == OwnedBy("", 0)
    assert not lab.view.exists
    lab.grant("a1")
    assert lab.run(scripts.own(lab.group, "c1")) == OwnedBy("", 0)


def test_a_swap_runs_from_wake_to_grant(lab: Lab) -> None:
    """The waiter is granted with a newer token than the swap's, which is newer than the former grant's."""
    epoch = start_swap(lab)
    swap = lab.swap
    assert lab.view.phase == "swapping"
    assert "swap" in lab.wakes()
    closed = lab.carry_out(epoch, "n1", seen=[Observed("a", "suspended", 100)], how="first load")
    assert closed.lease_id == "b1"
    assert lab.number("token") > swap
    assert lab.swap == 0
    (mail,) = lab.mail("b1")
    assert mail["how"] == "first load"
    assert lab.view.jobs["a"].residency == "suspended"
    assert lab.view.jobs["a"].host_bytes == 100
    assert lab.view.jobs["b"].residency == "resident"


def test_a_plan_is_never_replaced(lab: Lab) -> None:
    """A new owner is handed the stored plan, whatever it brought along. †"""
    epoch = start_swap(lab)
    swap = lab.swap
    lab.run(scripts.plan(lab.group, swap, epoch, '{"first": 1}', 10_000))
    lab.pass_time(11)
    newer = lab.own("c2")
    answer = lab.run(scripts.plan(lab.group, swap, newer, '{"second": 1}', 10_000))
    assert answer == Planned('{"first": 1}', "prepare")
    with pytest.raises(StaleCommandError):
        lab.run(scripts.plan(lab.group, swap, epoch, '{"first": 1}', 10_000))


@pytest.mark.parametrize("wrong", ["swap", "epoch"])
def test_every_verb_of_a_swap_checks_swap_and_epoch(lab: Lab, wrong: str) -> None:
    """What is not of this swap and this owner is stale, and the refusal carries the counter. †"""
    epoch = start_swap(lab)
    swap = lab.swap
    lab.prepare(epoch, "n1")
    s, e = (swap - 1, epoch) if wrong == "swap" else (swap, epoch - 1)
    calls: list[Call[Any]] = [
        scripts.plan(lab.group, s, e, "{}", 1000),
        scripts.poke(lab.group, s, e),
        scripts.step(lab.group, s, e, "prepare", "commit", 1000),
        scripts.accepted(lab.group, "n1", s, e, "prepare", "x"),
        scripts.promote(lab.group, s, e, "restored"),
        scripts.settle(lab.group, s, e, "no", 1000),
    ]
    for call in calls:
        with pytest.raises(StaleCommandError) as refusal:
            lab.run(call)
        assert refusal.value.token == lab.counter
    assert (lab.swap, lab.view.nodes["n1"].step) == (swap, "prepared")


def test_no_verb_of_a_swap_acts_without_one(lab: Lab) -> None:
    """Swap 0 is no swap, though the idle state's number is 0 too."""
    lab.join("n1")
    epoch = lab.own()
    calls: list[Call[Any]] = [
        scripts.plan(lab.group, 0, epoch, "{}", 1000),
        scripts.step(lab.group, 0, epoch, "", "prepare", 1000),
        scripts.accepted(lab.group, "n1", 0, epoch, "", "x"),
        scripts.promote(lab.group, 0, epoch, "restored"),
        scripts.settle(lab.group, 0, epoch, "no", 1000),
    ]
    for call in calls:
        with pytest.raises(StaleCommandError):
            lab.run(call)


def test_accepted_records_the_node_as_begun_and_tells_the_time_left(lab: Lab) -> None:
    """From then on the swap can't be closed without this node. †"""
    epoch = start_swap(lab)
    swap = lab.swap
    lab.run(scripts.plan(lab.group, swap, epoch, "{}", 10_000))
    left = lab.run(scripts.accepted(lab.group, "n1", swap, epoch, "prepare", "c-1"))
    assert 9_000 < left <= 10_000
    node = lab.view.nodes["n1"]
    assert (node.swap, node.step) == (swap, "begun prepare")
    assert lab.run(scripts.settle(lab.group, swap, epoch, "no", 1000)) == Open(node="n1")


def test_accepted_refuses_what_is_late_but_not_a_repeat(lab: Lab) -> None:
    """An order whose time is over is not begun; one that had begun is answered as before. †"""
    epoch = start_swap(lab, "n1", "n2")
    swap = lab.swap
    lab.run(scripts.plan(lab.group, swap, epoch, "{}", 10_000))
    lab.run(scripts.accepted(lab.group, "n1", swap, epoch, "prepare", "c-1"))
    lab.pass_time(8)
    lab.own()
    lab.pass_time(4)
    assert lab.run(scripts.accepted(lab.group, "n1", swap, epoch, "prepare", "c-1")) == 0
    with pytest.raises(StaleCommandError, match="late"):
        lab.run(scripts.accepted(lab.group, "n2", swap, epoch, "prepare", "c-2"))
    assert lab.view.nodes["n2"].swap != swap


def test_accepted_refuses_another_step(lab: Lab) -> None:
    """An order to commit while the swap prepares is stale. †"""
    epoch = start_swap(lab)
    lab.run(scripts.plan(lab.group, lab.swap, epoch, "{}", 10_000))
    with pytest.raises(StaleCommandError):
        lab.run(scripts.accepted(lab.group, "n1", lab.swap, epoch, "commit", "c-1"))


def test_accepted_refuses_a_node_that_was_taken_out(lab: Lab) -> None:
    """Nobody would wait for what it does."""
    epoch = start_swap(lab, "n1", "n2")
    lab.run(scripts.plan(lab.group, lab.swap, epoch, "{}", 10_000))
    lab.forget("n2", "a")
    with pytest.raises(StaleCommandError):
        lab.run(scripts.accepted(lab.group, "n2", lab.swap, epoch, "prepare", "c-1"))


def test_accepted_refuses_an_agent_that_knows_more(lab: Lab) -> None:
    """The server lost data since: its order is older than what the agent has seen. †"""
    epoch = start_swap(lab)
    lab.run(scripts.plan(lab.group, lab.swap, epoch, "{}", 10_000))
    with pytest.raises(StaleCommandError):
        lab.run(scripts.accepted(lab.group, "n1", lab.swap, epoch, "prepare", "c", floor=lab.counter + 5))


def test_promote_waits_for_every_node(lab: Lab) -> None:
    """It names one that has not reported done, be it silent, preparing, or a newcomer. †"""
    epoch = start_swap(lab, "n1", "n2")
    swap = lab.swap
    lab.prepare(epoch, "n1", "n2")
    lab.run(scripts.step(lab.group, swap, epoch, "prepare", "commit", 10_000))
    assert lab.run(scripts.promote(lab.group, swap, epoch, "restored")) == Open(node="n1")
    lab.ack("n1", lab.command("n1", epoch, "commit"), Observed("a", "suspended"), outcome="done")
    command = lab.command("n2", epoch, "commit")
    assert lab.run(scripts.promote(lab.group, swap, epoch, "restored")) == Open(node="n2")
    lab.ack("n2", command, Observed("a", "gone"), outcome="done")
    lab.join("n3")
    assert lab.run(scripts.promote(lab.group, swap, epoch, "restored")) == Open(node="n3")
    assert lab.holder == ""


def test_promote_does_not_close_a_swap_that_no_node_is_left_of(lab: Lab) -> None:
    """With nobody there nobody confirmed anything."""
    epoch = start_swap(lab)
    swap = lab.swap
    lab.prepare(epoch, "n1")
    lab.forget("n1", "a")
    assert lab.run(scripts.promote(lab.group, swap, epoch, "restored")) == Open()
    assert lab.holder == ""


def test_promote_refuses_a_crowded_device(lab: Lab) -> None:
    """All nodes say done, yet a job is still on the device: nobody is granted."""
    epoch = start_swap(lab)
    swap = lab.swap
    lab.prepare(epoch, "n1")
    lab.run(scripts.step(lab.group, swap, epoch, "prepare", "commit", 10_000))
    lab.ack("n1", lab.command("n1", epoch, "commit"), outcome="done")
    assert lab.run(scripts.promote(lab.group, swap, epoch, "restored")) == Open(job="a")
    assert lab.holder == ""


def test_promote_asked_again_gives_the_same_answer(lab: Lab) -> None:
    """Its reply was lost; meanwhile the holder may have yielded. It closes no other swap. †"""
    epoch = start_swap(lab)
    closed = lab.carry_out(epoch, "n1", seen=[Observed("a", "suspended")])
    lab.grant("b1", served=True)
    lab.release("b1", lab.number("token"))
    again = lab.run(scripts.promote(lab.group, closed.swap, epoch, "restored"))
    assert again == Promoted("b1")
    with pytest.raises(StaleCommandError):
        lab.run(scripts.settle(lab.group, closed.swap, epoch, "no", 1000))


def test_the_next_waiter_of_the_job_gets_what_its_dead_comrade_swapped_for(lab: Lab) -> None:
    """The state is in; another waiter of the same job takes it before anybody else."""
    epoch = start_swap(lab)
    lab.queue("c1", served=True)
    lab.queue("b2", served=True)
    lab.prepare(epoch, "n1")
    lab.cancel("b1")
    lab.run(scripts.step(lab.group, lab.swap, epoch, "prepare", "commit", 10_000))
    lab.ack("n1", lab.command("n1", epoch, "commit"), Observed("a", "suspended"), outcome="done")
    assert lab.run(scripts.promote(lab.group, lab.swap, epoch, "first load")) == Promoted("b2")
    assert lab.waiting == ["c1"]


def test_with_nobody_of_the_job_left_the_next_swap_begins(lab: Lab) -> None:
    """The waiter and all its comrades have gone: the queue goes on."""
    epoch = start_swap(lab)
    lab.queue("c1", served=True)
    lab.prepare(epoch, "n1")
    lab.cancel("b1")
    swap = lab.swap
    lab.run(scripts.step(lab.group, swap, epoch, "prepare", "commit", 10_000))
    seen = (Observed("a", "suspended"), Observed("b", "resident"))
    lab.ack("n1", lab.command("n1", epoch, "commit"), *seen, outcome="done")
    assert lab.run(scripts.promote(lab.group, swap, epoch, "restored")) == Promoted("")
    assert lab.view.state["swap_waiter"] == "c1"
    assert lab.swap > swap


def test_step_moves_once_and_says_why_it_hangs(lab: Lab) -> None:
    """A repeat leaves step and deadline; a reason blocks the group in words."""
    epoch = start_swap(lab)
    swap = lab.swap
    lab.prepare(epoch, "n1")
    assert lab.run(scripts.step(lab.group, swap, epoch, "prepare", "commit", 60_000)) == "commit"
    deadline = lab.number("swap_deadline_ms")
    lab.run(scripts.step(lab.group, swap, epoch, "prepare", "commit", 90_000))
    lab.run(scripts.step(lab.group, swap, epoch, "commit", "commit", 0, reason="node n1 is slow since @1700000000000"))
    assert lab.number("swap_deadline_ms") == deadline
    assert lab.view.phase == "blocked"
    assert lab.view.reason == "node n1 is slow since 2023-11-14 22:13:20 UTC"
    with pytest.raises(StaleCommandError):
        lab.run(scripts.step(lab.group, swap, epoch, "prepare", "prepare", 1000))


def test_an_undo_that_ran_out_of_time_can_be_ordered_again(lab: Lab) -> None:
    """The node was away past the deadline; with a new one its order is accepted, so the swap can end."""
    epoch = start_swap(lab)
    swap = lab.swap
    lab.prepare(epoch, "n1")
    lab.run(scripts.step(lab.group, swap, epoch, "prepare", "rollback", 5_000))
    lab.pass_time(6)
    with pytest.raises(StaleCommandError, match="late"):
        lab.run(scripts.accepted(lab.group, "n1", swap, epoch, "rollback", "r-1"))
    lab.run(scripts.step(lab.group, swap, epoch, "rollback", "rollback", 5_000, reason="n1 is late"))
    lab.ack("n1", lab.command("n1", epoch, "rollback"), outcome="rolled back")
    assert lab.run(scripts.settle(lab.group, swap, epoch, "n1 was late", 1000)) is None


def test_a_swap_nobody_drives_says_so_until_somebody_does(lab: Lab) -> None:
    """Without an owner the reason is that; with one it is a swap like any other."""
    lab.join("n1")
    token = lab.grant("a1", served=True)
    lab.queue("b1", served=True)
    lab.release("a1", token)
    assert lab.view.reason == "no coordinator drives the swap"
    assert lab.view.phase == "blocked"
    lab.own()
    assert (lab.view.phase, lab.view.reason) == ("swapping", "")


def test_a_swap_that_starts_after_a_block_shows_itself(lab: Lab) -> None:
    """The reason of the former block is not carried over to the swap."""
    lab.join("n1")
    token = lab.grant("a1", served=True)
    lab.own()
    lab.redis.zadd(lab.group.nodes, {"n1": 1})
    lab.queue("b1", served=True)
    lab.release("a1", token)
    assert "node n1 unreachable since" in lab.view.reason
    assert "1970-01-01 00:00:00" in lab.view.reason
    lab.beat("n1")
    assert (lab.view.phase, lab.view.reason) == ("swapping", "")


def test_a_heartbeat_in_a_lock_group_is_refused(lab: Lab) -> None:
    """No agent can serve what was declared a mere lock. †"""
    lab.grant("a1")
    with pytest.raises(GroupModeError, match="lock-only"):
        lab.beat("n1")


def test_a_node_that_is_not_there_can_t_be_drained(lab: Lab) -> None:
    """The operator mistyped its name."""
    with pytest.raises(UnknownNodeError):
        lab.run(scripts.drain(lab.group, "n9", True, "eve", ""))
