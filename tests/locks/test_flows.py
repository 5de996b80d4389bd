"""The acquire flow without I/O: replies are fed by hand, the clock stands until it is told to move."""

from __future__ import annotations

import math
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

import pytest

from timeslice.errors import (
    AcquireTimeoutError,
    CancelledByOperatorError,
    RedisUnreachableError,
    TimeSliceError,
)
from timeslice.locks import flows
from timeslice.locks.flows import Grant, Op, Wait
from timeslice.locks.keys import Keys
from timeslice.locks.scripts import Call, Ended, Granted, Lost, Queued, Renewed, Request

GROUP = Keys().group("g")
REQUEST = Request("w1", "a", "n1", 7, 1)
FLOOR, WAITER, SCORE = 0, 1, 11  # places in the arguments of acquire


def granted(token: int = 50) -> Granted:
    return Granted(token, "no-op", 0, token, "lock", True)


def queued(score: str = "5", counter: int = 10, **fields: Any) -> Queued:
    values = {"position": 0, "phase": "held", "reason": "", "holder": "b", "holder_ms": 30_000, "mode": "lock"}
    return Queued(score=score, counter=counter, registered=True, **{**values, **fields})


def mail(kind: str, number: int = 1, **fields: str) -> list[tuple[str, dict[str, str]]]:
    return [(f"{number}-0", {"kind": kind, **fields})]


GRANT = mail("grant", 3, token="60", how="restored", swap_ms="1500")
DOWN = RedisUnreachableError("down")


@dataclass
class Drive:
    """One flow, driven by hand."""

    timeout_s: float | None = None
    note: Any = None
    now: float = 1000.0
    op: Op | None = None
    result: Grant | None = None
    flow: Generator[Op, Any, Grant] = field(init=False)

    def __post_init__(self) -> None:
        self.flow = flows.acquire(
            GROUP, REQUEST, floor=7, timeout_s=self.timeout_s, note=self.note, clock=lambda: self.now
        )
        self.op = next(self.flow)

    def feed(self, answer: Any, *, after: float = 0.0) -> None:
        """Answer the operation that is asked for, ``after`` seconds; an error is thrown in."""
        self.now += after
        try:
            self.op = self.flow.throw(answer) if isinstance(answer, Exception) else self.flow.send(answer)
        except StopIteration as stop:
            self.op, self.result = None, stop.value

    def fails(self, kind: type[TimeSliceError], answer: Any, *, after: float = 0.0) -> TimeSliceError:
        with pytest.raises(kind) as raised:
            self.feed(answer, after=after)
        return raised.value

    @property
    def call(self) -> Call[Any]:
        assert isinstance(self.op, Call), self.op
        return self.op

    @property
    def verb(self) -> str:
        return self.call.script.name

    @property
    def wait(self) -> Wait:
        assert isinstance(self.op, Wait), self.op
        return self.op


def test_a_free_group_takes_one_call() -> None:
    """The lease counts from when the call was sent."""
    drive = Drive()
    assert (drive.verb, drive.call.args[FLOOR], drive.call.args[WAITER]) == ("acquire", 7, "w1")
    drive.feed(granted(), after=0.3)
    assert drive.result == Grant(50, "no-op", 0.0, 0.0, "lock", True, 50, 1000.0)


def test_a_waiter_reads_its_own_stream_from_the_beginning_in_slices() -> None:
    """Never longer than a third of its time to live, so that it refreshes in time."""
    drive = Drive()
    drive.feed(queued())
    assert drive.wait == Wait(GROUP.grant("w1"), "0-0", 5000)
    drive.feed([], after=5)
    assert (drive.verb, drive.call.args[SCORE], drive.call.args[FLOOR]) == ("acquire", "5", 10)


def test_in_a_lock_group_it_looks_again_when_the_holder_s_lease_ends() -> None:
    """Nobody else would notice the expiry; in a served group the coordinator does."""
    drive = Drive()
    drive.feed(queued(holder_ms=700))
    assert 700 < drive.wait.ms < 800
    served = Drive()
    served.feed(queued(holder_ms=700, mode="served"))
    assert served.wait.ms == 5000


