"""Whose state is where when somebody is in: right histories, and some that break just that rule."""

from __future__ import annotations

import pytest

from tests.torture.cases import Cases, Write, judge, name
from tests.torture.tale import Tale

CASES = Cases()
good, breaks = CASES.good, CASES.breaks


def _swapped(*steps: str) -> Tale:
    tale = Tale()
    for who in ("a.1", "b.1"):
        tale.enters(who)
        tale.checks(who, "x", "x")
        tale.leaves(who)
        tale.moves(who[0], "prepare", "suspend")
    tale.moves("a", *steps)
    tale.enters("a.1")
    return tale


@good
def restored_and_released() -> Tale:
    return _swapped("restore", "release")


@good
def the_agent_died_before_it_said_that_it_released() -> Tale:
    return _swapped("restore", "release begin")


@good
def a_restore_without_an_end_and_then_let_run() -> Tale:
    return _swapped("restore begin", "abort")


@breaks("restored")
def never_restored() -> Tale:
    return _swapped()


@breaks("restored")
def restore_failed() -> Tale:
    return _swapped("restore begin", "restore failed")


@breaks("restored")
def never_released() -> Tale:
    return _swapped("restore")


@good
def a_new_process_has_nothing_to_restore() -> Tale:
    tale = Tale()
    tale.enters("a.1")
    tale.leaves("a.1")
    tale.moves("a", "prepare", "suspend")
    tale.fault("kill", "a.1")
    tale.born("a.2", "job", job="a", node="n1")
    tale.enters("a.2")
    return tale


@good
def a_step_ends_after_its_process_was_replaced() -> Tale:
    tale = Tale()
    tale.enters("a.1")
    tale.leaves("a.1")
    tale.moves("a", "prepare", "suspend begin")
    tale.fault("kill", "a.1")
    tale.born("a.2", "job", job="a", node="n1")
    tale.moves("a", "suspend done")
    tale.enters("a.2")
    return tale


@good
def a_backend_lied() -> Tale:
    tale = Tale()
    tale.enters("a.1")
    tale.leaves("a.1")
    fault = tale.fault("lie")
    tale.moves("a", "prepare", "suspend")
    tale.heals(fault)
    tale.enters("a.1")
    return tale


@breaks("restored")
def a_backend_lied_long_ago() -> Tale:
    tale = Tale()
    tale.enters("a.1")
    tale.leaves("a.1")
    tale.heals(tale.fault("lie"))
    tale.moves("a", "prepare", "suspend")
    tale.enters("a.1")
    return tale


@breaks("resident")
def before_the_other_was_out() -> Tale:
    tale = Tale()
    tale.enters("a.1")
    tale.checks("a.1", "x", "x")
    tale.leaves("a.1")
    tale.enters("b.1")
    return tale


@breaks("resident")
def before_the_other_was_out_again() -> Tale:
    tale = _swapped("restore", "release")
    tale.leaves("a.1")
    tale.enters("c.1")
    return tale


@good
def the_other_may_have_loaded_nothing() -> Tale:
    tale = Tale()
    tale.enters("a.1")
    tale.leaves("a.1")
    tale.enters("b.1")
    return tale


@good
def the_other_is_dead() -> Tale:
    tale = Tale()
    tale.enters("a.1")
    tale.checks("a.1", "x", "x")
    tale.leaves("a.1")
    tale.enters("b.1")
    tale.died("a.1", 0, meant=True)
    return tale


@good
def the_other_is_dead_and_the_run_looked_late() -> Tale:
    """It was busy with a fault, or with nothing, and had not looked for two seconds."""
    tale = Tale()
    tale.enters("a.1")
    tale.checks("a.1", "x", "x")
    tale.leaves("a.1")
    tale.enters("b.1")
    tale.wait(1.8)
    tale.died("a.1", 0, meant=True, seen_s=2.2)
    return tale


@breaks("resident")
def the_other_was_seen_to_run_after_that() -> Tale:
    tale = Tale()
    tale.enters("a.1")
    tale.checks("a.1", "x", "x")
    tale.leaves("a.1")
    tale.enters("b.1")
    tale.wait(0.3)
    tale.died("a.1", 0, meant=True, seen_s=0.2)
    return tale


