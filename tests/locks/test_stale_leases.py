"""Data was lost, and a holder that had lost its lease long ago comes back with it: who has seen a newer grant or swap
says so, and the old lease is neither put back nor kept."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import redis

from tests.locks.lab import Lab
from timeslice.locks import scripts
from timeslice.locks.scripts import Granted, Lost, Observed, Pulse, Renewed, Yielded

OUT, IN = Observed("a", "suspended", 5, 0, "arena"), Observed("b", "resident", 0, 5, "arena")


def beat(lab: Lab, fence: int) -> Pulse:
    return lab.run(scripts.heartbeat(lab.group, "n1", 15_000, fence=fence))


def replaced(lab: Lab) -> tuple[int, int]:
    """Job a's holder was stopped past its lease, a was moved out, b was let in; the tokens of both."""
    lab.join("n1")
    old = lab.grant("a1", served=True)
    lab.queue("b1", served=True)
    for _ in range(4):
        lab.pass_time(9)
        lab.beat("n1")
        epoch = lab.own()
        lab.ask("b1", served=True)
    lab.carry_out(epoch, "n1", seen=[OUT, IN], how="first load")
    token = lab.number("token")
    assert isinstance(lab.renew("b1", token, served=True), Renewed)
    return old, token


@pytest.mark.parametrize("over", ["yield", "loss"])
def test_a_lease_below_an_agent_s_fence_is_not_put_back(lab: Lab, over: str) -> None:
    """The agent is there first, and has seen the newer grant: the old holder has lost, each time it asks. †"""
    old, token = replaced(lab)
    if over == "yield":
        lab.release("b1", token)
    lab.lose_everything()
    beat(lab, token)
    lab.report("n1", OUT, IN)
    for _ in range(2):
        assert isinstance(lab.renew("a1", old, served=True, floor=old), Lost)
    assert lab.holder == ""
    assert {job: entry.residency for job, entry in lab.view.jobs.items()} == {"a": "suspended", "b": "resident"}
    if over == "loss":  # the newest one is not meant
        assert isinstance(lab.renew("b1", token, served=True), Renewed)
        assert lab.holder == "b1"


def test_a_lease_put_back_before_the_agent_came_ends_by_its_fence(lab: Lab) -> None:
    """It can only be believed at first. Then its job's state is proved out before anybody is let in. †"""
    old, token = replaced(lab)
    lab.lose_everything()
    assert isinstance(lab.renew("a1", old, served=True, floor=old), Renewed)
    assert lab.holder == "a1"
    beat(lab, token)
    assert lab.holder == ""
    assert lab.counter >= token
    assert lab.view.state["evict"] == "a"
    assert [event["job"] for event in lab.events("LeaseReclaimed")] == ["a"]
    lab.report("n1", OUT, IN)
    assert isinstance(lab.renew("a1", old, served=True), Lost)
    assert isinstance(lab.renew("b1", token, served=True), Renewed)
    assert lab.holder == "b1"


def test_a_revoked_holder_does_not_come_back(lab: Lab) -> None:
    """An operator took the lease, a swap put its job out: that swap's number is the agent's fence. †"""
    lab.join("n1")
    token = lab.grant("a1", served=True)
    epoch = lab.own()
    lab.run(scripts.revoke(lab.group, "a", "a1", token, "eve", "hog"))
    closed = lab.carry_out(epoch, "n1", seen=[OUT], how="no-op")
    lab.lose_everything()
    beat(lab, closed.swap)
    lab.report("n1", OUT)
    assert isinstance(lab.renew("a1", token, served=True), Lost)
    assert lab.holder == ""


def test_a_fence_at_the_holder_s_own_token_ends_nothing(lab: Lab) -> None:
    """The agent saw this grant and nothing newer: the holder puts its lease back, and keeps it. †"""
    lab.join("n1")
    token = lab.grant("a1", served=True)
    lab.lose_everything()
    beat(lab, token)
    assert isinstance(lab.renew("a1", token, served=True), Renewed)
    beat(lab, token)
    assert lab.holder == "a1"


def test_a_lease_that_a_replica_remembers_ends_by_the_fence(lab: Lab) -> None:
    """The newer grant was not copied when its server died. The agent has seen it. †"""
    lab.join("n1")
    token = lab.grant("a1", served=True)
    beat(lab, token + 10)
    assert lab.holder == ""
    assert lab.view.state["evict"] == "a"


def test_an_older_lease_is_not_put_back_after_a_forgotten_yield(lab: Lab) -> None:
    """The newer holder yields to a server that knows neither: the older one has lost, with a lock, too. †"""
    old = lab.grant("a1")
    lab.release("a1", old)
    token = lab.grant("b1")
    lab.lose_everything()
    assert isinstance(lab.release("b1", token), Yielded)
    assert isinstance(lab.renew("a1", old), Lost)
    assert lab.holder == ""


YEAR_MS = 366 * 24 * 3_600_000


@pytest.mark.parametrize("by", ["floor", "token", "yield", "score", "fence"])
def test_a_number_from_the_far_future_is_refused(lab: Lab, by: str) -> None:
    """It would stop the tokens from rising, and agents and clients would carry it on for ever. Nothing is changed. †"""
    lab.release("a1", lab.grant("a1"))
    before = lab.view.state
    calls: dict[str, Callable[[], object]] = {
        "floor": lambda: lab.ask("b1", floor=2**53),
        "token": lambda: lab.renew("b1", 2**53),
        "yield": lambda: lab.release("b1", 2**53),
        "score": lambda: lab.ask("b1", score=str(2**44 - 1)),
        "fence": lambda: beat(lab, 2**53),
    }
    with pytest.raises(redis.ResponseError, match="more than a year ahead of the server's clock"):
        calls[by]()
    assert lab.view.state == before
    tokens = []
    for n in range(3):
        tokens.append(lab.grant(f"c{n}"))
        lab.release(f"c{n}", tokens[-1])
    assert tokens == sorted(set(tokens))
    assert tokens[-1] < lab.view.now_ms + 1000


def test_a_clock_that_was_wrong_by_months_stops_nobody(lab: Lab) -> None:
    """Numbers drawn then are ahead of the clock, and count. †"""
    ahead = lab.view.now_ms + YEAR_MS - 3_600_000
    lab.queue("a1", floor=ahead)
    for _ in range(4):
        lab.pass_time(9)
        granted = lab.ask("a1")
    assert isinstance(granted, Granted)
    assert granted.token > ahead


def test_numbers_far_ahead_of_a_clock_that_went_back_for_good_count(lab: Lab) -> None:
    """The server's own memory is the witness: its clock was years ahead, and whoever knows its numbers is no liar. †"""
    ahead = lab.view.now_ms + 5 * YEAR_MS
    lab.plant(counter=ahead, seq=ahead)
    token = lab.grant("a1")
    assert token > ahead
    assert isinstance(lab.renew("a1", token, floor=token), Renewed)
