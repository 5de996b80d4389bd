"""Killed once at each point: both jobs get their turns again, with their state, and nobody has to help."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Literal

import pytest

from tests.killpoints.duel import JOBS, Duel
from timeslice.torture.killpoints import IN_PASSING, STEPS, traced
from timeslice.torture.stage import LOCK_GROUP

REDIS = {
    "agent": (
        *("sadd nodes+sadd groups", "alone/take_node", "xgroup commands", "heartbeat", "register", "report"),
        *("accepted", IN_PASSING, "ack", "xack commands+xdel commands"),
    ),
    "coordinator": (
        *("zadd coordinators+zremrangebyscore coordinators", "own", "poke", "plan", "xadd commands", "step"),
        *("promote", "settle"),
    ),
    "client": ("acquire", "register", "renew", "yield", "cancel"),
}
# The notes of an order are points of their own: an agent that never notes results does not come there. An intent that
# is not noted is brought to the disk by the next note of anything; that it has to be there before the step, and what
# both are good for, is seen in tests/agent/test_crash.py, where an order comes again, or is rolled back, after a kill.
DISK = ("disk journal", "disk intent", "disk result", "disk targets")
POINTS = {
    "agent": (*REDIS["agent"], *DISK, *STEPS),
    "coordinator": REDIS["coordinator"],
    "client": (*REDIS["client"], "sadd groups"),  # what only a lock-only group's client sends
}
LIES = {"abort", "settle"}  # undoing: passed only where a step has failed
CASES = [
    pytest.param(role, point, when, id=f"{role}-{point}-{when}")
    for role, points in POINTS.items()
    for point in points
    for when in ("before", "after")
]
# What a process does all the time has its first time at the start; there is another one in the middle of a swap.
IN_A_SWAP = (("agent", "heartbeat"), ("agent", "alone/take_node"), ("coordinator", "own"))
AT_ITS_STOP = (("agent", "leave"), ("agent", "alone/leave_node"), ("coordinator", "disown"))
LATER = [
    pytest.param(role, point, when, later, id=f"{role}-{point}-{when}-{later}")
    for later, cases in (("swap", IN_A_SWAP), ("stop", AT_ITS_STOP))
    for role, point in cases
    for when in ("before", "after")
]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def duel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Duel]:
    with ExitStack() as stack:
        running = Duel(tmp_path_factory.mktemp("duel"), stack)
        running.both_take_turns()
        yield running


@pytest.mark.parametrize(("role", "point", "when"), CASES)
def test_killed_at_a_point_the_system_goes_on(duel: Duel, role: str, point: str, when: str) -> None:
    """A process is killed there; then both jobs are in again, their content intact, and the checker finds nothing."""
    who = JOBS[0] if role == "client" else role
    duel.kill_at(
        who,
        point,
        when,
        harm="lie" if point in LIES else "",
        newcomer=point == "disk targets",
        forgotten=(role, point) == ("agent", "register"),
        lock_group=LOCK_GROUP if point == "sadd groups" else "",
        hasty=point == "cancel",
    )
    duel.both_take_turns()
    assert duel.report().violations == []


@pytest.mark.parametrize(("role", "point", "when", "later"), LATER)
def test_killed_in_a_swap_or_at_its_stop_the_system_goes_on(
    duel: Duel, role: str, point: str, when: str, later: Literal["swap", "stop"]
) -> None:
    """The same, at a write that is not the first of its kind."""
    duel.kill_at(role, point, when, harm="slow" if later == "swap" else "", later=later)
    duel.both_take_turns()
    assert duel.report().violations == []


def test_no_write_escapes(duel: Duel, tmp_path: Path) -> None:
    """Whatever a process writes in this scenario has its cases above: a new write fails here until it has."""
    whose = {"agent": "agent", "coordinator": "coordinator", **dict.fromkeys(JOBS, "client")}
    for who in whose:
        duel.trace(who, tmp_path / who)
    duel.both_take_turns()
    duel.until(lambda: {"heartbeat", *STEPS} - {"abort"} <= traced(tmp_path / "agent"), "the agent did all its steps")
    for who, role in whose.items():
        found = traced(tmp_path / who)
        assert found
        assert found <= set(POINTS[role])