def test_a_grant_is_confirmed_before_it_counts() -> None:
    """The lease counts from the confirmation's sending; the floor has risen to the token. †"""
    drive = Drive()
    drive.feed(queued(mode="served"))
    drive.feed(GRANT, after=2)
    assert (drive.verb, drive.call.args[:3]) == ("renew", (60, "w1", 60))
    assert drive.call.args[9] == "served"
    drive.feed(Renewed(60, 0), after=1)
    assert drive.result == Grant(60, "restored", 1.5, 2.0, "served", True, 60, 1002.0)


def test_a_refused_confirmation_queues_again_at_the_old_place() -> None:
    """It asks again with its score, and reads on behind the grant that was void. †"""
    drive = Drive()
    drive.feed(queued(score="5"))
    drive.feed(GRANT)
    drive.feed(Lost("c", 70, 70))
    assert (drive.verb, drive.call.args[SCORE]) == ("acquire", "5")
    drive.feed(queued(score="5"))
    assert drive.wait.after == "3-0"


def test_an_unanswered_confirmation_is_asked_again_by_the_next_call() -> None:
    """Its outcome is unknown: the state is the truth."""
    drive = Drive()
    drive.feed(queued())
    drive.feed(GRANT)
    drive.feed(DOWN)
    assert drive.verb == "acquire"
    drive.feed(granted(60))
    assert drive.result is not None
    assert drive.result.token == 60


def test_a_poke_is_answered_by_a_refresh_at_once() -> None:
    """The coordinator waits for this sign of life. †"""
    drive = Drive()
    drive.feed(queued(mode="served"))
    drive.feed(mail("poke", 2, swap="40"), after=0.1)
    assert drive.verb == "acquire"
    drive.feed(queued(mode="served"))
    assert drive.wait.after == "2-0"


def test_an_operator_s_cancel_ends_the_wait() -> None:
    """By the stream, naming who; or by the next refresh."""
    drive = Drive()
    drive.feed(queued())
    error = drive.fails(CancelledByOperatorError, mail("cancelled", by="eve"))
    assert "eve" in str(error)
    assert (error.group, error.job) == ("g", "a")
    other = Drive()
    other.feed(queued())
    other.feed([], after=5)
    other.fails(CancelledByOperatorError, Ended())


def test_a_cancelled_grant_is_not_entered() -> None:
    """The grant and its withdrawal lie in the stream together: the confirmation is refused, then the word is read."""
    drive = Drive()
    drive.feed(queued())
    drive.feed(GRANT + mail("cancelled", 4, by="eve"))
    drive.fails(CancelledByOperatorError, Lost("", 60, 60))


def test_a_grant_that_was_taken_back_says_by_whom() -> None:
    """An operator revoked it before it was confirmed: the refused confirmation has the name, the next refresh not."""
    drive = Drive()
    drive.feed(queued())
    drive.feed(GRANT)
    drive.feed(Lost("", 60, 60, by="eve"))
    error = drive.fails(CancelledByOperatorError, Ended())
    assert "eve cancelled the wait" in str(error)


def test_a_timeout_withdraws_the_request_and_names_the_holder() -> None:
    """Case L06. The entry is cancelled first, then the error tells why it waited."""
    drive = Drive(timeout_s=3.0)
    drive.feed(queued())
    assert drive.wait.ms == 3000
    drive.feed([], after=3)
    drive.feed(queued())
    assert (drive.verb, drive.call.args[1]) == ("cancel", "w1")
    error = drive.fails(AcquireTimeoutError, "queued")
    assert isinstance(error, TimeoutError)
    assert "within 3 s: job b holds it (position 1 in the queue)" in str(error)


