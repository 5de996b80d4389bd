"""The judge on who was on a node's device before it was one of the group, and on who is just being moved out."""

from __future__ import annotations

import pytest

from tests.torture.cases import Cases, Write, judge, name
from tests.torture.tale import N, Tale
from tests.torture.test_checker_devices import SIZE, served

CASES = Cases()
good, breaks = CASES.good, CASES.breaks


def two_came_while_the_node_was_away() -> Tale:
    tale = served()
    tale.told("NodeLeft", node=N)
    tale.enters("a.1")
    tale.moves("a", "restore")
    tale.leaves("a.1")
    tale.enters("b.1")
    tale.surveyed("b.1", a=SIZE)
    tale.leaves("b.1")
    tale.surveyed(a=SIZE, b=SIZE)
    tale.wait(0.5)
    tale.told("NodeJoined", node=N)
    return tale


@good
def who_came_before_the_node_is_found_beside_another() -> Tale:
    tale = two_came_while_the_node_was_away()
    tale.measured("a", "b")
    return tale


@good
def a_node_joins_with_another_job_while_a_body_runs() -> Tale:
    tale = served()
    tale.told("NodeLeft", node="n2")
    tale.enters("a.1")
    tale.surveyed(node="n2", b=SIZE)
    tale.wait(0.5)
    tale.told("NodeJoined", node="n2")
    tale.surveyed(node="n2", b=SIZE)
    tale.wait(3)
    tale.leaves("a.1")
    return tale


@breaks("beside")
def a_body_begins_beside_who_was_there_when_the_node_joined() -> Tale:
    tale = served()
    tale.surveyed(node="n2", b=SIZE)
    tale.wait(0.5)
    tale.told("NodeJoined", node="n2")
    tale.wait(3)
    tale.enters("a.1")
    tale.surveyed(node="n2", b=SIZE)
    tale.wait(3)
    tale.leaves("a.1")
    return tale


@breaks("device")
def another_comes_beside_who_was_there_before_the_node() -> Tale:
    tale = two_came_while_the_node_was_away()
    tale.measured("a", "b", "c")
    return tale


@breaks("device")
def two_come_as_the_node_joins() -> Tale:
    tale = served()
    tale.told("NodeLeft", node=N)
    tale.wait(2)
    tale.told("NodeJoined", node=N)
    tale.surveyed(a=SIZE, b=SIZE)
    tale.measured("a", "b")
    return tale


@breaks("device")
def who_was_being_moved_out_by_an_agent_that_died() -> Tale:
    tale = served()
    tale.moves("a", "suspend begin")
    tale.heals(tale.fault("kill", "agent.1"))
    tale.died("agent.1", -9, meant=True)
    tale.born("agent.2", "agent", node=N)
    tale.measured("a", "b")
    return tale


@breaks("device")
def who_came_before_the_node_was_moved_out_since() -> Tale:
    tale = two_came_while_the_node_was_away()
    tale.moves("a", "suspend", "restore")
    tale.measured("a", "b")
    return tale


@pytest.mark.parametrize(("write", "rules"), CASES.all, ids=name)
def test_joins(write: Write, rules: set[str]) -> None:
    """Each right history passes, and each broken one breaks just its rules, once each."""
    report = judge(write())
    assert {violation.rule for violation in report.violations} == rules
    assert len(report.violations) == len(rules)
