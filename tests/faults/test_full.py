"""No room: in the server's memory, on the agent's disk."""

from __future__ import annotations

from pathlib import Path

from tests.faults.conftest import MakeStack
from tests.support.disk import fill
from tests.support.jobs import wait_until
from tests.support.server_faults import FULL, dial


def test_a_full_server_lets_everybody_out_and_nobody_half_in(make_stack: MakeStack) -> None:
    """R04: while it is full, yields are answered, leases renewed and swaps under way acked; who comes new gets an error
    that says what is wrong; what could not be ordered is ordered when there is room."""
    stack = make_stack()
    stack.serve("n1", "idle", "waiting", "commit", "fresh")
    stack.coordinate()
    first = {group: stack.enter(group, "a", lease=3) for group in ("idle", "waiting", "commit")}
    second = {group: stack.queue(group, "b") for group in ("waiting", "commit")}
    stack.fake("commit").knob("suspend", hang=True)
    stack.leave(first["commit"])
    wait_until(lambda: "suspend a" in stack.fake("commit").calls(), "job a is being suspended")
    with dial(stack.server) as client:
        client.config_set("maxmemory", FULL)
        (stack.fake("commit").folder / "release").touch()
        stack.await_inside(second["commit"])
        stack.leave(first["waiting"])
        refused = stack.hold("fresh", "c", timeout=1)
        assert refused.over.wait(30)
        assert "is full and takes no writes" in refused.error
        assert stack.view("fresh").queue == ()
        deadline = stack.view("idle").number("deadline_ms")
        wait_until(lambda: stack.view("idle").number("deadline_ms") > deadline, "the lease is renewed")
        stack.leave(first["idle"])
        assert stack.view("idle").holder == ""
        client.config_set("maxmemory", "0")
    stack.await_inside(second["waiting"])
    stack.leave(*second.values())
    for group in ("fresh", "idle", "waiting", "commit"):
        stack.leave(stack.enter(group, "a"))
    stack.holds.remove(refused)
    stack.judge()


def test_an_agent_without_disk_moves_nothing_and_goes_on_with_room(disk: Path, make_stack: MakeStack) -> None:
    """F06: nothing is moved without a note of it: the waiter is put off with the reason, the job that is in may go on,
    and with room the waiter gets its turn."""
    stack = make_stack()
    stack.serve("n1", "g", state_dir=disk / "state")
    stack.coordinate()
    first = stack.enter("g", "a")
    second = stack.queue("g", "b")
    filler = fill(disk)
    stack.leave(first)
    wait_until(lambda: "can't be written" in stack.view("g").queue[0].deferred, "the waiter is told of the disk")
    assert stack.fake("g").calls() == []
    stack.leave(stack.enter("g", "a"))
    filler.unlink()
    stack.await_inside(second)
    stack.leave(second)
    stack.judge()
