"""The analysis of a series of samples, on series whose loops are known."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from timeslice.observe.series import Loop, Sample, Stretch, analyse
from timeslice.observe.words import advice, document

STEP_S = 0.25
Level = Callable[[float], float]


def series(level: Level, seconds: float, *, bytes_of: Level = lambda _: 0) -> list[Sample]:
    """``level`` at a time stands for the step that ends then."""
    count = round(seconds / STEP_S)
    return [
        Sample(at_s=n * STEP_S, activity=level((n - 0.5) * STEP_S), device_bytes=round(bytes_of(n * STEP_S)))
        for n in range(count + 1)
    ]


def turns(active_s: float, period_s: float, *, high: float = 0.9, low: float = 0.0, from_s: float = 2.0) -> Level:
    """Active at the start of each period, of which the first begins at ``from_s``."""
    return lambda at: high if (at - from_s) % period_s < active_s and at >= from_s else low


def found(level: Level, seconds: float = 200.0, **more: float) -> Loop:
    return analyse(series(level, seconds), **more)


@pytest.mark.parametrize(("active_s", "period_s"), [(12, 31), (2, 31), (29, 31), (1.5, 5), (20, 50)])
def test_the_period_and_the_active_part_of_a_loop_are_told(active_s: float, period_s: float) -> None:
    """Whatever share of its time it is active."""
    loop = found(turns(active_s, period_s))
    assert loop.period_s == pytest.approx(period_s, abs=STEP_S)
    assert loop.active_s == pytest.approx(active_s, abs=2 * STEP_S)
    assert loop.regular
    assert loop.idle_share == pytest.approx(1 - active_s / period_s, abs=0.12)


@pytest.mark.parametrize(("high", "low"), [(1.0, 0.0), (0.35, 0.05), (1.0, 0.6), (0.3, 0.1)])
def test_busy_is_told_from_idle_by_how_the_samples_fall_apart(high: float, low: float) -> None:
    """Idle need not be zero, nor busy one: a border in between is found."""
    loop = found(turns(12, 31, high=high, low=low))
    assert loop.period_s == pytest.approx(31, abs=STEP_S)
    assert loop.active_s == pytest.approx(12, abs=2 * STEP_S)


def test_a_phase_that_uses_a_part_of_the_device_uses_it() -> None:
    """Of three levels only the lowest is idle: others can't have the device while samples are generated at a third of
    its power."""

    def level(at: float) -> float:
        return 1.0 if at % 30 < 10 else 0.3 if at % 30 < 20 else 0.0

    loop = found(level)
    assert loop.idle_share == pytest.approx(1 / 3, abs=0.05)
    assert loop.active_s == pytest.approx(20, abs=2 * STEP_S)
    assert loop.period_s == pytest.approx(30, abs=STEP_S)


def test_noise_changes_nothing() -> None:
    """Activity that jumps about while it is busy, and single samples that are off."""
    chance = Random(4)
    level = turns(12, 31)

    def noisy(at: float) -> float:
        if chance.random() < 0.03:
            return chance.random()
        return min(1.0, max(0.0, level(at) * chance.uniform(0.6, 1.1) + chance.uniform(0, 0.08)))

    loop = found(noisy, 320)
    assert loop.period_s == pytest.approx(31, abs=1)
    assert loop.active_s == pytest.approx(12, abs=1)
    assert loop.regular


def test_pauses_that_nobody_could_use_end_no_stretch() -> None:
    """Short steps of the CPU between the kernels of one phase; with a smaller gap they are told."""
    level = turns(12, 31)

    def stutters(at: float) -> float:
        return 0.0 if (at - 2) % 4 >= 3.5 else level(at)

    assert found(stutters).active_s == pytest.approx(12, abs=2)
    assert len(found(stutters, gap_s=0.3).stretches) > 2 * len(found(stutters).stretches)


def test_a_loop_with_two_phases_of_the_device_has_both() -> None:
    """Generate and train in one turn: the period is the turn's, and each phase is told with its own length."""

    def level(at: float) -> float:
        turn = (at - 2) % 60
        return 0.9 if at >= 2 and (turn < 20 or 30 <= turn < 35) else 0.0

    loop = found(level, 400)
    assert loop.period_s == pytest.approx(60, abs=STEP_S)
    assert loop.turn == pytest.approx((20, 5), abs=2 * STEP_S)
    assert loop.regular
    assert loop.idle_share == pytest.approx(1 - 25 / 60, abs=0.05)
    assert advice(loop)[0] == "each turn of 60 s has 2 active stretches, of about 20 s, 5.0 s"


