"""Who comes when: right histories, and some that break just that rule."""

from __future__ import annotations

import pytest

from tests.torture.cases import Cases, Write, judge, name
from tests.torture.tale import Tale

CASES = Cases()
good, breaks = CASES.good, CASES.breaks


@good
def first_come_first_served() -> Tale:
    tale = Tale()
    for waiter in ("a-1", "b-1", "c-1"):
        tale.told("WaiterQueued", waiter)
    for waiter in ("a-1", "b-1", "c-1"):
        tale.granted(waiter)
        tale.yields(waiter)
    return tale


@breaks("order")
def last_come_first_served() -> Tale:
    tale = Tale()
    tale.told("WaiterQueued", "a-1")
    tale.told("WaiterQueued", "b-1")
    tale.granted("b-1")
    return tale


@breaks("order")
def served_without_queueing() -> Tale:
    tale = Tale()
    tale.told("WaiterQueued", "a-1")
    tale.granted("b-1")
    return tale


@breaks("order")
def a_swap_begins_for_the_second() -> Tale:
    tale = Tale()
    tale.told("WaiterQueued", "a-1")
    tale.told("WaiterQueued", "b-1")
    tale.told("SwapStarted", "b-1", swap="1")
    return tale


@good
def what_told_of_its_arrival_was_lost() -> Tale:
    tale = Tale()
    tale.heals(tale.fault("failover"))
    tale.wait(60)
    tale.told("WaiterQueued", "a-1")
    tale.told("SwapStarted", "b-1", swap="1")
    tale.told("SwapDeferred", "b-1", swap="1")
    tale.granted("b-1")
    return tale


@good
def what_told_of_its_arrival_was_lost_and_nothing_had_to_move() -> Tale:
    tale = Tale()
    tale.heals(tale.fault("failover"))
    tale.wait(60)
    tale.told("WaiterQueued", "a-1")
    tale.granted("b-1", waited_ms="900")
    return tale


@breaks("order")
def served_without_queueing_after_a_failover() -> Tale:
    tale = Tale()
    tale.heals(tale.fault("failover"))
    tale.wait(60)
    tale.told("WaiterQueued", "a-1")
    tale.granted("b-1", waited_ms="0")
    return tale


@good
def a_higher_band_goes_first() -> Tale:
    tale = Tale()
    tale.told("WaiterQueued", "a-1", priority="0")
    tale.told("WaiterQueued", "b-1", priority="5")
    tale.granted("b-1")
    tale.yields("b-1")
    tale.granted("a-1")
    return tale


@breaks("order")
def a_lower_band_goes_first() -> Tale:
    tale = Tale()
    tale.told("WaiterQueued", "a-1", priority="-5")
    tale.told("WaiterQueued", "b-1", priority="0")
    tale.granted("a-1")
    return tale


@good
def cancelled_reaped_and_put_off_are_passed() -> Tale:
    tale = Tale()
    for waiter in ("a-1", "a-2", "a-3", "b-1"):
        tale.told("WaiterQueued", waiter)
    tale.told("WaiterCancelled", "a-1")
    tale.told("WaiterReaped", "a-2")
    tale.told("SwapStarted", "a-3", swap="1")
    tale.told("SwapDeferred", "a-3", swap="1", reason="refused")
    tale.granted("b-1")
    tale.told("SwapStarted", "a-3", swap="2")
    return tale


@breaks("order")
def a_reaped_waiter_keeps_its_place() -> Tale:
    tale = Tale()
    for waiter in ("a-1", "b-1"):
        tale.told("WaiterQueued", waiter)
    tale.told("WaiterReaped", "a-1")
    tale.told("WaiterQueued", "a-1")
    tale.granted("b-1")
    return tale


@good
def a_swap_ends_with_the_next_of_its_job() -> Tale:
    tale = Tale()
    for waiter in ("a-1", "b-1", "a-2"):
        tale.told("WaiterQueued", waiter)
    tale.told("SwapStarted", "a-1", swap="1")
    tale.told("WaiterCancelled", "a-1")
    tale.told("SwapFinished", swap="1", job="a")
    tale.granted("a-2")
    return tale


