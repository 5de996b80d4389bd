"""What the checker does for each body of a history does not grow with the history."""

from __future__ import annotations

import sys
from itertools import cycle

from tests.torture.cases import TERMS
from tests.torture.tale import N, Tale
from timeslice.torture.checker import check
from timeslice.torture.history import Line

SIZE = 4096


def history(bodies: int) -> list[Line]:
    """Two jobs that swap with each other, one of which is in each time; now and then one is killed, or stopped."""
    tale = Tale()
    tale.told("NodeJoined", node=N)
    tale.wait(3)
    labels = {"a": "a.1", "b": "b.1"}
    out = ""
    for number, job in zip(range(bodies), cycle("ab")):
        who, waiter = labels[job], f"{job}-{number}"
        tale.asks(who)
        tale.told("WaiterQueued", waiter)
        tale.told("SwapStarted", waiter, swap=str(number))
        if out:
            tale.moves(out, "prepare", "suspend")
        if number > 1:
            tale.moves(job, "restore", "release")
        tale.told("SwapFinished", waiter, swap=str(number))
        tale.granted(waiter)
        tale.enters(who, token=tale.token)
        tale.surveyed(who, found={job: SIZE})
        tale.checks(who, "x", "x")
        tale.leaves(who)
        tale.yields(waiter)
        out = job
        if number % 10 == 9:
            tale.heals(tale.fault("stop", "agent.1"))
    tale.calm(60)
    tale.ends()
    return tale.lines


def calls(bodies: int) -> int:
    """Calls of functions that judging such a history takes."""
    lines, count = history(bodies), 0

    def note(*_: object) -> None:
        nonlocal count
        count += 1

    sys.setprofile(note)
    try:
        report = check(lines, TERMS)
    finally:
        sys.setprofile(None)
    assert report.violations == []
    assert report.grants == bodies
    return count


def test_ten_times_the_bodies_take_ten_times_the_work() -> None:
    """And not a hundred times: what a body needs is looked up, not searched for from the beginning of the history."""
    assert calls(1000) < 15 * calls(100)
