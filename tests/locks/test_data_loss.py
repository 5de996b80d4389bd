"""The server lost data: everybody who knows more says so, nobody is granted meanwhile, and all find their places."""

from __future__ import annotations

from tests.locks.lab import Lab
from timeslice.locks import scripts
from timeslice.locks.scripts import Granted, Lost, Observed, Renewed, Yielded


def test_a_waiter_that_knows_more_stops_all_grants_for_a_lease(lab: Lab) -> None:
    """One with a higher number than the server's finds the group free, and waits all the same. †"""
    token = lab.grant("a1")
    lab.lose_everything()
    reply = lab.queue("b1", floor=token)
    assert reply.counter == token
    assert (reply.phase, reply.reason) == ("blocked", "data was lost; waiting for agents and holders to come back")
    for _ in range(3):
        lab.pass_time(9)
        lab.queue("b1")
    lab.pass_time(4)
    granted = lab.ask("b1")
    assert isinstance(granted, Granted)
    assert granted.token > token


def test_the_quiet_time_is_bounded_however_long_the_lost_lease_was(lab: Lab) -> None:
    """It is real, too: nobody is granted in it; and it ends within two minutes."""
    token = lab.grant("a1", lease_ms=600_000)
    lab.release("a1", token)
    lab.queue("b1", floor=token + 50)
    assert lab.holder == ""
    for _ in range(14):
        lab.pass_time(9)
        lab.ask("b1")
    assert lab.holder == "b1"


def test_a_quiet_time_survives_a_clock_step(lab: Lab) -> None:
    """The clock goes back in the middle of it: still nobody is granted, and not for longer than a lease."""
    token = lab.grant("a1")
    lab.lose_everything()
    lab.queue("b1", floor=token)
    lab.jump(-7200)
    lab.queue("b1")
    assert lab.holder == ""
    for _ in range(4):
        lab.pass_time(9)
        lab.ask("b1")
    assert lab.holder == "b1"


def test_a_holder_puts_its_lease_back(lab: Lab) -> None:
    """Its renewal carries all that the server forgot; the next one waits for its yield. †"""
    token = lab.grant("a1", label="train")
    lab.lose_everything()
    lab.queue("b1", floor=token)
    assert isinstance(lab.renew("a1", token, label="train", floor=token), Renewed)
    state = lab.view.state
    assert (state["lease_id"], state["job"], state["label"], state["token"]) == ("a1", "a", "train", str(token))
    assert lab.queue("b1").holder == "a"
    assert isinstance(lab.renew("a1", token), Renewed)


def test_tokens_rise_over_a_lease_put_back_by_one_who_names_no_floor(lab: Lab) -> None:
    """The token itself is the highest number it knows, though it lies ahead of the clock. †"""
    lab.plant(counter=lab.view.now_ms + 3_600_000)
    token = lab.grant("a1")
    lab.lose_everything()
    lab.renew("a1", token)
    lab.release("a1", token)
    lab.pass_time(31)
    assert lab.grant("b1") > token


def test_a_lease_is_not_put_back_over_another(lab: Lab) -> None:
    """Somebody was granted meanwhile: the late holder has lost. †"""
    token = lab.grant("a1")
    lab.lose_everything()
    lab.grant("b1")
    assert isinstance(lab.renew("a1", token), Lost)
    assert lab.holder == "b1"


def test_a_lease_is_not_put_back_after_another_s_turn(lab: Lab) -> None:
    """The group is free again, but a newer token has been given since. †"""
    token = lab.grant("a1")
    lab.lose_everything()
    lab.release("b1", lab.grant("b1"))
    assert isinstance(lab.renew("a1", token), Lost)
    assert lab.holder == ""


def test_a_yield_of_a_lease_that_the_server_forgot_is_no_loss(lab: Lab) -> None:
    """It stood until now: the holder is told so, each time, and is not let in again by a late renewal. It proves the
    loss, too: nobody is granted for a lease, and the next token is higher. †"""
    token = lab.grant("a1")
    lab.lose_everything()
    assert isinstance(lab.release("a1", token), Yielded)
    assert isinstance(lab.release("a1", token), Yielded)
    assert isinstance(lab.renew("a1", token), Lost)
    assert lab.holder == ""
    assert lab.queue("c1").reason.startswith("data was lost")
    for _ in range(4):
        lab.pass_time(9)
        lab.ask("c1")
    assert lab.holder == "c1"
    assert lab.number("token") > token