def test_times_that_differ_widely_are_called_irregular() -> None:
    """A period that is none is told as the median, and as what it is."""
    starts = [2, 10, 40, 45, 90, 97, 150]
    loop = found(lambda at: 0.9 if any(start <= at < start + 2 for start in starts) else 0.0, 170)
    assert len(loop.stretches) == len(starts)
    assert not loop.regular
    assert "with large differences" in advice(loop)[0]


@pytest.mark.parametrize(("level", "busy"), [(0.9, True), (0.0, False), (0.02, False)])
def test_a_series_without_change_has_no_period(level: float, busy: bool) -> None:
    """All busy, or all idle, is not cut at whatever noise there is."""
    loop = found(lambda at: level + (0.01 if int(at) % 2 else 0.0))
    assert loop.period_s is None
    assert loop.idle_share == (0.0 if busy else 1.0)
    assert ("nearly all of the time" if busy else "nothing was active") in advice(loop)[0]


def test_too_few_turns_tell_no_period() -> None:
    """One turn and a half: how long it was active is known, its period is not."""
    loop = found(turns(12, 31), 45)
    assert loop.period_s is None
    assert loop.active_s == pytest.approx(12, abs=2 * STEP_S)
    assert "observe five or more" in advice(loop)[1]


def test_what_was_cut_off_does_not_count_as_a_length() -> None:
    """It was observed from the middle of a stretch to the middle of another one."""
    loop = found(turns(12, 31, from_s=-10), 31 * 4 - 5)
    assert loop.stretches[0].seconds < 3
    assert loop.active_s == pytest.approx(12, abs=2 * STEP_S)
    assert loop.period_s == pytest.approx(31, abs=STEP_S)


def test_bytes_on_the_device_are_told_busy_and_idle() -> None:
    """What it has at most, and what stays there while others could use it."""
    level = turns(12, 31)
    loop = analyse(series(level, 200, bytes_of=lambda at: 4000 if level(at - STEP_S / 2) else 1000))
    assert (loop.most_bytes, loop.least_bytes) == (4000, 1000)


def test_the_advice_says_what_to_wrap() -> None:
    """In the words that a researcher needs."""
    loop = found(turns(12, 31))
    assert advice(loop) == [
        "active stretches of about 12 s every 31 s: wrap these in timeslice.hold(...)",
        f"the {loop.idle_share:.0%} of the time between them can be others'",
    ]


def test_activity_that_is_too_short_to_count_is_told() -> None:
    """It is not "nothing": the advice names the option with which it counts, and so it does."""
    loop = found(turns(0.5, 5))
    assert loop.stretches == ()
    assert loop.ignored == 40
    assert loop.ignored_s == pytest.approx(0.5)
    assert "active 40 times, for about 0.5 s each" in advice(loop)[0]
    assert "--gap 0.2 " in advice(loop)[1]
    assert document(loop)["ignored"] == 40
    assert found(turns(0.5, 5), gap_s=0.2).period_s == pytest.approx(5)
    assert found(turns(12, 31)).ignored == 0


@given(st.lists(st.floats(0, 1), min_size=2, max_size=80), st.floats(0.1, 5))
def test_any_series_has_an_answer(values: list[float], gap_s: float) -> None:
    """Stretches are in order, apart, and within the time; shares are shares; it can be written as JSON."""
    samples = [Sample(at_s=n * STEP_S, activity=value) for n, value in enumerate(values)]
    loop = analyse(samples, gap_s=gap_s)
    edges = [edge for each in loop.stretches for edge in (each.start_s, each.end_s)]
    assert edges == sorted(edges)
    assert all(0 <= edge <= samples[-1].at_s for edge in edges)
    assert 0 <= loop.idle_share <= 1
    assert json.loads(json.dumps(document(loop)))["regular"] is loop.regular
    assert all(isinstance(each, Stretch) for each in loop.stretches)


RECORDED = Path(__file__).with_name("recorded.json")


def test_a_recorded_series_is_read_as_it_was_made() -> None:
    """CPU use of a real worker that was busy for 0.6 s and slept for 0.9 s, sampled while other programs ran."""
    told = json.loads(RECORDED.read_text())
    loop = analyse([Sample(at_s=at, activity=value) for at, value in told["samples"]], gap_s=0.3)
    assert loop.period_s == pytest.approx(told["busy_s"] + told["idle_s"], rel=0.1)
    assert loop.active_s == pytest.approx(told["busy_s"], rel=0.3)
    assert loop.regular
