"""drain and forget: a node is taken out of use, for a while or for good."""

from __future__ import annotations

import pytest

from tests.locks.lab import Lab
from timeslice.errors import RefusedError, UnknownNodeError
from timeslice.locks import scripts
from timeslice.locks.scripts import Granted, Observed, Renewed


def drain(lab: Lab, node: str, on: bool = True, by: str = "eve@desk") -> bool:
    return lab.run(scripts.drain(lab.group, node, on, by, "new driver"))


def forget(lab: Lab, node: str, *lose: str) -> None:
    lab.run(scripts.forget(lab.group, node, "eve@desk", "burnt down", lose=lose))


def test_nobody_is_let_in_while_a_node_is_drained(lab: Lab) -> None:
    """The holder keeps what it has, requests queue up, and the reason names the node and who drains it."""
    lab.join("n1", "n2")
    token = lab.grant("a1", served=True)
    drain(lab, "n1")
    assert isinstance(lab.renew("a1", token, served=True), Renewed)
    lab.release("a1", token)
    reply = lab.queue("a2", served=True)
    assert (reply.phase, reply.reason) == ("paused", "drained: node n1 by eve@desk")
    drain(lab, "n1", on=False)
    assert lab.holder == "a2"


def test_the_end_of_a_drain_ends_nothing_else(lab: Lab) -> None:
    """Not an operator's pause, and not the drain of another node; nor does resuming end a drain."""
    lab.join("n1", "n1.b", "n2")
    lab.run(scripts.pause(lab.group, True, "bob"))
    for node in ("n1.b", "n1", "n2"):
        drain(lab, node)
    lab.queue("a1", served=True)
    drain(lab, "n1", on=False)
    assert lab.view.state["drains"] == "node n1.b by eve@desk; node n2 by eve@desk"
    lab.run(scripts.pause(lab.group, False, "bob"))
    assert lab.view.phase == "paused"
    drain(lab, "n1.b", on=False)
    drain(lab, "n2", on=False)
    assert lab.holder == "a1"


def test_a_drain_may_be_repeated(plain: Lab) -> None:
    """The second changes nothing and says so; the events tell of one."""
    lab = plain
    lab.join("n1")
    assert [drain(lab, "n1"), drain(lab, "n1")] == [True, False]
    assert [drain(lab, "n1", on=False), drain(lab, "n1", on=False)] == [True, False]
    ((drained,), (ended,)) = lab.events("NodeDrained"), lab.events("NodeUndrained")
    assert (drained["node"], drained["by"], drained["reason"]) == ("n1", "eve@desk", "new driver")
    assert ended["by"] == "eve@desk"


def test_an_operators_odd_name_breaks_nothing(lab: Lab) -> None:
    """It may hold what separates entries."""
    lab.join("n1", "n2")
    drain(lab, "n1", by="a; node n2 by b")
    drain(lab, "n2")
    drain(lab, "n1", on=False)
    assert lab.view.state["drains"] == "node n2 by eve@desk"


def test_a_drained_group_can_be_cleared(lab: Lab) -> None:
    """That is what the drain is for."""
    lab.join("n1")
    lab.own()
    lab.release("a1", lab.grant("a1", served=True))
    drain(lab, "n1")
    assert lab.run(scripts.evict(lab.group, "a", "eve", ""))
    lab.carry_out(lab.own(), "n1", seen=[Observed("a", "suspended", 5)])
    assert (lab.view.phase, lab.view.resident) == ("paused", ())


def test_an_unknown_node_is_not_drained(lab: Lab) -> None:
    """A misspelt name pauses nothing."""
    lab.join("n1")
    with pytest.raises(UnknownNodeError, match="node n2 does not serve group g"):
        drain(lab, "n2")
    assert lab.view.state.get("drains", "") == ""


def test_a_node_is_not_forgotten_while_its_agent_lives(lab: Lab) -> None:
    """The script decides, so an agent that comes back in time is not taken out by a late order."""
    lab.join("n1")
    lab.pass_time(16)
    lab.beat("n1")
    with pytest.raises(RefusedError, match=r"is alive .* timeslice node drain n1"):
        forget(lab, "n1")
    assert list(lab.view.nodes) == ["n1"]


def test_a_node_with_state_on_it_is_forgotten_only_if_each_job_is_named(lab: Lab) -> None:
    """What is lost is in the event; a job that is elsewhere too keeps what it has there."""
    lab.join("n1", "n2")
    lab.release("a1", lab.grant("a1", served=True))
    lab.report("n2", Observed("b", "suspended", 5))
    lab.pass_time(16)
    lab.beat("n1")
    for given_up in ((), ("a",), ("b", "z")):
        with pytest.raises(RefusedError, match=r"has device state of job .*--lose"):
            forget(lab, "n2", *given_up)
    assert set(lab.view.nodes) == {"n1", "n2"}
    forget(lab, "n2", "a", "b")
    assert list(lab.view.nodes) == ["n1"]
    assert (lab.view.jobs["a"].residency, "b" in lab.view.jobs) == ("resident", False)
    (event,) = lab.events("NodeLeft")
    assert (event["by"], event["reason"], sorted(event["lost"].split())) == ("eve@desk", "burnt down", ["a", "b"])


def test_forgetting_twice_is_like_once(plain: Lab) -> None:
    """The reply to the first was lost."""
    lab = plain
    lab.join("n1")
    lab.pass_time(16)
    forget(lab, "n1")
    forget(lab, "n1")
    assert len(lab.events("NodeLeft")) == 1


def test_a_forgotten_node_is_not_drained_any_more(lab: Lab) -> None:
    """Else its group would wait for somebody to end the maintenance of a node that is gone."""
    lab.join("n1", "n2")
    drain(lab, "n2")
    lab.pass_time(16)
    lab.beat("n1")
    forget(lab, "n2")
    assert isinstance(lab.ask("a1", served=True), Granted)


def test_a_node_that_is_no_member_leaves_nothing(lab: Lab) -> None:
    """It was taken out, and reports before its next heartbeat: nothing is noted that nobody would ever remove. †"""
    lab.join("n1", "n2")
    lab.forget("n2")
    before = lab.redis.hgetall(lab.group.members)
    call = scripts.report(lab.group, "n2", lab.counter, [Observed("z", "suspended", 5)], [scripts.Exited("a", 7, 1)])
    assert lab.run(call) is None
    assert lab.redis.hgetall(lab.group.members) == before
    assert lab.view.jobs == {}
    lab.beat("n2")
    reported = lab.run(call)
    assert reported
    assert reported.ignored == 0
    assert lab.view.jobs["z"].residency == "suspended"
