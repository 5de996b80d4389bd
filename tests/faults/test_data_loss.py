"""The server loses everything: who knows more brings it back, nobody is let in twice, tokens rise, the order stands."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.faults.conftest import MakeStack
from tests.faults.situations import SITUATIONS, Situations
from tests.support import server_faults as faults
from tests.support.jobs import wait_until
from timeslice.embedded import EmbeddedServer
from timeslice.locks import scripts

Fault = Callable[[EmbeddedServer], None]


@pytest.mark.slow
@pytest.mark.parametrize("fault", [faults.flush_all, faults.crash])
def test_what_was_lost_comes_back(make_stack: MakeStack, fault: Fault) -> None:
    """R08, R09: without an append-only file; with holders inside, waiters queued, jobs suspended, swaps in the middle,
    yields and heartbeats under way, a group that is paused, one with settings, and a lock without agents."""
    stack = make_stack()
    stack.serve("n3", "paused", "configured")
    situations = Situations(stack)
    settings = {"suspend_timeout_ms": "77000"}
    for group in ("paused", "configured"):
        stack.leave(stack.enter(group, "a"))
        stack.leave(stack.enter(group, "b"))  # job a is suspended now
    stack.driver.run(scripts.pause(stack.keys.group("paused"), True, "tests"))
    stack.driver.run(scripts.configure(stack.keys.group("configured"), settings))
    kept_out = stack.queue("paused", "a")
    locked = stack.enter("lock", "a", lock_only=True)
    next_one = stack.queue("lock", "b", lock_only=True)
    situations.arrange()
    highest = max(hold.token for hold in stack.holds)

    fault(stack.server)
    situations.release()
    wait_until(lambda: stack.view("idle").holder == "a", "the holder has put its lease back")
    situations.converge()
    again = stack.enter("configured", "a")
    stack.leave(again)
    # What nobody but the server knew is gone: the pause, and the settings. docs/guarantees.md says so.
    stack.await_inside(kept_out)
    stack.leave(kept_out)
    stack.leave(locked)
    stack.await_inside(next_one)
    stack.leave(next_one)
    assert stack.view("configured").config.suspend_timeout_ms != 77_000
    for group in ("paused", "configured"):
        situations.check_device(group, "a", "b")
    assert min(hold.token for hold in (again, kept_out, next_one)) > highest
    assert {len(stack.events(group, "StateLost")) > 0 for group in SITUATIONS} == {True}
    stack.judge()
