"""What an agent's word that a process has ended does to its lease and its requests."""

from __future__ import annotations

from tests.locks.lab import Lab
from timeslice.locks import scripts
from timeslice.locks.scripts import Exited, Observed
from timeslice.models import Target


def registration(start: int, namespace: str = "pid:[1]") -> str:
    """What a process writes of itself."""
    return Target(
        job="a", host="n1", pid=7, start=start, uid=0, pid_namespace=namespace, tags=('{"start":2}', '"start":2,')
    ).model_dump_json()


def test_a_process_of_a_reused_pid_is_asked_to_register(lab: Lab) -> None:
    """What is on record is of the one that had the number before. No other word of it counts. †"""
    lab.join("n1")
    lab.run(scripts.register(lab.group, "a", "n1", 7, registration(start=1)))
    for start, known in ((1, True), (2, False), (11, False)):
        reply = lab.ask(f"a{start}", served=True, start=start)
        assert reply.registered is known, reply
        lab.cancel(f"a{start}")
    lab.run(scripts.register(lab.group, "a", "n1", 7, registration(start=2)))
    assert lab.ask("a2b", served=True, start=2).registered


def test_two_containers_may_have_the_same_number(lab: Lab) -> None:
    """Each is on record by itself, is told so when it asks, and goes by itself; repeating one changes nothing."""
    lab.join("n1")
    records = {1: registration(1), 2: registration(2, "pid:[2]")}
    for start in (1, 2, 1, 2):
        lab.run(scripts.register(lab.group, "a", "n1", 7, records[start]))
    assert lab.view.targets == {"a/n1/7": records[1], "a/n1/7@2": records[2]}
    for start, known in ((1, True), (2, True), (3, False)):
        assert lab.ask(f"a{start}", served=True, start=start).registered is known
        lab.cancel(f"a{start}")
    lab.report("n1", ended=[Exited("a", 7, 3), Exited("a", 7, 1)])
    lab.run(scripts.register(lab.group, "a", "n1", 7, records[2]))
    assert lab.view.targets == {"a/n1/7@2": records[2]}
    assert lab.ask("a4", served=True, start=2).registered
    lab.report("n1", ended=[Exited("a", 7, 2)])
    assert lab.view.targets == {}


def test_a_late_word_of_an_end_leaves_the_registration_of_the_next_process(lab: Lab) -> None:
    """The number was reused before the agent could tell. Of the one that ended nothing is left. †"""
    lab.join("n1")
    lab.run(scripts.register(lab.group, "a", "n1", 7, registration(start=2)))
    lab.report("n1", ended=[Exited("a", 7, 1)])
    assert list(lab.view.targets) == ["a/n1/7"]
    lab.report("n1", ended=[Exited("a", 7, 2)])
    assert lab.view.targets == {}


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