def test_a_forgotten_yield_leaves_the_one_who_holds_now(lab: Lab) -> None:
    """An older server's memory, or a newcomer: the yield of another lease never ends one."""
    token = lab.grant("a1")
    lab.lose_everything()
    lab.plant(counter=1)
    lab.grant("b1")
    lab.plant(token=token - 10)
    assert isinstance(lab.release("a1", token), Yielded)
    assert lab.holder == "b1"
    assert isinstance(lab.renew("b1", token - 10), Renewed)


def test_an_expired_lease_is_not_put_back(lab: Lab) -> None:
    """Nothing was lost: the server remembers this token and that it is over."""
    token = lab.grant("a1")
    lab.pass_time(31)
    lab.cancel("x1")
    assert lab.holder == ""
    assert isinstance(lab.renew("a1", token), Lost)
    assert lab.holder == ""


def test_waiters_come_back_to_their_places(lab: Lab) -> None:
    """In whatever order they return; who comes new is behind those who returned, even with the clock behind. †"""
    lab.plant(seq=lab.view.now_ms + 3_600_000)
    token = lab.grant("a1")
    scores = {waiter: lab.queue(waiter).score for waiter in ("b1", "c1", "d1")}
    lab.lose_everything()
    for waiter in ("d1", "b1"):
        lab.queue(waiter, score=scores[waiter], floor=token)
    lab.queue("e1", floor=token)
    lab.queue("c1", score=scores["c1"], floor=token)
    assert lab.waiting == ["b1", "c1", "d1", "e1"]


def test_an_agent_that_knows_more_brings_the_group_back(lab: Lab) -> None:
    """It joins again, is told that nothing of it is known, and reports; nobody is granted beside job a. †"""
    lab.join("n1")
    token = lab.grant("a1", served=True)
    floor = lab.counter
    lab.lose_everything()
    lab.queue("b1", served=True)
    pulse = lab.run(scripts.heartbeat(lab.group, "n1", 15_000, floor=floor))
    assert (pulse.known, pulse.counter) == (False, floor)
    lab.report("n1", Observed("a", "resident", 0, 9))
    assert lab.holder == ""
    assert isinstance(lab.renew("a1", token, served=True), Renewed)
    lab.release("a1", token)
    for _ in range(4):
        lab.pass_time(9)
        lab.beat("n1")
        lab.queue("b1", served=True)
    assert lab.view.state["swap_waiter"] == "b1"
    assert lab.holder == ""


def test_a_holder_s_job_counts_as_resident_when_its_lease_is_put_back(lab: Lab) -> None:
    """The agent's own report may come much later. †"""
    lab.join("n1")
    token = lab.grant("a1", served=True)
    lab.lose_everything()
    lab.beat("n1")
    lab.renew("a1", token, served=True)
    assert list(lab.view.resident) == ["a"]


def test_who_knows_no_more_is_no_witness_of_loss(lab: Lab) -> None:
    """Floors at or below the counter stop nothing."""
    token = lab.grant("a1")
    lab.release("a1", token)
    assert isinstance(lab.ask("b1", floor=token), Granted)
    assert lab.events("StateLost") == []


def test_a_newcomer_that_comes_before_the_waiters_stays_behind_them(lab: Lab) -> None:
    """The clock is behind all numbers drawn; the floor that comes with the newcomer raises its place too. †"""
    ahead = lab.view.now_ms + 3_600_000
    lab.plant(counter=ahead, seq=ahead)
    lab.grant("a1")
    score = lab.queue("b1").score
    lab.release("a1", lab.number("token"))
    token = lab.number("token") + 5
    lab.lose_everything()
    lab.queue("e1", floor=token)
    lab.queue("b1", score=score, floor=token)
    assert lab.waiting == ["b1", "e1"]
