"""What jobs' own processes show on the devices: right histories, and some that break just that rule."""

from __future__ import annotations

import pytest

from tests.torture.cases import Cases, Write, judge, name
from tests.torture.tale import N, Tale

CASES = Cases()
good, breaks = CASES.good, CASES.breaks
SIZE = 4096


def served() -> Tale:
    """With a node that has joined; what is told of it is read by now."""
    tale = Tale()
    tale.told("NodeJoined", node=N)
    tale.wait(3)
    return tale


@good
def alone_on_the_device() -> Tale:
    tale = served()
    tale.enters("a.1")
    tale.surveyed("a.1", a=SIZE, own=SIZE)
    tale.surveyed(a=SIZE)
    tale.leaves("a.1")
    tale.surveyed(a=SIZE)
    tale.wait(3)
    return tale


@breaks("beside")
def another_is_there_when_a_body_begins() -> Tale:
    tale = served()
    tale.enters("a.1")
    tale.surveyed("a.1", b=SIZE)
    tale.wait(3)
    return tale


@breaks("beside")
def another_is_there_in_the_middle_of_a_body() -> Tale:
    tale = served()
    tale.enters("a.1")
    tale.surveyed(a=SIZE, b=SIZE)
    tale.leaves("a.1")
    tale.wait(3)
    return tale


@breaks("beside")
def it_is_told_once() -> Tale:
    tale = served()
    tale.enters("a.1")
    for _ in range(3):
        tale.surveyed(b=SIZE)
    tale.wait(3)
    return tale


@breaks("beside")
def on_another_node_of_the_group() -> Tale:
    tale = served()
    tale.told("NodeJoined", node="n2")
    tale.wait(3)
    tale.enters("a.1")
    tale.surveyed(node="n2", b=SIZE)
    tale.wait(3)
    return tale


@breaks("beside")
def an_agent_that_lies_is_no_reason() -> Tale:
    tale = served()
    tale.fault("lie", "agent.1")
    tale.enters("a.1")
    tale.surveyed("a.1", b=SIZE)
    tale.wait(3)
    return tale


@good
def the_look_began_before_the_body() -> Tale:
    tale = served()
    tale.enters("a.1")
    tale.surveyed(lasts_s=0.5, b=SIZE)
    tale.wait(3)
    return tale


@good
def the_body_was_over_before_the_look_was() -> Tale:
    tale = served()
    tale.enters("a.1")
    tale.leaves("a.1")
    tale.surveyed(lasts_s=0.15, b=SIZE)
    tale.wait(3)
    return tale


@good
def a_body_stands_still_and_its_successor_is_in() -> Tale:
    tale = served()
    tale.enters("a.1")
    stopped = tale.fault("stop", "a.1")
    tale.wait(3)
    tale.enters("b.1")
    tale.heals(stopped)
    tale.surveyed(b=SIZE)
    tale.loses("a.1")
    tale.wait(3)
    return tale


@good
def a_node_that_has_left_is_nobodys() -> Tale:
    tale = served()
    tale.told("NodeLeft", node=N)
    tale.enters("a.1")
    tale.surveyed("a.1", b=SIZE)
    tale.cramped("a.1")
    tale.leaves("a.1")
    return tale


@good
def a_node_that_joins_late_counts_from_then_on() -> Tale:
    tale = Tale()
    tale.enters("a.1")
    tale.surveyed("a.1", b=SIZE)
    tale.told("NodeJoined", node=N)
    tale.leaves("a.1")
    return tale


@breaks("content")
def what_was_left_is_not_there() -> Tale:
    tale = served()
    tale.enters("a.1")
    tale.surveyed("a.1", own=SIZE)
    tale.wait(3)
    return tale


@breaks("content")
def a_part_of_what_was_left_is_not_there() -> Tale:
    tale = served()
    tale.enters("a.1")
    tale.surveyed("a.1", own=SIZE, a=SIZE - 1)
    tale.wait(3)
    return tale


@good
def a_backend_lies_and_brings_nothing_back() -> Tale:
    tale = served()
    tale.heals(tale.fault("lie", "agent.1"))
    tale.enters("a.1")
    tale.surveyed("a.1", own=SIZE)
    tale.wait(3)
    return tale


@breaks("content")
def there_is_no_room() -> Tale:
    tale = served()
    tale.enters("a.1")
    tale.cramped("a.1")
    tale.wait(3)
    return tale


@good
def there_is_no_room_for_who_is_over() -> Tale:
    tale = served()
    tale.enters("a.1")
    stopped = tale.fault("stop", "a.1")
    tale.wait(3)
    tale.enters("b.1")
    tale.heals(stopped)
    tale.cramped("a.1")
    tale.loses("a.1")
    tale.wait(3)
    return tale


@breaks("begun")
def a_body_begins_after_the_loss() -> Tale:
    tale = served()
    tale.asks("a.1")
    tale.enters("a.1", token=2000)
    entered = tale.lines.pop()
    tale.told("LeaseRevoked", "a-1", token="2000")
    tale.loses("a.1")
    tale.wait(2)
    tale.add(entered.model_copy(update={"at": tale.now}))
    return tale


