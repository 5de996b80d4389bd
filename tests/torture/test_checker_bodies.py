"""Who is in at one time, and with which token: right histories, and some that break just that rule."""

from __future__ import annotations

import pytest

from tests.torture.cases import Cases, Write, judge, name
from tests.torture.tale import Tale

CASES = Cases()
good, breaks = CASES.good, CASES.breaks


@good
def turns() -> Tale:
    tale = Tale()
    for who in ("a.1", "b.1", "a.1"):
        tale.enters(who)
        tale.leaves(who)
    return tale


@breaks("overlap")
def two_in() -> Tale:
    tale = Tale()
    tale.enters("a.1")
    tale.enters("b.1")
    return tale


@breaks("overlap")
def two_of_one_job_in() -> Tale:
    tale = Tale()
    tale.born("a.2", "job", job="a", node="n1")
    tale.enters("a.1")
    tale.enters("a.2")
    return tale


@good
def killed_inside() -> Tale:
    tale = Tale()
    tale.enters("a.1")
    tale.fault("kill", "a.1")
    tale.enters("b.1")
    return tale


@good
def ended_inside_before_the_run_saw_it() -> Tale:
    tale = Tale()
    tale.enters("a.1")
    tale.enters("b.1")
    tale.died("a.1", -9, meant=True, seen_s=0.25)
    return tale


@breaks("overlap")
def ended_inside_and_was_seen_to_run_beside_the_next() -> Tale:
    tale = Tale()
    tale.enters("a.1")
    tale.enters("b.1")
    tale.wait(0.4)
    tale.died("a.1", -9, meant=True, seen_s=0.25)
    return tale


@breaks("overlap")
def ended_inside_and_wrote_beside_the_next_while_nobody_looked() -> Tale:
    tale = Tale()
    tale.enters("a.1")
    tale.enters("b.1")
    tale.wait(1)
    tale.checks("a.1", "x", "x")
    tale.died("a.1", -9, meant=True, seen_s=5)
    return tale


@good
def stopped_past_its_lease() -> Tale:
    tale = Tale()
    tale.enters("a.1")
    fault = tale.fault("stop", "a.1")
    tale.wait(3)
    tale.enters("b.1")
    tale.heals(fault)
    tale.wait(0.2)
    tale.loses("a.1")
    tale.leaves("b.1")
    return tale


@breaks("overlap")
def stopped_past_its_lease_and_never_told() -> Tale:
    tale = Tale()
    tale.enters("a.1")
    fault = tale.fault("stop", "a.1")
    tale.wait(3)
    tale.enters("b.1")
    tale.heals(fault)
    tale.wait(2)
    tale.leaves("b.1")
    tale.leaves("a.1")
    return tale


@good
def continued_but_the_server_is_away() -> Tale:
    tale = Tale()
    tale.enters("a.1")
    stop = tale.fault("stop", "a.1")
    tale.wait(3)
    tale.enters("b.1")
    away = tale.fault("stop", "server.1")
    tale.heals(stop)
    tale.wait(2)
    tale.heals(away)
    tale.loses("a.1")
    tale.leaves("b.1")
    return tale


@breaks("overlap")
def continued_in_time_and_still_the_holder() -> Tale:
    tale = Tale()
    tale.enters("a.1")
    fault = tale.fault("stop", "a.1")
    tale.wait(0.5)
    tale.heals(fault)
    tale.enters("b.1")
    return tale


@breaks("overlap")
def continued_and_in_with_the_next_for_a_moment() -> Tale:
    tale = Tale()
    tale.enters("a.1")
    tale.heals(tale.fault("stop", "a.1"))
    tale.enters("b.1")
    tale.leaves("a.1")
    return tale


@good
def moved_out_before_the_next() -> Tale:
    tale = Tale()
    tale.enters("a.1")
    tale.told("LeaseReclaimed", "a-1", token="1001")
    tale.moves("a", "prepare", "suspend")
    tale.enters("b.1")
    return tale


@breaks("overlap")
def prepared_on_another_node() -> Tale:
    tale = Tale()
    tale.enters("a.1")
    tale.told("LeaseReclaimed", "a-1", token="1001")
    tale.moves("a", "prepare", "suspend", node="n2")
    tale.enters("b.1")
    return tale


@breaks("overlap")
def runs_on_after_its_lease() -> Tale:
    tale = Tale()
    tale.enters("a.1")
    tale.told("LeaseReclaimed", "a-1", token="1001")
    tale.moves("a", "prepare begin", "prepare failed")
    tale.enters("b.1")
    tale.wait(1)
    tale.leaves("b.1")
    return tale


@breaks("overlap")
def only_one_of_the_two_is_lock_only() -> Tale:
    tale = Tale()
    tale.enters("a.1")
    tale.fault("cut")
    tale.wait(3)
    tale.lock_only = True
    tale.enters("b.1")
    tale.loses("a.1")
    return tale


