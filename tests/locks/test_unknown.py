"""A grant is evidence: what nobody can see is unknown, and nobody is granted beside it."""

from __future__ import annotations

import pytest

from tests.locks.lab import Lab
from timeslice.coordinator.swap import make_plan
from timeslice.errors import RefusedError
from timeslice.locks import scripts
from timeslice.locks.scripts import Exited, Granted, Observed, Queued, Renewed
from timeslice.locks.view import JobView

BLIND = Observed("a", "unknown", why="process 7 is hidden")
SAID = "job a may still be on the devices of node n1: process 7 is hidden"


def say_out(lab: Lab, *jobs: str) -> tuple[str, ...]:
    """Sent once: a repeat has nothing left to say."""
    call = scripts.repair(lab.group, "eve@desk", "looked", out=jobs)
    return call.parse(lab.send(call))


def hidden(lab: Lab) -> None:
    """Job a had a turn, and the agent of n1 can't see it."""
    lab.join("n1")
    lab.release("a1", lab.grant("a1", served=True))
    lab.report("n1", BLIND)


def known(lab: Lab, job: str = "a") -> JobView:
    return lab.view.jobs[job]


def test_nobody_is_granted_beside_a_job_that_nobody_can_see(lab: Lab) -> None:
    """The waiter is blocked; the reason names job, node and why, and an event tells it once."""
    hidden(lab)
    lab.report("n1", BLIND)
    reply = lab.queue("b1", served=True)
    assert (reply.phase, reply.reason) == ("blocked", SAID)
    assert known(lab).residency == "unknown"
    assert [(event["job"], event["node"], event["reason"]) for event in lab.events("JobUnknown")] == [
        ("a", "n1", "process 7 is hidden")
    ]


def test_it_goes_on_when_an_agent_sees_again(lab: Lab) -> None:
    """Shown out, the job is in nobody's way any more."""
    hidden(lab)
    lab.queue("b1", served=True)
    lab.report("n1", Observed("a", "absent"))
    assert lab.holder == "b1"


def test_a_job_that_is_found_again_is_moved_out_first(lab: Lab) -> None:
    """Found where it was, it is resident as any other."""
    hidden(lab)
    lab.own()
    lab.queue("b1", served=True)
    lab.report("n1", Observed("a", "resident", device_bytes=5))
    assert lab.holder == ""
    assert lab.view.state["swap_job"] == "b"


def test_the_job_that_nobody_can_see_goes_on_itself(lab: Lab) -> None:
    """It finds what it left, and passes those who must not get in beside it."""
    hidden(lab)
    lab.queue("b1", served=True)
    assert isinstance(lab.ask("a2", served=True), Granted)
    assert known(lab).residency == "unknown"


@pytest.mark.parametrize("last", ["suspended", "restoring"])
def test_a_job_that_was_out_when_it_was_last_seen_is_brought_back_first(lab: Lab, last: str) -> None:
    """Its body must not start without its state, however often the agent says that it can't see it."""
    hidden(lab)
    lab.report("n1", Observed("a", last))
    lab.own()
    lab.report("n1", BLIND)
    lab.report("n1", BLIND)
    assert isinstance(lab.ask("a2", served=True), Queued)
    assert lab.view.state["swap_job"] == "a"
    assert make_plan(lab.view).into == "a"


def test_a_job_that_leaves_one_node_and_is_unseen_on_another_does_not_just_go_on(lab: Lab) -> None:
    """Some of it is in host memory, or on its way there: it is brought back first."""
    lab.join("n1", "n2")
    lab.release("a1", lab.grant("a1", served=True))
    lab.report("n1", BLIND)
    lab.report("n2", Observed("a", "suspending"))
    lab.own()
    assert isinstance(lab.ask("a2", served=True), Queued)
    assert make_plan(lab.view).into == "a"


def test_an_operators_word_loses_nothing_that_is_in_host_memory(lab: Lab) -> None:
    """It is on no device, as the operator says, and is brought back before the job's next turn."""
    hidden(lab)
    lab.report("n1", Observed("a", "suspended"))
    lab.report("n1", BLIND)
    say_out(lab, "a")
    assert known(lab).residency == "suspended"
    assert isinstance(lab.ask("b1", served=True), Granted)


def test_an_own_doubt_keeps_nobody_out_when_the_others_are_out(lab: Lab) -> None:
    """Job a is unknown on n1 while b is resident: b is moved out, then a is let in. Else neither ever was."""
    lab.join("n1", "n2")
    lab.release("b1", lab.grant("b1", served=True))
    lab.report("n1", BLIND, Observed("b", "resident"))
    lab.queue("a1", served=True)
    seen = [Observed("b", "suspended", 5)]
    assert lab.carry_out(lab.own(), "n1", "n2", seen=seen, how="first load").lease_id == "a1"


def test_a_job_that_is_saved_on_another_node_gets_that_back_first(lab: Lab) -> None:
    """Unknown on n1, suspended on n2: it is not granted as if it had all it needs."""
    lab.join("n1", "n2")
    lab.report("n1", BLIND)
    lab.report("n2", Observed("a", "suspended", 5))
    lab.queue("a1", served=True)
    assert lab.view.state["swap_job"] == "a"


