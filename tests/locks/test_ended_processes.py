"""What an agent's word that a process has ended does to its lease and its requests."""

from __future__ import annotations

from tests.locks.lab import Lab
from timeslice.locks.scripts import Exited, Observed


def test_a_holder_whose_process_ended_is_reclaimed_at_once(lab: Lab) -> None:
    """Case L04. The agent saw it exit; no lease is waited for. Another process of the pid is not meant."""
    lab.join("n1")
    lab.grant("a1", served=True, pid=41, start=5)
    lab.report("n1", ended=[Exited("a", 41, 4)])
    assert lab.holder == "a1"
    lab.report("n1", Observed("a", "gone"), ended=[Exited("a", 41, 5)])
    assert lab.holder == ""
    assert [event["why"] for event in lab.events("LeaseReclaimed")] == ["its process ended"]


def test_requests_of_a_process_that_ended_leave_the_queue_at_once(lab: Lab) -> None:
    """Nobody waits 15 s for the dead. Another process of the number, or of another host, is not meant."""
    lab.join("n1")
    lab.grant("a1", served=True)
    lab.queue("b1", served=True, pid=41, start=5)
    lab.queue("c1", served=True, pid=41, start=6)
    lab.queue("d1", served=True, pid=41, start=5, host="n2")
    lab.report("n1", ended=[Exited("b", 41, 5)])
    assert [waiter.waiter for waiter in lab.view.queue] == ["c1", "d1"]
    assert [event["waiter"] for event in lab.events("WaiterReaped")] == ["b1"]
