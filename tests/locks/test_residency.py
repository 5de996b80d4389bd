"""Where a job's state is: only agents lower it, no old news undoes newer, and no expiry is short-cut."""

from __future__ import annotations

from tests.locks.lab import Lab
from timeslice.locks import scripts
from timeslice.locks.scripts import Granted, Observed, Queued


def residents(lab: Lab) -> list[str]:
    """Jobs that are or may be on the device."""
    return list(lab.view.resident)


def swap_to(lab: Lab, waiter: str, *seen: Observed, how: str = "restored") -> int:
    """The queued swap for ``waiter`` goes well on n1; its token."""
    closed = lab.carry_out(lab.own(), "n1", seen=seen, how=how)
    assert closed.lease_id == waiter
    return lab.number("token")


def test_a_job_that_is_still_resident_is_granted_in_one_call(lab: Lab) -> None:
    """Promise 8: no swap, no agent, one reply, even while the agent is silent."""
    lab.join("n1")
    lab.release("a1", lab.grant("a1", served=True))
    lab.pass_time(16)
    reply = lab.ask("a2", served=True)
    assert isinstance(reply, Granted)
    assert reply.how == "no-op"


def test_a_first_load_into_an_empty_group_needs_no_swap(lab: Lab) -> None:
    """Case F01. Nothing saved and nothing resident is a first load, and makes the job resident in the same script. †"""
    lab.join("n1")
    reply = lab.ask("a1", served=True)
    assert isinstance(reply, Granted)
    assert reply.how == "first load"
    assert lab.view.jobs["a"].residency == "resident"


def test_a_job_with_a_saved_state_is_never_granted_without_it(lab: Lab) -> None:
    """The device is empty, but its own state is in host memory: that must come back first."""
    lab.join("n1")
    lab.report("n1", Observed("a", "suspended", 100))
    assert lab.queue("a1", served=True).phase in {"swapping", "blocked"}
    assert lab.view.state["swap_waiter"] == "a1"


def test_only_an_agent_lowers_residency(lab: Lab) -> None:
    """Yield, expiry, cancel and the unconfirmed grant of a job leave it resident: its state is there. †"""
    lab.join("n1")
    lab.release("a1", lab.grant("a1", served=True))
    assert residents(lab) == ["a"]
    lab.grant("a2", served=True)
    lab.cancel("a2")
    assert residents(lab) == ["a"]
    lab.grant("a3", served=True)
    lab.pass_time(31)
    lab.own()
    assert residents(lab) == ["a"]


def test_two_jobs_are_never_resident_by_first_loads(lab: Lab) -> None:
    """The second waits for a swap, though the first does not hold any more."""
    lab.join("n1")
    lab.release("a1", lab.grant("a1", served=True))
    assert isinstance(lab.ask("b1", served=True), Queued)
    assert lab.swap


def test_the_group_stays_served_when_its_agents_leave(lab: Lab) -> None:
    """Nobody is granted on an empty group's word, and it becomes no lock. †"""
    lab.join("n1")
    lab.run(scripts.leave(lab.group, "n1"))
    reply = lab.queue("a1", served=True)
    assert (reply.mode, reply.phase, reply.reason) == ("served", "blocked", "no agent serves this group")


def test_a_silent_agent_blocks_first_loads_until_it_returns(lab: Lab) -> None:
    """Nobody vouches for what is on its devices; its first heartbeat is enough to go on."""
    lab.join("n1")
    lab.pass_time(16)
    reply = lab.queue("a1", served=True)
    assert reply.phase == "blocked"
    assert reply.reason.startswith("node n1 unreachable since ")
    lab.beat("n1")
    assert lab.holder == "a1"


def test_an_operator_who_forgets_a_node_forgets_what_was_on_it(lab: Lab) -> None:
    """The machine is gone for good: its faulted job blocks nobody, its processes are no targets any more."""
    lab.join("n1", "n2")
    lab.run(scripts.register(lab.group, "a", "n2", 7, "{}"))
    lab.run(scripts.register(lab.group, "b", "n1", 8, "{}"))
    lab.report("n2", Observed("a", "faulted"))
    assert "job a is unknown" in lab.queue("b1", served=True).reason
    lab.forget("n2", "a")
    assert lab.holder == "b1"
    assert list(lab.view.targets) == ["b/n1/8"]