def test_a_lost_holder_that_nobody_can_see_blocks_its_own_job_too(lab: Lab) -> None:
    """After an expiry the state must be proved out, and it can't be."""
    lab.join("n1")
    lab.own()
    lab.grant("a1", served=True)
    lab.pass_time(31)
    lab.beat("n1")
    lab.report("n1", BLIND)
    assert lab.queue("a2", served=True).reason == SAID


def test_a_word_from_a_turn_is_too_old_when_the_turn_is_over(lab: Lab) -> None:
    """A look that began before the job had loaded says absent; it arrives after the yield, and changes nothing."""
    lab.join("n1")
    token = lab.grant("a1", served=True)
    before = lab.counter
    lab.release("a1", token)
    assert lab.report("n1", Observed("a", "absent"), seen=before).ignored == 1
    assert isinstance(lab.ask("b1", served=True), Queued)


@pytest.mark.parametrize("moved", [False, True], ids=["resident elsewhere", "suspended elsewhere"])
def test_a_node_that_joins_is_presumed_to_have_every_job_that_was_let_in(lab: Lab, moved: bool) -> None:
    """The job may have loaded there before anybody looked, be it that its state elsewhere was moved out since."""
    lab.join("n1")
    lab.release("a1", lab.grant("a1", served=True))
    if moved:
        lab.report("n1", Observed("a", "suspended", 5))
    lab.join("n2")
    assert {(member.node, member.state) for member in lab.view.members} >= {("n2", "resident")}
    assert known(lab).residency == ("restoring" if moved else "resident")
    assert isinstance(lab.ask("b1", served=True), Queued)
    lab.cancel("b1")
    lab.report("n2", Observed("a", "absent"))
    assert known(lab).residency == ("suspended" if moved else "resident")


def test_each_turn_is_evidence_on_every_node(lab: Lab) -> None:
    """A job that was out on n2 may load there in its next turn: it is not gone when n1 has told its end."""
    lab.join("n1", "n2")
    lab.release("a1", lab.grant("a1", served=True))
    lab.report("n1", Observed("a", "resident", device_bytes=5, backend="arena"))
    lab.report("n2", Observed("a", "absent"))
    lab.release("a2", lab.grant("a2", served=True))
    lab.report("n1", Observed("a", "gone"))
    assert isinstance(lab.ask("b1", served=True), Queued)


def test_a_grant_that_no_body_followed_leaves_no_evidence(lab: Lab) -> None:
    """A waiter that died in the queue was granted; nothing was loaded, so nobody has to show that it is out."""
    lab.queue("a1", served=True)
    lab.join("n1")
    assert lab.holder == "a1"
    lab.pass_time(16)
    lab.beat("n1")
    assert [event["job"] for event in lab.events("GrantExpired")] == ["a"]
    assert isinstance(lab.ask("c1", served=True), Granted)


def test_the_job_tells_where_it_is_by_its_holder_s_registration(lab: Lab) -> None:
    """Who held by a process that its node's agent was told of has said where it is; a later turn by others has not."""
    lab.join("n1")
    record = '{"pid":7,"start":1,"pid_namespace":"pid:[1]"}'
    lab.run(scripts.register(lab.group, "a", "n1", 7, record))
    lab.release("a1", lab.grant("a1", served=True))
    assert known(lab).has_said
    lab.release("a2", lab.grant("a2", served=True, host="elsewhere", pid=8))
    assert not known(lab).has_said


def test_a_later_turn_does_not_vouch_for_an_earlier_one(lab: Lab) -> None:
    """What a holder that nobody knew has loaded is still there after a turn by one that is known, until the job was
    shown out."""
    lab.join("n1")
    lab.run(scripts.register(lab.group, "a", "n1", 7, '{"pid":7,"start":1,"pid_namespace":"pid:[1]"}'))
    lab.release("a1", lab.grant("a1", served=True, host="elsewhere", pid=8))
    lab.release("a2", lab.grant("a2", served=True))
    assert not known(lab).has_said
    lab.report("n1", Observed("a", "absent"))
    lab.release("a3", lab.grant("a3", served=True))
    assert known(lab).has_said


def test_a_grant_that_was_not_used_takes_nothing_back(lab: Lab) -> None:
    """What was known of the job after its last turn is known now."""
    lab.join("n1")
    lab.run(scripts.register(lab.group, "a", "n1", 7, '{"pid":7,"start":1,"pid_namespace":"pid:[1]"}'))
    token = lab.grant("a1", served=True)
    lab.queue("a2", served=True)
    lab.release("a1", token)
    assert lab.holder == "a2"
    lab.pass_time(16)
    lab.beat("n1")
    assert [event["job"] for event in lab.events("GrantExpired")] == ["a"]
    assert known(lab).has_said


def test_a_holder_whose_end_was_seen_had_said_where_it_is(lab: Lab) -> None:
    """The report that ends its lease also strikes its registration off, and in this order."""
    lab.join("n1")
    lab.run(scripts.register(lab.group, "a", "n1", 7, '{"pid":7,"start":1,"pid_namespace":"pid:[1]"}'))
    lab.grant("a1", served=True)
    lab.report("n1", ended=[Exited("a", 7, 1)])
    assert lab.holder == ""
    assert known(lab).has_said


