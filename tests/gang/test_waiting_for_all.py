"""A rank whose gang was granted waits for the others to confirm, without I/O: replies are fed by hand."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest

from timeslice.errors import AcquireTimeoutError, GangEndedError, RedisUnreachableError
from timeslice.locks import flows
from timeslice.locks.flows import Grant, Op, Wait
from timeslice.locks.keys import Keys
from timeslice.locks.scripts import Call, Granted, Lost, Party, Renewed, Request

GROUP = Keys().group("g")
REQUEST = Request("w1", "a", "n1", 7, 1, party=Party("x", 0, 2))
GRANTED = Granted(50, "no-op", 0, 50, "lock", True, gang="gang-w0", unconfirmed=1)


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def waiting(clock: Clock, timeout_s: float | None = None) -> Generator[Op, Any, Grant]:
    """A flow that was granted, and waits."""
    flow = flows.acquire(GROUP, REQUEST, timeout_s=timeout_s, clock=clock)
    next(flow)
    assert isinstance(flow.send(GRANTED), Wait)
    return flow


def named(op: Op) -> str:
    return op.script.name if isinstance(op, Call) else "wait"


def test_an_outage_is_waited_out_by_the_patient_call() -> None:
    """A wait that fails is followed by a renewal, which has a deadline of its own: never by the next wait at once."""
    flow = waiting(Clock())
    assert named(flow.throw(RedisUnreachableError("down"))) == "renew"
    assert named(flow.throw(RedisUnreachableError("down"))) == "wait"
    assert named(flow.send([])) == "renew"
    with pytest.raises(StopIteration) as done:
        flow.send(Renewed(51, 0))
    assert done.value.value.gang == "gang-w0"


def test_it_ends_with_the_gang() -> None:
    """Another rank died before it confirmed: this one is told which, and its body does not begin."""
    flow = waiting(Clock())
    flow.send([])
    with pytest.raises(GangEndedError, match="rank 1 ended"):
        flow.send(Lost("", 50, 50, reason="rank 1 ended"))


def test_its_patience_is_the_caller_s() -> None:
    """When the time is over the rank withdraws, so that nobody waits for it, and says what was missing."""
    clock = Clock()
    flow = waiting(clock, timeout_s=5)
    clock.now += 6
    flow.send([])
    assert named(flow.send(Renewed(51, 0, 1))) == "cancel"
    with pytest.raises(AcquireTimeoutError, match="not all of its ranks came in within 5 s"):
        flow.send("queued")