def test_a_node_is_asked_for_its_report_until_it_has_given_one(lab: Lab) -> None:
    """The reply to its first heartbeat may have been lost: the second says the same. Nobody is granted by it."""
    lab.queue("a1", served=True)
    for _ in range(2):
        pulse = lab.run(scripts.heartbeat(lab.group, "n1", 15_000))
        assert pulse.known is False
        assert lab.holder == ""
    lab.report("n1")
    assert lab.holder == "a1"
    assert lab.run(scripts.heartbeat(lab.group, "n1", 15_000)).known is True


def test_nobody_is_granted_before_every_node_has_told_what_is_on_it(lab: Lab) -> None:
    """Not by its own acquire either, be its state resident or never loaded; the reason names the node. Promise 2."""
    lab.join("n1")
    lab.release("a1", lab.grant("a1", served=True))
    lab.beat("n2")
    for waiter in ("a2", "b1"):
        reply = lab.queue(waiter, served=True)
        assert (reply.phase, reply.reason) == (
            "blocked",
            "node n2 joined and has not yet told what is on its devices",
        )
    lab.report("n2", Observed("c", "resident"))
    assert lab.view.state["swap_waiter"] == "a2"


def test_news_alone_are_no_node_s_word(lab: Lab) -> None:
    """They were meant for a server that knew the rest; this one, promoted since, may not. Promise 2."""
    lab.beat("n1")
    lab.report("n1", Observed("a", "suspended"), whole=False)
    assert lab.queue("b1", served=True).reason == "node n1 joined and has not yet told what is on its devices"
    lab.report("n1", Observed("a", "suspended"))
    assert lab.holder == "b1"


def test_names_of_nodes_that_have_not_reported_are_not_mixed_up(lab: Lab) -> None:
    """n1 is no part of n10."""
    for node in ("n10", "n1", "x.n1"):
        lab.run(scripts.heartbeat(lab.group, node, 15_000))
    lab.report("n1")
    known = {node: lab.run(scripts.heartbeat(lab.group, node, 15_000)).known for node in ("n10", "n1", "x.n1")}
    assert known == {"n10": False, "n1": True, "x.n1": False}


def test_no_agent_speaks_for_another(lab: Lab) -> None:
    """n2 sees nothing of job a; n1 has not told yet. So a may well be on n1, and b is not let in."""
    lab.join("n1", "n2")
    lab.release("a1", lab.grant("a1", served=True))
    lab.report("n2", Observed("a", "absent"))
    assert residents(lab) == ["a"]
    assert isinstance(lab.ask("b1", served=True), Queued)
    assert lab.swap


def test_a_job_is_out_when_every_node_says_so(lab: Lab) -> None:
    """Then b needs no swap, and nothing of a is kept."""
    lab.join("n1", "n2")
    lab.release("a1", lab.grant("a1", served=True))
    lab.report("n1", Observed("a", "gone"))
    lab.report("n2", Observed("a", "absent"))
    assert lab.view.jobs == {}
    assert lab.view.members == ()
    assert isinstance(lab.ask("b1", served=True), Granted)


def test_an_old_look_lowers_nothing(lab: Lab) -> None:
    """The agent looked before the grant and saw nothing; the job has loaded since. It is told to look again."""
    lab.join("n1")
    before = lab.counter
    lab.release("a1", lab.grant("a1", served=True))
    assert lab.report("n1", Observed("a", "absent"), seen=before).ignored == 1
    assert residents(lab) == ["a"]
    assert lab.report("n1", Observed("a", "absent")).ignored == 0
    assert residents(lab) == []


def test_an_old_look_does_not_undo_what_a_swap_moved(lab: Lab) -> None:
    """A report from before the swap arrives after it: neither what left comes back, nor what came in leaves."""
    lab.join("n1")
    token = lab.grant("a1", served=True)
    lab.report("n1", Observed("b", "suspended", 5))
    lab.queue("b1", served=True)
    lab.release("a1", token)
    before = lab.swap
    epoch = lab.own()
    lab.prepare(epoch, "n1")
    lab.cancel("b1")
    lab.run(scripts.step(lab.group, lab.swap, epoch, "prepare", "commit", 10_000))
    seen = (Observed("a", "suspended", 9), Observed("b", "resident"))
    lab.ack("n1", lab.command("n1", epoch, "commit"), *seen, outcome="done")
    assert lab.report("n1", Observed("a", "resident"), seen=before).ignored == 1
    lab.run(scripts.promote(lab.group, lab.swap, epoch, "restored"))
    assert lab.report("n1", Observed("b", "suspended"), seen=before).ignored == 1
    assert lab.report("n1", Observed("a", "faulted"), seen=before).ignored == 1
    assert residents(lab) == ["b"]