def test_what_has_to_register_is_told_when_the_grant_is_confirmed(lab: Lab) -> None:
    """A waiter that asked before its node was served learns with its first renewal that agents don't know it."""
    waits = lab.queue("a1", served=True)
    assert waits.registered
    lab.join("n1")
    assert lab.holder == "a1"
    renewed = lab.renew("a1", lab.number("token"), served=True)
    assert isinstance(renewed, Renewed)
    assert not renewed.registered
    lab.run(scripts.register(lab.group, "a", "n1", 7, '{"pid":7,"start":1,"pid_namespace":"pid:[1]"}'))
    assert lab.renew("a1", lab.number("token"), served=True).registered


def test_an_operator_s_word_lets_the_group_go_on(lab: Lab) -> None:
    """Who looked says that nothing of the job is there; the next one is granted, and agents learn up to which grant."""
    hidden(lab)
    lab.queue("b1", served=True)
    number = lab.counter
    assert "job a is on no device, by the word of eve@desk" in say_out(lab, "a")
    assert lab.holder == "b1"
    assert "a" not in lab.view.jobs or known(lab).out_at > number


def test_an_operator_s_word_ends_the_order_to_move_a_lost_holder_out(lab: Lab) -> None:
    """The holder's lease expired, and nobody can see it: after the word nothing is left to move."""
    lab.join("n1")
    lab.own()
    lab.grant("a1", served=True)
    lab.pass_time(31)
    lab.beat("n1")
    lab.report("n1", BLIND)
    lab.queue("b1", served=True)
    say_out(lab, "a")
    assert lab.holder == "b1"


def test_an_operator_s_word_is_asked_only_where_nobody_can_see(lab: Lab) -> None:
    """A job that is known to be on the device is not talked away, and nothing else is done either."""
    lab.join("n1")
    lab.release("a1", lab.grant("a1", served=True))
    with pytest.raises(RefusedError, match="job a is resident, which is known"):
        say_out(lab, "a")
    token = lab.grant("a2", served=True)
    with pytest.raises(RefusedError, match="job a holds the group"):
        say_out(lab, "a")
    assert lab.number("token") == token


def test_a_forgotten_node_takes_no_job_along_that_was_only_presumed_there(lab: Lab) -> None:
    """Job a has said that its processes are on n1; of n2, which died, nobody has to give anything up."""
    lab.join("n1", "n2")
    lab.run(scripts.register(lab.group, "a", "n1", 7, '{"pid":7,"start":1,"pid_namespace":"pid:[1]"}'))
    lab.grant("a1", served=True)
    lab.forget("n2")
    assert list(lab.view.nodes) == ["n1"]


def test_a_forgotten_node_with_a_job_s_state_on_it_needs_a_word(lab: Lab) -> None:
    """Its agent had seen the job there."""
    lab.join("n1", "n2")
    lab.run(scripts.register(lab.group, "a", "n1", 7, '{"pid":7,"start":1,"pid_namespace":"pid:[1]"}'))
    lab.release("a1", lab.grant("a1", served=True))
    lab.report("n2", Observed("a", "resident", device_bytes=5, backend="arena"))
    with pytest.raises(RefusedError, match="--lose a"):
        lab.forget("n2")


def test_a_loss_that_newcomers_have_hidden_is_noticed(lab: Lab) -> None:
    """All data was lost, and a new agent and coordinator began anew with higher numbers: who remembers an older one
    shows it, and nobody is granted while the others come back. Once."""
    lab.join("n1")
    token = lab.grant("a1", served=True)
    lab.lose_everything()
    while lab.view.now_ms <= token:  # it takes longer than a millisecond to lose everything
        pass
    lab.join("n9")
    lab.own()
    lab.run(scripts.heartbeat(lab.group, "n1", 15_000, fence=token, floor=token))
    assert len(lab.events("StateLost")) == 1
    assert isinstance(lab.ask("b1", served=True), Queued)
    assert lab.view.reason == "data was lost; waiting for agents and holders to come back"
    lab.run(scripts.heartbeat(lab.group, "n2", 15_000, floor=token))
    assert len(lab.events("StateLost")) == 1


def test_an_order_to_move_out_what_nobody_can_see_is_dropped(lab: Lab) -> None:
    """An operator had ordered a out, its swap went with lost data, and then nobody could see a: the order ends
    with the reason, and a itself goes on."""
    lab.join("n1")
    lab.release("a1", lab.grant("a1", served=True))
    lab.own()
    assert lab.run(scripts.evict(lab.group, "a", "eve", ""))
    lab.run(scripts.heartbeat(lab.group, "n1", 15_000, floor=lab.counter + 1000))
    assert lab.swap == 0
    lab.pass_time(31)
    lab.beat("n1")
    lab.report("n1", BLIND)
    assert isinstance(lab.ask("a2", served=True), Granted)
    assert lab.view.state["evict_reason"] == SAID
