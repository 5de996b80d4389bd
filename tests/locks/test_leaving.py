"""An agent leaves the group: what keeps its node, and what does not."""

from __future__ import annotations

import pytest

from tests.locks.lab import Lab
from timeslice.locks import scripts
from timeslice.locks.scripts import Exited, Granted, Observed


def test_an_agent_that_leaves_state_behind_stays_a_member(lab: Lab) -> None:
    """Job a is on its device: nobody else can vouch for that, so the group waits for the agent's return."""
    lab.join("n1", "n2")
    lab.release("a1", lab.grant("a1", served=True))
    assert lab.run(scripts.leave(lab.group, "n1")) is False
    lab.report("n2", Observed("a", "absent"))
    assert "node n1 unreachable since" in lab.queue("b1", served=True).reason
    lab.beat("n1")
    assert lab.holder == ""
    assert lab.view.state["swap_waiter"] == "b1"


def test_an_agent_that_leaves_nothing_behind_is_gone(lab: Lab) -> None:
    """Its node is no member any more, and what others tell is enough."""
    lab.join("n1", "n2")
    assert lab.run(scripts.leave(lab.group, "n2")) is True
    assert list(lab.view.nodes) == ["n1"]
    assert isinstance(lab.ask("b1", served=True), Granted)


def test_an_agent_that_saw_nothing_of_the_holder_is_gone(lab: Lab) -> None:
    """Who is let in is taken to be on every node; an agent that leaves knows better of its own, and of no other's."""
    lab.join("n1", "n2", "n3")
    lease = lab.grant("a1", served=True)
    assert lab.run(scripts.leave(lab.group, "n2", ["b", "a"])) is True
    assert lab.holder == "a1"
    assert lab.run(scripts.leave(lab.group, "n3", ["b"])) is False
    lab.release("a1", lease)
    lab.beat("n3")
    lab.report("n3", Observed("a", "absent"))
    assert (list(lab.view.resident), list(lab.view.nodes)) == (["a"], ["n1", "n3"])


def test_the_holder_stays_on_record_when_the_last_node_leaves(lab: Lab) -> None:
    """It may have loaded something where no agent is: that is not forgotten, or the next one would share the device."""
    lab.join("n1")
    lease = lab.grant("a1", served=True)
    assert lab.run(scripts.leave(lab.group, "n1", ["a"])) is True
    lab.release("a1", lease)
    assert (list(lab.view.resident), list(lab.view.nodes)) == (["a"], [])


def test_a_node_that_leaves_before_its_first_word_is_not_waited_for(lab: Lab) -> None:
    """It has joined and told nothing yet; who waited for its word is let in by its leaving, not by a later call."""
    lab.join("n1")
    lab.beat("n2")
    lab.queue("b1", served=True)
    assert "n2 joined" in lab.view.state["reason"]
    assert lab.run(scripts.leave(lab.group, "n2")) is True
    assert lab.holder == "b1"


def test_a_process_that_came_after_the_last_look_keeps_the_node(lab: Lab) -> None:
    """It registered, and may load something: the agent that leaves has not seen it. One on another node does not."""
    lab.join("n1", "n2", "n3")
    lab.grant("a1", served=True)
    record = '{"start": 5}'
    assert lab.run(scripts.register(lab.group, "a", "n2", 77, record))
    assert lab.run(scripts.leave(lab.group, "n2", ["a"])) is False
    assert lab.run(scripts.leave(lab.group, "n3", ["a"])) is True
    lab.beat("n2")
    lab.report("n2", ended=[Exited("a", 77, 5)])
    assert lab.run(scripts.leave(lab.group, "n2", ["a"])) is True


@pytest.mark.parametrize("state", ["suspended", "suspending", "restoring", "faulted"])
def test_what_was_seen_of_a_job_is_not_taken_back_by_leaving(lab: Lab, state: str) -> None:
    """That a node has a job's copy, or is in doubt of it, was told by its agent: an empty look does not undo that."""
    lab.join("n1", "n2")
    lab.report("n2", Observed("a", state))
    assert lab.run(scripts.leave(lab.group, "n2", ["a"])) is False
    assert "n2" in lab.view.nodes
