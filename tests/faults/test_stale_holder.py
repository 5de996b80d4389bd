"""A holder that was stopped past its lease, and a server that forgot that it has lost it."""

from __future__ import annotations

import os
import signal

import pytest

from tests.faults.conftest import MakeStack
from tests.support import server_faults as faults
from tests.support.jobs import wait_until


@pytest.mark.slow
@pytest.mark.parametrize("first", ["the agent", "the holder"])
def test_a_holder_that_lost_its_lease_does_not_get_it_back_by_data_loss(make_stack: MakeStack, first: str) -> None:
    """Its state was moved out for another job's. All is lost, and it wakes up: it is told that its lease is lost,
    whether the agent, which has seen the newer grant, comes back before it or after, and its state stays out."""
    stack = make_stack()
    stack.coordinate()
    stack.serve("n1", "g")
    old = stack.enter("g", "a", lease=2.0)

    def heard() -> bool:
        """The swap at least: the agent may not have beaten since the newer grant."""
        return stack.view("g").number("fence") > old.token

    pid = stack.jobs["a"].process.pid
    assert pid
    newer = stack.queue("g", "b", lease=2.0)
    os.kill(pid, signal.SIGSTOP)
    stack.await_inside(newer)
    stack.leave(newer)
    agent = stack.proxy("n1")
    if first == "the holder":
        agent.cut()
    faults.flush_all(stack.server)
    if first == "the agent":
        wait_until(heard, "the agent has said what it has seen")
    os.kill(pid, signal.SIGCONT)
    if first == "the holder":
        wait_until(lambda: stack.view("g").state.get("job") == "a", "its lease was put back")
        agent.heal()
    wait_until(heard, "the agent has said what it has seen")
    stack.let_go(old)
    assert old.over.wait(60)
    assert "LeaseLost" in old.error or old.lost, old
    assert stack.view("g").holder == ""
    assert (stack.fake("g").state("a"), stack.fake("g").state("b")) == ("suspended", "resident")
    stack.driver.client.hset(stack.keys.group("g").state, "quiet_until_ms", "0")  # 30 s of nothing else
    again = stack.enter("g", "a")  # what is right comes back the right way
    assert again.token > newer.token
    assert (stack.fake("g").state("a"), stack.fake("g").state("b")) == ("resident", "suspended")
    stack.leave(again)
