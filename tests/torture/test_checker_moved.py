"""Bodies whose state an agent says it moved: right histories, and some that break just that rule."""

from __future__ import annotations

import pytest

from tests.torture.cases import Cases, Write, judge, name
from tests.torture.tale import Tale

CASES = Cases()
good, breaks = CASES.good, CASES.breaks


def _moved_out(*steps: str) -> Tale:
    """The job of a body, and the next one is in."""
    tale = Tale()
    tale.enters("a.1")
    tale.told("LeaseReclaimed", "a-1", token="1001")
    tale.moves("a", *steps)
    tale.enters("b.1")
    return tale


@breaks("overlap")
def works_on_although_it_was_said_to_be_moved_out() -> Tale:
    tale = _moved_out("prepare", "suspend")
    tale.checks("a.1", "x", "x")
    return tale


@breaks("overlap")
def leaves_by_itself_although_it_was_said_to_be_moved_out() -> Tale:
    tale = _moved_out("prepare", "suspend")
    tale.leaves("a.1")
    return tale


@good
def writes_what_it_did_before_it_was_stopped_and_moved_out() -> Tale:
    tale = Tale()
    tale.enters("a.1")
    stop = tale.fault("stop", "a.1")
    tale.wait(3)
    tale.told("LeaseReclaimed", "a-1", token="1001")
    tale.moves("a", "prepare", "suspend")
    tale.enters("b.1")
    tale.heals(stop)
    tale.checks("a.1", "x", "x")
    tale.loses("a.1")
    return tale


@good
def hears_of_its_loss_after_it_was_moved_out() -> Tale:
    tale = _moved_out("prepare", "suspend")
    tale.fault("cut")
    tale.wait(4)
    tale.loses("a.1")
    return tale


@breaks("overlap")
def an_agent_is_killed_before_it_has_locked_anything() -> Tale:
    tale = Tale()
    tale.enters("a.1")
    tale.told("LeaseReclaimed", "a-1", token="1001")
    tale.moves("a", "prepare begin")
    tale.fault("kill", "agent.1")
    tale.enters("b.1")
    return tale


@good
def an_agent_is_killed_and_the_next_one_moves_out() -> Tale:
    tale = Tale()
    tale.enters("a.1")
    tale.told("LeaseReclaimed", "a-1", token="1001")
    tale.moves("a", "prepare begin")
    tale.fault("kill", "agent.1")
    tale.moves("a", "prepare", "suspend begin")
    tale.enters("b.1")
    return tale


@breaks("overlap")
def what_an_agent_left_half_done_does_not_hide_the_next_body() -> Tale:
    tale = Tale()
    tale.moves("a", "prepare", "suspend begin")
    tale.fault("kill", "agent.1")
    tale.enters("a.1")
    tale.enters("b.1")
    return tale


@good
def writes_what_it_did_before_it_was_stopped_and_the_next_is_in_before_it_hears() -> Tale:
    tale = Tale()
    tale.enters("a.1")
    tale.told("LeaseReclaimed", "a-1", token="1001")
    tale.moves("a", "prepare begin")
    stop = tale.fault("stop", "a.1")
    tale.wait(3)
    tale.moves("a", "prepare done", "suspend")
    tale.heals(stop)
    tale.checks("a.1", "x", "x")
    tale.enters("b.1")
    tale.loses("a.1")
    return tale


@good
def works_on_while_it_is_let_run_again() -> Tale:
    tale = _moved_out("prepare", "suspend")
    tale.leaves("b.1")
    fault = tale.fault("cut")
    tale.wait(3)
    tale.moves("a", "restore", "release begin")
    tale.checks("a.1", "x", "x")
    tale.moves("a", "release done")
    tale.heals(fault)
    tale.loses("a.1")
    return tale


@good
def what_an_agent_left_half_done_does_not_hide_the_next_touch() -> Tale:
    tale = Tale()
    tale.moves("a", "restore", "release begin")
    tale.moves("a", "prepare", "suspend", "restore", "release begin")
    tale.fault("kill", "agent.1")
    tale.enters("a.1")
    tale.told("LeaseReclaimed", "a-1", token="1001")
    tale.moves("a", "prepare", "suspend")
    tale.enters("b.1")
    return tale


@pytest.mark.parametrize(("write", "broken"), CASES.all, ids=name)
def test_a_history_breaks_just_the_rules_that_it_should(write: Write, broken: set[str]) -> None:
    """No false alarm on what the design allows; what it does not is caught, by the rule that is about it alone."""
    assert {violation.rule for violation in judge(write()).violations} == broken