def test_an_old_ack_undoes_nothing(lab: Lab) -> None:
    """A copy of 'a is suspended' arrives after the undo that brought a back: a stays resident. Two were so let in."""
    lab.join("n1")
    token = lab.grant("a1", served=True)
    lab.queue("b1", served=True)
    lab.release("a1", token)
    epoch = lab.own()
    swap = lab.swap
    lab.prepare(epoch, "n1")
    lab.run(scripts.step(lab.group, swap, epoch, "prepare", "commit", 10_000))
    command = lab.command("n1", epoch, "commit")
    lab.ack("n1", command, Observed("a", "suspended", 9))
    lab.ack("n1", command, Observed("a", "resident"), outcome="failed", kind="transient", error="no")
    lab.run(scripts.settle(lab.group, swap, epoch, "no", 30_000))
    lab.ack("n1", command, Observed("a", "suspended", 9), swap=swap)
    assert residents(lab) == ["a"]
    assert lab.view.jobs["a"].residency == "resident"


def test_an_ack_of_a_former_command_is_refused(lab: Lab) -> None:
    """The node is at another command already: nothing is noted, and its sender is told to look again."""
    lab.join("n1")
    token = lab.grant("a1", served=True)
    lab.queue("b1", served=True)
    lab.release("a1", token)
    epoch = lab.own()
    lab.run(scripts.plan(lab.group, lab.swap, epoch, "{}", 10_000))
    old = lab.command("n1", epoch, "prepare")
    lab.command("n1", epoch, "prepare")
    assert lab.ack("n1", old, Observed("a", "suspended"), outcome="prepared") is False
    assert residents(lab) == ["a"]
    assert lab.view.nodes["n1"].step == "begun prepare"


def test_a_swap_s_acks_add_up_over_the_nodes(lab: Lab) -> None:
    """A job half out is out nowhere; bytes are the sum."""
    lab.join("n1", "n2")
    token = lab.grant("a1", served=True)
    lab.queue("b1", served=True)
    lab.release("a1", token)
    epoch = lab.own()
    lab.prepare(epoch, "n1", "n2")
    lab.run(scripts.step(lab.group, lab.swap, epoch, "prepare", "commit", 10_000))
    lab.ack("n1", lab.command("n1", epoch, "commit"), Observed("a", "suspended", 5), outcome="done")
    assert residents(lab) == ["a"]
    lab.ack("n2", lab.command("n2", epoch, "commit"), Observed("a", "suspended", 7), outcome="done")
    assert residents(lab) == []
    assert lab.view.jobs["a"].host_bytes == 12
    assert len(lab.events("JobSuspended")) == 2


def test_an_expired_holder_is_put_out_before_anybody_is_granted(lab: Lab) -> None:
    """Case L04. The waiter's swap has the former holder's state to prove out, wherever it seems to be. †"""
    lab.join("n1")
    lab.grant("a1", served=True)
    lab.pass_time(31)
    lab.beat("n1")
    lab.queue("b1", served=True)
    assert lab.view.state["evict"] == "a"
    assert lab.view.state["swap_job"] == "b"
    swap_to(lab, "b1", Observed("a", "gone"), how="first load")
    assert lab.view.state["evict"] == ""


def test_residency_is_no_shortcut_after_an_expiry_even_for_the_same_job(lab: Lab) -> None:
    """a's state is resident, but whether its last body still runs nobody knows: first out, then in. †"""
    lab.join("n1")
    lab.grant("a1", served=True)
    lab.pass_time(31)
    lab.beat("n1")
    assert isinstance(lab.ask("a2", served=True), Queued)
    assert (lab.view.state["swap_job"], lab.view.state["swap_waiter"]) == ("", "a2")
    closed = lab.carry_out(lab.own(), "n1", seen=[Observed("a", "suspended", 9)])
    assert closed.lease_id == ""
    assert lab.view.state["swap_job"] == "a"
    swap_to(lab, "a2", Observed("a", "resident"))