@good
def a_lock_only_lease_ends_on_both_sides() -> Tale:
    tale = Tale(lock_only=True)
    tale.enters("a.1")
    tale.fault("cut")
    tale.wait(3)
    tale.enters("b.1")
    tale.loses("a.1")
    return tale


@breaks("overlap")
def a_lock_only_lease_ends_too_late() -> Tale:
    tale = Tale(lock_only=True)
    tale.enters("a.1")
    tale.heals(tale.fault("cut"))
    tale.enters("b.1")
    tale.wait(0.6)
    tale.loses("a.1")
    return tale


@good
def a_lock_only_group_loses_its_data() -> Tale:
    tale = Tale(lock_only=True)
    tale.enters("a.1")
    tale.heals(tale.fault("flush"))
    tale.enters("b.1")
    tale.wait(1)
    tale.loses("a.1")
    tale.leaves("b.1")
    return tale


@breaks("overlap")
def a_lock_only_group_never_finds_its_data_lost() -> Tale:
    tale = Tale(lock_only=True)
    tale.enters("a.1")
    tale.heals(tale.fault("flush"))
    tale.enters("b.1")
    tale.wait(2)
    tale.leaves("a.1")
    tale.leaves("b.1")
    return tale


@breaks("overlap")
def a_served_group_loses_its_data() -> Tale:
    tale = Tale()
    tale.enters("a.1")
    tale.heals(tale.fault("flush"))
    tale.enters("b.1")
    tale.loses("a.1")
    return tale


@breaks("tokens")
def a_token_falls() -> Tale:
    tale = Tale()
    tale.enters("a.1", token=7)
    tale.leaves("a.1")
    tale.enters("b.1", token=6)
    return tale


@breaks("tokens")
def a_token_is_given_twice() -> Tale:
    tale = Tale()
    tale.enters("a.1", token=7)
    tale.leaves("a.1")
    tale.enters("b.1", token=7)
    return tale


@breaks("tokens")
def a_grant_falls_after_data_loss() -> Tale:
    tale = Tale()
    tale.granted("a-1", token=7)
    tale.heals(tale.fault("flush"))
    tale.granted("b-1", token=3)
    return tale


@good
def a_lock_only_group_starts_anew_after_its_clock_was_ahead_and_its_data_lost() -> Tale:
    tale = Tale(lock_only=True)
    tale.heals(tale.fault("clock"))
    tale.enters("a.1", token=7)
    tale.granted("a-1", token=7)
    tale.leaves("a.1")
    tale.heals(tale.fault("flush"))
    tale.granted("b-1", token=6)
    tale.enters("b.1", token=6)
    tale.leaves("b.1")
    return tale


@breaks("tokens")
def a_lock_only_group_loses_its_data_under_a_true_clock() -> Tale:
    tale = Tale(lock_only=True)
    tale.enters("a.1", token=7)
    tale.leaves("a.1")
    tale.heals(tale.fault("flush"))
    tale.enters("b.1", token=6)
    tale.leaves("b.1")
    return tale


@good
def a_lease_is_put_back_after_data_loss() -> Tale:
    tale = Tale()
    tale.granted("a-1", token=7)
    tale.heals(tale.fault("flush"))
    tale.told("LeaseReinstalled", "a-1", token="7")
    tale.granted("b-1", token=9)
    return tale


@good
def stopped_between_grant_and_entry() -> Tale:
    tale = Tale()
    tale.asks("a.1")
    fault = tale.fault("stop", "a.1")
    tale.wait(3)
    tale.enters("b.1", token=7)
    tale.leaves("b.1")
    tale.heals(fault)
    tale.enters("a.1", token=6)
    tale.loses("a.1")
    return tale


@breaks("tokens")
def stopped_and_then_in_with_a_token_that_is_in_use() -> Tale:
    tale = Tale()
    tale.asks("a.1")
    fault = tale.fault("stop", "a.1")
    tale.enters("b.1", token=7)
    tale.leaves("b.1")
    tale.heals(fault)
    tale.enters("a.1", token=7)
    return tale


@good
def entered_late_for_it_waited_for_a_second_group() -> Tale:
    tale = Tale()
    tale.asks("a.1")
    fault = tale.fault("cut")
    tale.wait(3)
    tale.heals(fault)
    tale.enters("b.1", token=7)
    tale.leaves("b.1")
    tale.enters("a.1", token=6)
    tale.loses("a.1")
    return tale


@pytest.mark.parametrize(("write", "broken"), CASES.all, ids=name)
def test_a_history_breaks_just_the_rules_that_it_should(write: Write, broken: set[str]) -> None:
    """No false alarm on what the design allows; what it does not is caught, by the rule that is about it alone."""
    assert {violation.rule for violation in judge(write()).violations} == broken