@breaks("order")
def a_swap_ends_with_another_than_its_own() -> Tale:
    tale = Tale()
    for waiter in ("a-1", "a-2"):
        tale.told("WaiterQueued", waiter)
    tale.told("SwapStarted", "a-1", swap="1")
    tale.told("SwapFinished", swap="1", job="a")
    tale.granted("a-2")
    return tale


@good
def data_loss_empties_the_queue() -> Tale:
    tale = Tale()
    tale.told("WaiterQueued", "a-1")
    tale.heals(tale.fault("flush"))
    tale.told("WaiterQueued", "b-1")
    tale.granted("b-1")
    return tale


@good
def an_agent_is_silent_and_what_moves_nothing_goes_on() -> Tale:
    tale = Tale()
    tale.told("NodeJoined", node="n1")
    tale.fault("stop", "agent.1")
    tale.told("WaiterQueued", "b-1")
    tale.granted("a-1", how="no-op")
    return tale


@good
def a_heartbeat_was_overdue_and_what_moves_nothing_goes_on() -> Tale:
    tale = Tale()
    tale.told("NodeJoined", node="n1")
    tale.told("WaiterQueued", "b-1")
    tale.granted("a-1", how="no-op")
    tale.silent(2.0)
    return tale


@breaks("order")
def a_heartbeat_was_overdue_before() -> Tale:
    tale = Tale()
    tale.told("NodeJoined", node="n1")
    tale.silent(2.0)
    tale.wait(3)
    tale.told("WaiterQueued", "b-1")
    tale.granted("a-1", how="no-op")
    return tale


@breaks("order")
def an_overdue_heartbeat_is_no_reason_for_what_moves_state() -> Tale:
    tale = Tale()
    tale.told("NodeJoined", node="n1")
    tale.told("WaiterQueued", "b-1")
    tale.granted("a-1", how="restored")
    tale.silent(2.0)
    return tale


@good
def an_agent_has_ended_and_the_next_one_starts() -> Tale:
    tale = Tale()
    tale.told("NodeJoined", node="n1")
    tale.told("WaiterQueued", "b-1")
    tale.died("agent.1", -9, meant=True)
    tale.wait(6)
    tale.granted("a-1", how="no-op")
    return tale


@breaks("order")
def what_moves_nothing_passes_long_after_an_agent_ended() -> Tale:
    tale = Tale()
    tale.told("NodeJoined", node="n1")
    tale.died("agent.1", -9, meant=True)
    tale.told("WaiterQueued", "b-1")
    tale.wait(13)
    tale.granted("a-1", how="no-op")
    return tale


@breaks("order")
def what_moves_nothing_passes_because_a_job_ended() -> Tale:
    tale = Tale()
    tale.told("NodeJoined", node="n1")
    tale.told("WaiterQueued", "b-1")
    tale.died("c.1", -9, meant=True)
    tale.granted("a-1", how="no-op")
    return tale


@breaks("order")
def what_moves_nothing_passes_without_a_reason() -> Tale:
    tale = Tale()
    tale.told("NodeJoined", node="n1")
    tale.told("WaiterQueued", "b-1")
    tale.granted("a-1", how="no-op")
    return tale


@breaks("order")
def what_moves_nothing_passes_long_after_the_reason() -> Tale:
    tale = Tale()
    tale.told("NodeJoined", node="n1")
    tale.heals(tale.fault("stop", "agent.1"))
    tale.told("WaiterQueued", "b-1")
    tale.wait(13)
    tale.granted("a-1", how="no-op")
    return tale


@breaks("order")
def one_that_was_put_off_lets_nobody_pass_another() -> Tale:
    tale = Tale()
    for waiter in ("a-1", "b-1", "c-1"):
        tale.told("WaiterQueued", waiter)
    tale.told("SwapStarted", "a-1", swap="1")
    tale.told("SwapDeferred", "a-1", swap="1", reason="refused")
    tale.granted("c-1")
    return tale


@pytest.mark.parametrize(("write", "broken"), CASES.all, ids=name)
def test_a_history_breaks_just_the_rules_that_it_should(write: Write, broken: set[str]) -> None:
    """No false alarm on what the design allows; what it does not is caught, by the rule that is about it alone."""
    assert {violation.rule for violation in judge(write()).violations} == broken
