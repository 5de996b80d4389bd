"""Backends that are slow, fail, lie, hang or take their agent with them. Each case has a group of its own."""

from __future__ import annotations

from typing import Any

import pytest

from tests.faults.conftest import MakeStack
from tests.faults.jobs import SIZE
from tests.faults.stack import Stack
from tests.support.jobs import wait_until
from timeslice.locks import scripts

# What a backend does once, or for a while, and then no more.
PASSING: dict[str, tuple[str, dict[str, Any]]] = {
    "slow-prepare": ("prepare", {"delay": 0.5}),
    "slow-suspend": ("suspend", {"delay": 0.5}),
    "slow-restore": ("restore", {"delay": 0.5}),
    "bad-prepare": ("prepare", {"fail": 1}),
    "bad-suspend": ("suspend", {"fail": 1}),
    "bad-restore": ("restore", {"fail": 1}),
    "busy-suspend": ("suspend", {"fail": 1, "kind": "busy"}),
    "freed-late": ("suspend", {"share": 0.0, "late": 0.5}),
}
# What it goes on doing until somebody mends it, and the words that its victim reads.
LASTING: dict[str, tuple[str, dict[str, Any], str]] = {
    "no-prepare": ("prepare", {"fail": -1}, "prepare fails by order of the test"),
    "no-suspend": ("suspend", {"fail": -1}, "suspend fails by order of the test"),
    "lies": ("suspend", {"lie": 1}, "but it is resident"),
    "frees-nothing": ("suspend", {"share": 0.0}, "only 0 of its 300 bytes"),
    "frees-half": ("suspend", {"share": 0.5}, "only 150 of its 300 bytes"),
}


def check(stack: Stack, group: str, inside: str, out: str) -> None:
    fake = stack.fake(group)
    assert (fake.state(inside), fake.state(out)) == ("resident", "suspended"), group
    assert (fake.read(inside)["bytes"], fake.read(out)["bytes"]) == (SIZE, SIZE)
    assert not fake.locked(inside)
    assert not fake.locked(out)


def test_a_fault_that_passes_only_delays(make_stack: MakeStack) -> None:
    """G01, G06: retried or waited for, without an operator; everybody gets in, with state intact."""
    stack = make_stack()
    stack.serve("n1", *PASSING)
    stack.coordinate()
    first = {group: stack.enter(group, "a") for group in PASSING}
    second = {group: stack.queue(group, "b") for group in PASSING}
    for group, (operation, knobs) in PASSING.items():
        stack.fake(group).knob(operation, **knobs)
    stack.leave(*first.values())
    for group, hold in second.items():
        stack.await_inside(hold)
        check(stack, group, "b", "a")
    again = {group: stack.queue(group, "a") for group in PASSING}
    stack.leave(*second.values())
    for group, hold in again.items():
        stack.await_inside(hold)
        check(stack, group, "a", "b")
    stack.leave(*again.values())
    stack.judge()


@pytest.mark.slow
def test_a_fault_that_lasts_puts_one_waiter_off(make_stack: MakeStack) -> None:
    """The job that can't be moved keeps running and may go on; the waiter is told why and keeps its place; it gets in
    once the fault is mended."""
    stack = make_stack()
    stack.serve("n1", *LASTING)
    stack.coordinate()
    first = {group: stack.enter(group, "a") for group in LASTING}
    kept = {group: stack.queue(group, "b") for group in LASTING}
    for group, (operation, knobs, _) in LASTING.items():
        stack.fake(group).knob(operation, **knobs)
    stack.leave(*first.values())

    def why(group: str) -> str:
        return next((waiter.deferred for waiter in stack.view(group).queue), "")

    for group, (_, _, words) in LASTING.items():
        wait_until(lambda g=group, w=words: w in why(g), f"{group}: {words}")  # type: ignore[misc]
    again = {group: stack.enter(group, "a") for group in LASTING}
    for group in LASTING:
        assert stack.fake(group).state("a") == "resident"
        stack.fake(group).write("knobs", {})
    stack.leave(*again.values())
    for group, hold in kept.items():
        stack.await_inside(hold)
        check(stack, group, "b", "a")
    stack.leave(*kept.values())
    stack.judge()


def test_a_backend_that_hangs_holds_up_its_own_group_only(make_stack: MakeStack) -> None:
    """F04: the group is blocked with a reason, never granted on a guess; other groups of the node go on; when the
    hang ends, so does the block."""
    stack = make_stack()
    stack.serve("n1", "stuck", "free")
    stack.coordinate()
    stack.driver.run(
        scripts.configure(stack.keys.group("stuck"), {"suspend_timeout_ms": "1000", "restore_timeout_ms": "1000"})
    )
    first = {group: stack.enter(group, "a") for group in ("stuck", "free")}
    second = {group: stack.queue(group, "b") for group in first}
    stack.fake("stuck").knob("suspend", hang=True)
    stack.leave(*first.values())
    stack.await_inside(second["free"])
    wait_until(lambda: stack.view("stuck").phase == "blocked", "the stuck group is blocked")
    assert "n1" in stack.view("stuck").reason
    stack.leave(second["free"])
    stack.leave(stack.enter("free", "a"))
    assert not second["stuck"].inside.is_set()
    stack.fake("stuck").write("knobs", {})
    (stack.fake("stuck").folder / "release").touch()
    stack.await_inside(second["stuck"])
    check(stack, "stuck", "b", "a")
    stack.leave(second["stuck"])
    stack.judge()


@pytest.mark.slow
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("operation", ["prepare", "suspend", "restore"])
def test_an_agent_that_dies_in_a_call_goes_on_where_it_was(make_stack: MakeStack, operation: str, when: str) -> None:
    """C01: killed by SIGKILL in the middle of a backend's call, started again as a supervisor would: the same swap is
    finished or undone from what is observed, and both jobs get their turns."""
    stack = make_stack()
    agent: Any = stack.spawn("n1", "g")
    stack.coordinate()
    first = stack.enter("g", "a")
    second = stack.queue("g", "b")
    if operation == "restore":
        stack.leave(first)
        stack.await_inside(second)
        first, second = second, stack.queue("g", "a")
    stack.fake("g").knob(operation, die=when)
    stack.leave(first)
    agent.wait(30)
    stack.fake("g").write("knobs", {})
    stack.spawn("n1", "g")
    stack.await_inside(second)
    check(stack, "g", second.job, first.job)
    stack.leave(second)
    stack.leave(stack.enter("g", first.job))
    check(stack, "g", first.job, second.job)
    stack.judge()
