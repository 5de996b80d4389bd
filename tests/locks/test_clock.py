"""The server's clock steps, or nobody can reach the server for a while: nobody expires of that, and the dead do."""

from __future__ import annotations

import pytest

from tests.locks.lab import Lab
from timeslice.locks import scripts
from timeslice.locks.scripts import Granted, Lost, OwnedBy, Renewed

JUMPS = [11, 3600, 86_400 * 400, -1, -3600, -86_400 * 400]


@pytest.mark.parametrize("jump", JUMPS)
def test_a_jump_expires_nobody(lab: Lab, jump: int) -> None:
    """Holder, waiters, nodes and owner get a full term each, whoever comes first after it. †"""
    lab.join("n1")
    token = lab.grant("a1", served=True)
    lab.queue("b1", served=True)
    epoch = lab.own("c1")
    lab.jump(jump)
    assert isinstance(lab.run(scripts.own(lab.group, "c2")), OwnedBy)
    view = lab.view
    assert lab.holder == "a1"
    assert 29_000 < view.number("deadline_ms") - view.now_ms <= 30_000
    assert 9_000 < view.number("owner_deadline_ms") - view.now_ms <= 10_000
    assert 14 < -view.nodes["n1"].heartbeat_age_s <= 15
    assert view.queue[0].alive
    assert isinstance(lab.renew("a1", token, served=True), Renewed)
    assert lab.own("c1") == epoch


@pytest.mark.parametrize("jump", JUMPS)
def test_a_jump_leaves_time_for_an_unconfirmed_grant(lab: Lab, jump: int) -> None:
    """Its waiter can still confirm, and if it is dead it is in nobody's way for longer than its own term. †"""
    token = lab.grant("a1")
    lab.queue("b1")
    lab.queue("c1")
    lab.release("a1", token)
    lab.jump(jump)
    lab.queue("c1")
    assert lab.holder == "b1"
    assert 14_000 < lab.number("deadline_ms") - lab.view.now_ms <= 15_000
    lab.pass_time(9)
    lab.queue("c1")
    lab.pass_time(7)
    assert isinstance(lab.ask("c1"), Granted)


@pytest.mark.parametrize("jump", JUMPS)
def test_a_jump_gives_a_swap_its_full_budget_again(lab: Lab, jump: int) -> None:
    """An agent's order is not late because the clock moved. †"""
    lab.join("n1")
    token = lab.grant("a1", served=True)
    lab.queue("b1", served=True)
    lab.release("a1", token)
    epoch, swap = lab.own(), lab.swap
    lab.run(scripts.plan(lab.group, swap, epoch, "{}", 60_000))
    lab.jump(jump)
    left = lab.run(scripts.accepted(lab.group, "n1", swap, epoch, "prepare", "c-1"))
    assert 59_000 < left <= 60_000


@pytest.mark.parametrize("jump", [-1, -3600])
def test_tokens_rise_over_a_clock_that_went_back(lab: Lab, jump: int) -> None:
    """The next token is the last one's successor, though the time is earlier. †"""
    token = lab.grant("a1")
    lab.release("a1", token)
    lab.jump(jump)
    ahead = lab.counter
    assert ahead > lab.view.now_ms
    assert lab.grant("b1") == ahead + 1


def test_the_queue_keeps_its_order_over_a_clock_that_went_back(lab: Lab) -> None:
    """Who comes after the step is behind who came before it. †"""
    lab.grant("a1")
    lab.queue("b1")
    lab.jump(-3600)
    lab.queue("c1")
    assert lab.waiting == ["b1", "c1"]


def test_one_outage_gives_one_more_term_and_the_dead_expire_after_it(lab: Lab) -> None:
    """Case L04. Only one client looks in now and then, each time after a silence that could be an outage. The holder
    that died long ago does not profit from each of them."""
    lab.grant("a1")
    for attempt in range(6):
        lab.jump(20)
        reply = lab.ask(f"b{attempt}")
        if isinstance(reply, Granted):
            break
        lab.cancel(f"b{attempt}")
    assert lab.view.holder == "b"
    assert lab.number("token") == reply.token


def test_dead_waiters_do_not_profit_from_silences(lab: Lab) -> None:
    """As above, with dead waiters in front of the one that looks in."""
    lab.release("a1", lab.grant("a1"))
    token = lab.grant("a2")
    for n in range(3):
        lab.queue(f"d{n}")
    lab.release("a2", token)
    granted = False
    for attempt in range(6):
        lab.jump(20)
        if granted := isinstance(lab.ask(f"b{attempt}"), Granted):
            break
        lab.cancel(f"b{attempt}")
    assert granted


def test_who_renewed_since_an_outage_is_covered_in_the_next(lab: Lab) -> None:
    """Each sign of life counts for one outage."""
    token = lab.grant("a1")
    for _ in range(4):
        lab.jump(100)
        assert isinstance(lab.renew("a1", token), Renewed)
    lab.jump(100)
    lab.queue("b1")
    assert lab.holder == "a1"


def test_who_did_not_renew_between_two_outages_is_lost_in_the_end(lab: Lab) -> None:
    """A full term has passed since the first without a word."""
    token = lab.grant("a1")
    lab.jump(100)
    lab.queue("b1")
    lab.pass_time(9)
    lab.queue("b1")
    lab.jump(100)
    assert isinstance(lab.ask("b1"), Granted)
    assert isinstance(lab.renew("a1", token), Lost)


def test_a_silence_that_expired_nobody_is_not_worth_an_event(lab: Lab) -> None:
    """A lone holder that renews every ten seconds and more makes no noise."""
    token = lab.grant("a1")
    for _ in range(5):
        lab.jump(11)
        lab.renew("a1", token)
    assert lab.events("ClockStepped") == lab.events("TermsRenewed") == []
    lab.jump(-100)
    lab.renew("a1", token)
    assert (len(lab.events("ClockStepped")), lab.events("TermsRenewed")) == (1, [])


def test_an_outage_is_not_called_a_clock_that_stepped(lab: Lab) -> None:
    """It says how long nobody was heard, and that everybody got a full term."""
    token = lab.grant("a1")
    lab.jump(100)
    lab.renew("a1", token)
    (event,) = lab.events("TermsRenewed")
    assert 99_000 < int(event["silent_ms"]) < 110_000
    assert lab.events("ClockStepped") == []


def test_a_deferral_defers_after_the_clock_went_back(lab: Lab) -> None:
    """The last change of the group lies in the future then; that does not undo each deferral at once."""
    lab.join("n1")
    lab.run(scripts.report(lab.group, "n1", 0, [scripts.Observed("a", "resident")]))
    lab.queue("b1", served=True)
    epoch = lab.own()
    lab.jump(-3600)
    lab.refuse(epoch, "n1")
    lab.beat("n1")
    assert lab.swap == 0
    assert len(lab.events("SwapStarted")) == 1


def test_durations_are_never_negative(lab: Lab) -> None:
    """Times held, waited and swapped over a clock that went back are 0, not less."""
    lab.join("n1")
    token = lab.grant("a1", served=True)
    lab.queue("b1", served=True)
    lab.jump(-3600)
    lab.release("a1", token)
    epoch = lab.own()
    lab.jump(-3600)
    lab.carry_out(epoch, "n1", seen=[scripts.Observed("a", "suspended")])
    lab.grant("b1", served=True)
    times = [int(value) for event in lab.events() for name, value in event.items() if name in {"held_ms", "waited_ms"}]
    times += [int(event["swap_ms"]) for event in lab.events() if "swap_ms" in event]
    assert times
    assert min(times) >= 0