def test_a_timeout_shows_the_reason_where_there_is_one() -> None:
    """A blocked or deferred waiter learns from the error what to do."""
    drive = Drive(timeout_s=0.0)
    drive.feed(queued(reason="deferred: n1: no room", holder=""))
    assert "deferred: n1: no room" in str(drive.fails(AcquireTimeoutError, "queued"))


def test_a_timeout_that_races_with_the_grant_never_enters() -> None:
    """Case L06. The grant landed after the last look: the cancel passes it on, and the error stands."""
    drive = Drive(timeout_s=1.0)
    drive.feed(queued())
    drive.feed([], after=1.1)
    drive.feed(queued())
    assert drive.verb == "cancel"
    drive.fails(AcquireTimeoutError, "granted")
    assert drive.result is None


def test_a_grant_at_the_last_look_is_entered() -> None:
    """It holds; to give it away would only cost a turn."""
    drive = Drive(timeout_s=1.0)
    drive.feed(queued())
    drive.feed([], after=1.1)
    drive.feed(granted())
    assert drive.result is not None


def test_no_wait_at_all_asks_once() -> None:
    """With a limit of 0 a free group is taken and a held one is not waited for."""
    drive = Drive(timeout_s=0.0)
    drive.feed(granted())
    assert drive.result is not None


def test_a_server_that_is_away_at_first_is_waited_for() -> None:
    """Who enters in an outage waits as who was queued before."""
    drive = Drive()
    drive.feed(DOWN, after=3600)
    assert drive.verb == "acquire"
    drive.feed(granted())
    assert drive.result is not None


def test_the_first_call_takes_no_longer_than_the_caller_would_wait() -> None:
    """A limit of two seconds is not stretched to ten by a server that does not answer."""
    assert Drive(timeout_s=2.0).call.deadline_s == 2.0
    assert Drive(timeout_s=0.0).call.deadline_s == 1.0
    assert Drive(timeout_s=60.0).call.deadline_s == 60.0
    assert Drive().call.deadline_s == math.inf


def test_a_queued_waiter_rides_out_an_outage() -> None:
    """It asks on, with its score and all it knows, and is granted when the server is back."""
    drive = Drive()
    drive.feed(queued(score="5", counter=44))
    drive.feed(DOWN, after=5)
    for _ in range(20):
        assert (drive.verb, drive.call.args[SCORE], drive.call.args[FLOOR]) == ("acquire", "5", 44)
        drive.feed(DOWN, after=10)
    drive.feed(queued(score="5"))
    drive.feed(GRANT)
    drive.feed(Renewed(60, 0))
    assert drive.result is not None
    assert drive.result.waited_s == 205


def test_without_a_limit_no_outage_is_too_long() -> None:
    """A job that was queued on Friday goes on when the server is back on Monday."""
    drive = Drive()
    drive.feed(queued())
    drive.feed([], after=5)
    drive.feed(DOWN, after=200_000)
    assert drive.verb == "acquire"
    drive.feed(granted())
    assert drive.result is not None


def test_an_outage_ends_with_the_caller_s_limit() -> None:
    """Nobody waits longer than they said."""
    drive = Drive(timeout_s=30.0)
    drive.feed(queued())
    drive.feed([], after=5)
    drive.fails(RedisUnreachableError, DOWN, after=26)


def test_the_note_is_told_at_each_refresh_and_may_end_the_wait() -> None:
    """What it raises comes out of the flow."""
    seen: list[str] = []

    def note(reply: Queued) -> None:
        seen.append(reply.reason)
        if len(seen) == 2:
            raise LookupError

    drive = Drive(note=note)
    drive.feed(queued(reason="one"))
    drive.feed([], after=5)
    with pytest.raises(LookupError):
        drive.feed(queued(reason="two"))
    assert seen == ["one", "two"]


def test_the_floor_never_falls() -> None:
    """After data loss a reply names a smaller counter; the waiter still knows better. †"""
    drive = Drive()
    drive.feed(queued(counter=90))
    drive.feed([], after=5)
    drive.feed(queued(counter=0))
    drive.feed([], after=5)
    assert drive.call.args[FLOOR] == 90
