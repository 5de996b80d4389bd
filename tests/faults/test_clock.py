"""Wall clocks that step: the server's, and everybody else's."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.faults.conftest import MakeStack
from tests.faults.situations import Situations
from tests.support.clock import fake_clock

HOUR = 3600


@pytest.mark.slow
@pytest.mark.parametrize("shift", [HOUR, -HOUR], ids=["forward", "back"])
def test_the_server_s_clock_steps_an_hour(make_stack: MakeStack, tmp_path: Path, shift: int) -> None:
    """L17, R10: nobody expires, nobody is let in twice, tokens rise, also when the clock is set right again."""
    clock = fake_clock(tmp_path / "clock")
    stack = make_stack(binary=clock.binary)
    situations = Situations(stack)
    situations.arrange()
    clock.set(shift)
    situations.release()
    situations.converge()
    clock.set(0)
    for hold in [stack.hold(group, "b") for group in situations.first]:
        stack.await_inside(hold)
        stack.leave(hold)
    stack.judge()


@pytest.mark.parametrize("shift", [HOUR, -HOUR], ids=["forward", "back"])
def test_no_party_goes_by_its_own_wall_clock(
    make_stack: MakeStack, monkeypatch: pytest.MonkeyPatch, shift: int
) -> None:
    """Jobs, agents and coordinators whose clocks step an hour in the middle of everything: nothing depends on them."""
    stack = make_stack()
    situations = Situations(stack)
    situations.arrange()
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + shift)
    for job in stack.jobs.values():
        job.tell("clock", shift)
    situations.release()
    situations.converge()