@good
def the_other_ended_while_it_was_brought_back() -> Tale:
    """The agent has not heard of it yet, and goes on with what is no more; what it measures tells."""
    tale = _swapped("restore begin")
    tale.died("a.1", 0, meant=True)
    tale.measured()
    tale.moves("a", "restore done", "release begin")
    tale.measured()
    tale.moves("a", "release done")
    tale.enters("c.1")
    return tale


@breaks("resident")
def the_other_was_measured_when_it_was_back() -> Tale:
    tale = _swapped("restore", "release begin")
    tale.measured("a")
    tale.moves("a", "release done")
    tale.measured()  # of another step, and it does not undo what was certain
    tale.leaves("a.1")
    tale.enters("c.1")
    return tale


@good
def a_line_written_after_the_state_was_moved_out() -> Tale:
    tale = Tale()
    tale.enters("a.1")
    tale.told("LeaseReclaimed", "a-1", token="1001")
    tale.moves("a", "prepare", "suspend")
    tale.checks("a.1", "x", "x")
    tale.enters("b.1")
    return tale


@good
def one_that_comes_beside_one_that_is_just_leaving() -> Tale:
    """Where both fit, one is copied in while the other is copied out; nobody runs meanwhile."""
    tale = Tale()
    tale.moves("a", "prepare", "suspend begin")
    tale.moves("b", "restore")
    tale.measured("a", "b")
    tale.moves("a", "suspend done")
    tale.measured("b")
    return tale


@breaks("device")
def one_that_has_left_and_is_still_there() -> Tale:
    """A suspend that has ended leaves nothing on the device."""
    tale = Tale()
    tale.moves("a", "prepare", "suspend")
    tale.moves("b", "restore")
    tale.measured("a", "b")
    return tale


@breaks("device")
def two_on_a_device() -> Tale:
    tale = Tale()
    tale.measured("a")
    tale.measured("a", "b")
    return tale


@breaks("touched")
def a_holder_is_moved() -> Tale:
    tale = Tale()
    tale.granted("a-1")
    tale.enters("a.1", token=tale.token)
    tale.moves("a", "prepare", "abort")
    tale.leaves("a.1")
    tale.told("LeaseYielded", "a-1", token="1001")
    return tale


@breaks("touched")
def a_holder_is_moved_whose_grant_was_never_told() -> Tale:
    tale = Tale()
    tale.enters("a.1")
    tale.moves("a", "prepare", "suspend", "restore", "release")
    tale.leaves("a.1")
    return tale


@breaks("touched")
def a_holder_is_moved_after_its_lease_was_put_back() -> Tale:
    tale = Tale()
    tale.granted("a-1")
    tale.enters("a.1", token=tale.token)
    tale.told("StateLost")
    tale.told("LeaseReinstalled", "a-1", token="1001")
    tale.moves("a", "prepare", "abort")
    return tale


@breaks("touched")
def a_holder_is_moved_while_it_is_stopped_for_a_moment() -> Tale:
    tale = Tale()
    tale.granted("a-1")
    tale.enters("a.1", token=tale.token)
    fault = tale.fault("stop", "a.1")
    tale.moves("a", "prepare", "abort")
    tale.heals(fault)
    return tale


@good
def moved_after_it_was_revoked() -> Tale:
    tale = Tale()
    tale.granted("a-1")
    tale.enters("a.1", token=tale.token)
    tale.moves("a", "prepare begin")
    tale.told("LeaseReclaimed", "a-1", token="1001")
    tale.moves("a", "prepare done", "suspend")
    return tale


@good
def moved_while_its_end_can_not_be_read() -> Tale:
    tale = Tale()
    tale.granted("a-1")
    tale.enters("a.1", token=tale.token)
    tale.fault("stop", "server.1")
    tale.moves("a", "prepare", "suspend")
    return tale


@pytest.mark.parametrize(("write", "broken"), CASES.all, ids=name)
def test_a_history_breaks_just_the_rules_that_it_should(write: Write, broken: set[str]) -> None:
    """No false alarm on what the design allows; what it does not is caught, by the rule that is about it alone."""
    assert {violation.rule for violation in judge(write()).violations} == broken
