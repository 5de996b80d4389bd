"""Waiting, content, ends, leases and recovery: right histories, and some that break just that rule."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.torture.cases import TERMS, Cases, Write, judge, name
from tests.torture.tale import Tale
from timeslice.torture.checker import check
from timeslice.torture.history import Writer, read

CASES = Cases()
good, breaks = CASES.good, CASES.breaks


@good
def everybody_got_in_or_gave_up_or_died() -> Tale:
    tale = Tale()
    for who in ("a.1", "b.1", "c.1"):
        tale.asks(who)
    tale.calm(5)
    tale.enters("a.1")
    tale.leaves("a.1")
    tale.gives_up("b.1")
    tale.fault("kill", "c.1")
    tale.wait(6)
    tale.ends()
    return tale


@breaks("waiting")
def somebody_never_got_in() -> Tale:
    tale = Tale()
    tale.asks("a.1")
    tale.calm(5)
    tale.wait(6)
    tale.ends()
    return tale


@breaks("waiting")
def somebody_got_in_too_late() -> Tale:
    tale = Tale()
    tale.asks("a.1")
    tale.calm(5)
    tale.wait(6)
    tale.enters("a.1")
    tale.ends()
    return tale


@good
def the_run_was_cut_short() -> Tale:
    tale = Tale()
    tale.asks("a.1")
    tale.calm(5)
    tale.ends()
    return tale


@breaks("content")
def another_content() -> Tale:
    tale = Tale()
    tale.enters("a.1")
    tale.checks("a.1", "x", "y")
    return tale


@good
def touched_what_was_moved_away_after_its_lease() -> Tale:
    tale = Tale()
    tale.enters("a.1")
    tale.told("LeaseReclaimed", "a-1", token="1001")
    tale.died("a.1", -7)
    return tale


@good
def touched_what_was_moved_away_while_it_was_stopped() -> Tale:
    tale = Tale()
    tale.enters("a.1")
    tale.heals(tale.fault("stop", "a.1"))
    tale.died("a.1", -7, meant=True)
    return tale


@good
def no_room_for_the_next_because_a_backend_lied() -> Tale:
    tale = Tale()
    tale.heals(tale.fault("lie", "agent.1"))
    tale.wait(2)
    tale.enters("a.1")
    tale.died("a.1", -7)
    return tale


@breaks("ends")
def moved_away_under_an_undisturbed_holder() -> Tale:
    tale = Tale()
    tale.heals(tale.fault("stop", "a.1"))
    tale.wait(4)
    tale.fault("stop", "b.1")
    tale.enters("a.1")
    tale.died("a.1", -7, meant=True)
    return tale


@breaks("ends")
def touched_its_device_outside_a_hold() -> Tale:
    tale = Tale()
    tale.enters("a.1")
    tale.leaves("a.1")
    tale.fault("stop", "a.1")
    tale.died("a.1", -7)
    return tale


@breaks("ends")
def killed_by_nobody() -> Tale:
    tale = Tale()
    tale.died("a.1", -9)
    return tale


@breaks("ends")
def fell_over_after_its_lease() -> Tale:
    tale = Tale()
    tale.enters("a.1")
    tale.told("LeaseReclaimed", "a-1", token="1001")
    tale.died("a.1", -11)
    return tale


@breaks("ends")
def a_coordinator_fell_over() -> Tale:
    tale = Tale()
    tale.died("c.1", 1)
    return tale


def _lost_after(harm: str, label: str = "", *, lasts_s: float, ago_s: float) -> Tale:
    tale = Tale()
    tale.enters("a.1")
    fault = tale.fault(harm, label)
    tale.wait(lasts_s)
    tale.heals(fault)
    tale.wait(ago_s)
    tale.loses("a.1")
    return tale


@good
def lost_while_it_was_cut_off() -> Tale:
    return _lost_after("cut", lasts_s=3, ago_s=0)


@good
def lost_while_it_was_stopped() -> Tale:
    return _lost_after("stop", "a.1", lasts_s=3, ago_s=0)


@good
def lost_for_one_thing_after_another() -> Tale:
    tale = _lost_after("drop", lasts_s=0, ago_s=0.5)
    tale.lines.pop()
    tale.heals(tale.fault("drop"))
    tale.wait(1)
    tale.loses("a.1")
    return tale


@good
def lost_with_the_data() -> Tale:
    return _lost_after("flush", lasts_s=0, ago_s=2)


@breaks("leases")
def lost_long_after_it_was_cut_off() -> Tale:
    return _lost_after("cut", lasts_s=3, ago_s=7)


@breaks("leases")
def lost_although_it_was_cut_off_for_a_moment_only() -> Tale:
    tale = Tale()
    tale.enters("a.1")
    tale.fault("cut")
    tale.loses("a.1")
    return tale


@breaks("leases")
def lost_by_forgotten_scripts() -> Tale:
    return _lost_after("forget", lasts_s=3, ago_s=0)


@breaks("leases")
def lost_for_nothing() -> Tale:
    tale = Tale()
    tale.fault("stop", "agent.1")
    tale.fault("stop", "b.1")
    tale.enters("a.1")
    tale.wait(4)
    tale.loses("a.1")
    return tale


@breaks("leases")
def lost_by_a_clock_step() -> Tale:
    return _lost_after("clock", lasts_s=3, ago_s=0)


@good
def recovered_in_time() -> Tale:
    tale = Tale()
    tale.asks("b.1")
    tale.heals(tale.fault("stop", "server.1"))
    tale.wait(9)
    tale.enters("b.1")
    return tale


@breaks("recovery")
def recovered_too_late() -> Tale:
    tale = Tale()
    tale.asks("b.1")
    tale.heals(tale.fault("stop", "server.1"))
    tale.wait(11)
    tale.enters("b.1")
    return tale


@breaks("recovery")
def never_recovered() -> Tale:
    tale = Tale()
    tale.asks("b.1")
    tale.heals(tale.fault("stop", "server.1"))
    tale.wait(11)
    tale.ends()
    return tale


@good
def another_fault_came_in_between() -> Tale:
    tale = Tale()
    tale.asks("b.1")
    tale.heals(tale.fault("stop", "server.1"))
    tale.wait(6)
    tale.heals(tale.fault("kill", "agent.1"))
    tale.wait(6)
    tale.enters("b.1")
    return tale


@good
def a_long_body_is_nobodys_fault() -> Tale:
    tale = Tale()
    tale.enters("a.1")
    tale.asks("b.1")
    tale.heals(tale.fault("stop", "server.1"))
    tale.wait(20)
    tale.leaves("a.1")
    tale.enters("b.1")
    return tale


@good
def nobody_waited() -> Tale:
    tale = Tale()
    tale.heals(tale.fault("stop", "server.1"))
    tale.wait(20)
    tale.enters("b.1")
    return tale


@breaks("recovery")
def faults_of_others_give_no_new_time() -> Tale:
    tale = Tale()
    for each in ("d", "e"):
        tale.born(f"coordinator-{each}.1", "coordinator")
    tale.told("OwnerChanged", owner="d")
    tale.asks("b.1")
    tale.heals(tale.fault("kill", "coordinator-d.1"))
    tale.told("OwnerChanged", owner="d")
    tale.wait(6)
    tale.heals(tale.fault("kill", "coordinator-e.1"))  # it does not drive the group's swaps
    tale.heals(tale.fault("stop", "a.1"))  # it neither waits nor holds
    tale.wait(6)
    tale.enters("b.1")
    return tale


@good
def the_owner_is_killed_again() -> Tale:
    tale = Tale()
    tale.born("coordinator-d.1", "coordinator")
    tale.told("OwnerChanged", owner="d")
    tale.asks("b.1")
    for _ in range(2):
        tale.heals(tale.fault("kill", "coordinator-d.1"))
        tale.wait(6)
    tale.enters("b.1")
    return tale


@breaks("recovery")
def faults_without_end_give_no_time_without_end() -> Tale:
    tale = Tale()
    tale.asks("b.1")
    for _ in range(10):
        tale.heals(tale.fault("kill", "coordinator.9"))
        tale.wait(3)
    tale.enters("b.1")
    return tale


@breaks("recovery")
def an_entry_while_the_fault_lasted_was_no_recovery() -> Tale:
    tale = Tale()
    tale.asks("b.1")
    fault = tale.fault("stop", "server.1")
    tale.enters("a.1")
    tale.leaves("a.1")
    tale.heals(fault)
    tale.wait(11)
    tale.enters("b.1")
    return tale


@pytest.mark.parametrize(("write", "broken"), CASES.all, ids=name)
def test_a_history_breaks_just_the_rules_that_it_should(write: Write, broken: set[str]) -> None:
    """No false alarm on what the design allows; what it does not is caught, by the rule that is about it alone."""
    assert {violation.rule for violation in judge(write()).violations} == broken


def test_the_report_counts() -> None:
    """Grants, swaps, faults, and the seconds of recovery with their 95th percentile."""
    tale = Tale()
    for number in range(20):
        tale.asks("b.1")
        tale.heals(tale.fault("kill", "agent.1"))
        tale.wait(1 if number else 3)
        tale.enters("b.1")
        tale.leaves("b.1")
    tale.told("SwapFinished", swap="1", job="b")
    report = judge(tale)
    assert (report.grants, report.swaps, report.faults, report.violations) == (20, 1, 20, [])
    assert report.recovery_p95_s == pytest.approx(1.3)
    assert max(report.recoveries) == pytest.approx(3.3)


def test_faults_that_overlap_are_one_disturbance() -> None:
    """From the first of them to the next entry after it, without the turns of others, and only while somebody waits."""
    tale = Tale()
    tale.enters("a.1")
    first = tale.fault("stop", "server.1")
    tale.wait(2)  # nobody waits
    tale.asks("b.1")
    tale.wait(1)  # a is in
    tale.leaves("a.1")
    tale.heals(tale.fault("kill", "agent.1"))
    tale.wait(2)
    tale.heals(first)
    tale.wait(1)
    tale.enters("b.1")
    assert judge(tale).recoveries == [pytest.approx(3.5)]


def test_a_history_is_judged_the_same_from_disk(tmp_path: Path) -> None:
    """One file a writer; whatever order the files are read in, the violation is found again."""
    tale = somebody_got_in_too_late()
    for who in {line.who for line in tale.lines}:
        writer = Writer(tmp_path / f"{who}.jsonl")
        for line in tale.lines:
            if line.who == who:
                writer.write(line)
        writer.close()
    assert check(read(tmp_path), TERMS) == judge(tale)


def test_an_empty_history_shows_nothing() -> None:
    """No grants, no violations, no percentile."""
    report = check([], TERMS)
    assert (report.grants, report.violations, report.recovery_p95_s) == (0, [], None)