def test_a_refused_eviction_puts_off_its_waiter_and_starts_no_loop(lab: Lab) -> None:
    """The former holder can't be put out now: the swap is not started over and over, and the demand stands."""
    lab.join("n1")
    lab.grant("a1", served=True)
    lab.pass_time(31)
    lab.beat("n1")
    lab.queue("a2", served=True)
    lab.refuse(lab.own(), "n1")
    for _ in range(3):
        lab.beat("n1")
        lab.own()
        lab.queue("a2", served=True)
    assert lab.swap == 0
    assert len(lab.events("SwapStarted")) == 1
    assert lab.view.state["evict"] == "a"


def test_a_fault_that_is_seen_during_a_hold_outlasts_it(lab: Lab) -> None:
    """After the yield nobody is granted on a device whose state is unknown, the job itself neither."""
    lab.join("n1")
    token = lab.grant("a1", served=True)
    lab.report("n1", Observed("a", "faulted"))
    assert lab.holder == "a1"
    lab.release("a1", token)
    reply = lab.queue("a2", served=True)
    assert (reply.phase, reply.reason) == ("blocked", "the device state of job a is unknown")


def test_a_faulted_job_blocks_until_its_agent_says_better(lab: Lab) -> None:
    """Case F05. The job is gone, its memory measured free: the group goes on at once, with its id too."""
    lab.join("n1")
    lab.report("n1", Observed("a", "faulted"))
    assert lab.queue("b1", served=True).phase == "blocked"
    lab.report("n1", Observed("a", "gone"))
    assert lab.holder == "b1"
    lab.release("b1", lab.number("token"))
    assert isinstance(lab.ask("a1", served=True), Queued)
    assert lab.swap


def test_an_intruder_is_flagged_and_counted_in(lab: Lab) -> None:
    """Case C20. A job on the device without a hold is said once, and nobody is let in beside it."""
    lab.join("n1")
    lab.run(scripts.register(lab.group, "b", "n1", 9, "{}"))
    lab.release("a1", lab.grant("a1", served=True))
    lab.report("n1", Observed("b", "resident", 0, 77, unheld=True))
    lab.report("n1", Observed("b", "resident", 0, 77, unheld=True))
    assert [event["device_bytes"] for event in lab.events("JobUnheld")] == ["77"]
    assert any(member.unheld for member in lab.view.members)
    lab.queue("a2", served=True)
    assert lab.swap


def test_usage_is_the_time_held(lab: Lab) -> None:
    """A body's time counts; a grant that nobody took does not."""
    lab.join("n1")
    token = lab.grant("a1", served=True)
    lab.queue("a2", served=True)
    lab.pass_time(10)
    lab.release("a1", token)
    lab.pass_time(14)
    lab.own()
    usage = lab.view.jobs["a"].usage_s
    assert 10 <= usage < 11


def test_an_agent_vouches_for_the_holder_it_watches(lab: Lab) -> None:
    """The client can't renew, its process lives: it keeps the lease for ten leases, and no longer. †"""
    lab.join("n1")
    lab.grant("a1", served=True)
    for _ in range(29):
        lab.pass_time(10)
        lab.run(scripts.heartbeat(lab.group, "n1", 15_000, vouch="a1"))
    assert lab.holder == "a1"
    for _ in range(5):
        lab.pass_time(10)
        lab.run(scripts.heartbeat(lab.group, "n1", 15_000, vouch="a1"))
    assert lab.holder == ""


def test_an_agent_does_not_vouch_for_another_host_or_lease(lab: Lab) -> None:
    """Its word counts only for the holder's own node and this very lease. †"""
    lab.join("n1", "n2")
    lab.grant("a1", served=True)
    for vouch, node in (("a1", "n2"), ("a0", "n1")):
        lab.run(scripts.heartbeat(lab.group, node, 15_000, vouch=vouch))
    lab.pass_time(16)
    for vouch, node in (("a1", "n2"), ("a0", "n1")):
        lab.run(scripts.heartbeat(lab.group, node, 15_000, vouch=vouch))
    lab.pass_time(15)
    lab.beat("n1")
    assert lab.holder == ""