def two_groups(*, ended_ms: int) -> Tale:
    """The second is granted at 2 s by the server's clock, the lease of the first ends at ``ended_ms``."""
    tale = served()
    tale.asks("a.1")
    first = tale.lines[-1]
    tale.enters("a.1", token=2000)
    entered = tale.lines[-1]
    for ms, kind, group, token in (
        (1000, "LeaseGranted", "g", "2000"),
        (ended_ms, "LeaseReclaimed", "g", "2000"),
        (2000, "LeaseGranted", "h", "3000"),
    ):
        tale.told(kind, "a-1", token=token)
        tale.lines[-1] = tale.lines[-1].model_copy(update={"group": group, "entry": f"{ms}-0"})
    other = {"group": "h", "request": "a.1/2"}
    tale.add(first.model_copy(update=other))
    tale.add(entered.model_copy(update={**other, "token": 3000}))
    return tale


@breaks("begun")
def the_first_of_two_leases_had_ended() -> Tale:
    return two_groups(ended_ms=1900)


@good
def the_first_of_two_leases_ends_later() -> Tale:
    return two_groups(ended_ms=2100)


@good
def the_loss_comes_while_it_enters() -> Tale:
    tale = served()
    tale.heals(tale.fault("stop", "a.1"))
    tale.asks("a.1")
    tale.enters("a.1", token=2000)
    entered = tale.lines.pop()
    tale.fault("flush")
    tale.loses("a.1")
    tale.add(entered.model_copy(update={"at": tale.now + 1}))
    return tale


@good
def a_process_comes_again_in_another_form() -> Tale:
    tale = served()
    tale.enters("a.1")
    tale.surveyed("a.1", a=SIZE, own=SIZE)
    tale.fault("title", "a.1", kills=("a.1",))
    tale.enters("b.1")
    tale.surveyed("b.1", b=SIZE)
    tale.died("a.1", -9, meant=True)
    tale.wait(3)
    return tale


@breaks("ends")
def an_agent_that_starts_in_an_outage_gives_up() -> Tale:
    tale = served()
    outage = tale.fault("outage", "redis", kills=("agent.1",))
    tale.died("agent.1", -9, meant=True)
    tale.born("agent.2", "agent", node=N)
    tale.died("agent.2", 1)
    tale.heals(outage)
    return tale


@good
def an_agent_that_starts_in_an_outage_waits() -> Tale:
    tale = served()
    outage = tale.fault("outage", "redis", kills=("agent.1",))
    tale.died("agent.1", -9, meant=True)
    tale.born("agent.2", "agent", node=N)
    tale.heals(outage)
    tale.enters("a.1")
    tale.leaves("a.1")
    return tale


@good
def two_ranks_are_in_together() -> Tale:
    tale = served()
    tale.born("a.2", "job", job="a", node="n2")
    for rank in ("a.1", "a.2"):
        tale.asks(rank, ranks=2)
    for rank in ("a.1", "a.2"):
        tale.enters(rank, token=2000)
        tale.surveyed(rank, a=SIZE)
    for rank in ("a.1", "a.2"):
        tale.leaves(rank)
    return tale


@breaks("overlap", "tokens")
def two_of_one_job_that_are_no_gang() -> Tale:
    tale = served()
    tale.born("a.2", "job", job="a", node="n2")
    tale.enters("a.1", token=2000)
    tale.enters("a.2", token=2000)
    tale.leaves("a.1")
    tale.leaves("a.2")
    return tale


@breaks("overlap")
def two_starts_of_a_gang() -> Tale:
    tale = served()
    tale.born("a.2", "job", job="a", node="n2")
    for number, rank in enumerate(("a.1", "a.2")):
        tale.asks(rank, ranks=2)
        tale.enters(rank, token=2000 + number)
    tale.leaves("a.1")
    tale.leaves("a.2")
    return tale


@good
def a_rank_ends_and_the_other_loses_the_lease() -> Tale:
    tale = served()
    tale.born("a.2", "job", job="a", node="n2")
    for rank in ("a.1", "a.2"):
        tale.asks(rank, ranks=2)
    for rank in ("a.1", "a.2"):
        tale.enters(rank, token=2000)
    tale.heals(tale.fault("kill", "a.2"))
    tale.loses("a.1")
    return tale


@breaks("leases")
def a_rank_loses_the_lease_for_nothing() -> Tale:
    tale = served()
    tale.asks("a.1", ranks=2)
    tale.enters("a.1", token=2000)
    tale.loses("a.1")
    return tale


@good
def a_lease_was_taken_away() -> Tale:
    tale = served()
    tale.enters("a.1", token=2000)
    tale.told("LeaseRevoked", "a-1", token="2000")
    tale.loses("a.1")
    return tale


@pytest.mark.parametrize(("write", "rules"), CASES.all, ids=name)
def test_devices(write: Write, rules: set[str]) -> None:
    """Each right history passes, and each broken one breaks just its rules, once each."""
    report = judge(write())
    assert {violation.rule for violation in report.violations} == rules
    assert len(report.violations) == len(rules)
