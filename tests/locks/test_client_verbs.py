"""acquire, renew, yield, cancel and register: what they do, what they refuse, and that a repeat changes nothing."""

from __future__ import annotations

import pytest

from tests.locks.lab import Lab
from timeslice.errors import GroupModeError
from timeslice.locks import scripts
from timeslice.locks.scripts import Ended, Granted, Lost, NotHolder, Queued, Renewed, Yielded

TTL_S, LEASE_S = 15, 30


def test_a_free_group_is_granted_at_once(lab: Lab) -> None:
    """The caller holds, is confirmed by having asked itself, and nothing waits in its stream."""
    reply = lab.ask("a1", label="train")
    assert isinstance(reply, Granted)
    assert (reply.how, reply.mode, reply.counter) == ("no-op", "lock", reply.token)
    state = lab.view.state
    assert (state["lease_id"], state["job"], state["label"], state["confirmed"]) == ("a1", "a", "train", "1")
    assert lab.view.phase == "held"
    assert lab.mail("a1") == []
    assert [event["job"] for event in lab.events("LeaseGranted")] == ["a"]


def test_the_second_waits_behind_the_first_and_is_told_why(lab: Lab) -> None:
    """Reply and view name the holder, the place and the phase."""
    lab.grant("a1")
    first, second = lab.queue("b1"), lab.queue("c1")
    assert (first.position, second.position) == (0, 1)
    assert (first.holder, first.phase, first.reason) == ("a", "held", "")
    assert 0 < first.holder_ms <= LEASE_S * 1000
    assert [(w.job, w.alive, w.deferred) for w in lab.view.queue] == [("b", True, ""), ("c", True, "")]


def test_a_refresh_keeps_the_place(lab: Lab) -> None:
    """Asking again with the same waiter id makes no second entry."""
    lab.grant("a1")
    before = lab.queue("b1")
    lab.queue("c1")
    assert lab.queue("b1").score == before.score
    assert lab.waiting == ["b1", "c1"]
    assert len(lab.events("WaiterQueued")) == 2


def test_priority_bands_go_first_and_within_a_band_the_first_comer(lab: Lab) -> None:
    """A later request of a higher priority overtakes; equal ones keep their order."""
    token = lab.grant("a1")
    for waiter, priority in (("b1", 0), ("c1", -100), ("d1", 100), ("e1", 0), ("f1", 100)):
        lab.queue(waiter, priority=priority)
    assert lab.waiting == ["d1", "f1", "b1", "e1", "c1"]
    lab.release("a1", token)
    assert lab.holder == "d1"


def test_scores_are_exact_for_all_priorities(lab: Lab) -> None:
    """Numbers above 1e14 keep all their digits: two requests of one millisecond stay apart in the last band too."""
    lab.grant("a1")
    replies = [lab.queue(f"b{n}", priority=-100) for n in range(5)]
    scores = [int(reply.score) for reply in replies]
    assert scores == list(range(scores[0], scores[0] + 5)) or sorted(set(scores)) == scores
    assert all(2**51 < score < 2**53 for score in scores)


def test_tokens_of_the_same_millisecond_differ(lab: Lab) -> None:
    """The one counter rises with each grant, however fast they come."""
    tokens = []
    for n in range(20):
        tokens.append(lab.grant(f"a{n}"))
        lab.release(f"a{n}", tokens[-1])
    assert sorted(set(tokens)) == tokens


def test_a_lost_reply_of_acquire_brings_the_same_grant(lab: Lab) -> None:
    """Asked again, the holder gets its token, not another."""
    token = lab.grant("a1")
    assert lab.grant("a1") == token
    assert len(lab.events("LeaseGranted")) == 1


def test_yield_hands_over_to_the_next(lab: Lab) -> None:
    """The grant lies in the next one's own stream and says all that its reader needs."""
    token = lab.grant("a1")
    lab.queue("b1")
    assert lab.release("a1", token).pending in {0, 1}
    (mail,) = lab.mail("b1")
    assert (mail["kind"], mail["how"]) == ("grant", "no-op")
    assert int(mail["token"]) > token
    assert lab.number("confirmed") == 0
    assert lab.redis.ttl(lab.group.grant("b1")) > 0


def test_a_yield_is_answered_alike_even_after_others_acted(lab: Lab) -> None:
    """Case L17. A yield whose reply was lost is sent again when the group is another's already; nothing of it moves."""
    token = lab.grant("a1")
    lab.queue("b1")
    first = lab.release("a1", token)
    other = lab.grant("b1")
    again = lab.release("a1", token)
    assert isinstance(first, Yielded)
    assert isinstance(again, Yielded)
    assert lab.holder == "b1"
    assert lab.number("token") == other
    assert len(lab.events("LeaseYielded")) == 1


def test_a_yield_with_nobody_waiting_keeps_the_state_and_says_so_each_time(lab: Lab) -> None:
    """``kept`` is the same in the answer to a repeat."""
    token = lab.grant("a1")
    assert [lab.release("a1", token).kept for _ in range(2)] == [True, True]


def test_a_yield_of_another_lease_is_refused_and_names_the_holder(lab: Lab) -> None:
    """Neither a wrong id nor a wrong token frees the group."""
    token = lab.grant("a1")
    assert lab.release("b1", token) == NotHolder("a", token)
    assert lab.release("a1", token - 1) == NotHolder("a", token)
    assert lab.holder == "a1"


def test_an_operator_yields_for_a_job_without_its_token(lab: Lab) -> None:
    """The lease id alone is enough for one who has no token."""
    lab.grant("a1")
    assert isinstance(lab.release("a1", None), Yielded)
    assert lab.holder == ""


def test_acquire_after_cancel_is_ended(lab: Lab) -> None:
    """A cancel that overtook its acquire wins: the late acquire gets nothing. †"""
    assert lab.cancel("a1") == "unknown"
    assert lab.ask("a1") == Ended()
    assert (lab.holder, lab.waiting) == ("", [])


def test_acquire_after_yield_is_ended(lab: Lab) -> None:
    """A copy of the acquire that arrives after its yield does not hold again. †"""
    lab.release("a1", lab.grant("a1"))
    assert lab.ask("a1") == Ended()
    assert lab.holder == ""


def test_what_ended_is_forgotten_in_time(lab: Lab) -> None:
    """The set of ended waiters keeps 120 s and no more."""
    lab.release("a1", lab.grant("a1"))
    lab.pass_time(121)
    lab.release("a2", lab.grant("a2"))
    assert lab.redis.zrange(lab.group.ended, 0, -1) == [b"a2"]


def test_a_cancelled_waiter_leaves_no_trace(lab: Lab) -> None:
    """Queue, record, sign of life and stream are gone; only the event bus tells of it."""
    lab.grant("a1")
    lab.queue("b1")
    assert lab.cancel("b1") in {"queued", "unknown"}
    assert lab.waiting == []
    assert lab.redis.hlen(lab.group.waiters) == 0
    assert lab.redis.zcard(lab.group.alive) == 0
    assert lab.redis.exists(lab.group.grant("b1")) == 0
    assert [event["waiter"] for event in lab.events("WaiterCancelled")] == ["b1"]


def test_a_cancel_that_crosses_the_grant_passes_it_on(lab: Lab) -> None:
    """Case L06. The grant had landed: the next one gets it, with a newer token."""
    token = lab.grant("a1")
    lab.queue("b1")
    lab.queue("c1")
    lab.release("a1", token)
    landed = lab.number("token")
    lab.cancel("b1")
    assert lab.holder == "c1"
    assert lab.number("token") > landed


def test_an_operator_does_not_cancel_a_holder(lab: Lab) -> None:
    """A body runs there: that needs a yield or a revocation."""
    lab.grant("a1")
    assert lab.cancel("a1", by="eve") == "holds"
    assert lab.holder == "a1"


def test_an_operator_cancels_a_waiter_which_is_told(lab: Lab) -> None:
    """The word lies in the waiter's own stream, and its next refresh is ended."""
    lab.grant("a1")
    lab.queue("b1")
    lab.cancel("b1", by="eve")
    assert {"kind": "cancelled", "by": "eve"} in lab.mail("b1")
    assert lab.ask("b1") == Ended()


def test_a_grant_by_stream_runs_to_the_sign_of_life_and_its_confirmation_to_a_full_lease(lab: Lab) -> None:
    """Unconfirmed it lasts as long as the waiter was known to live; confirmed, a lease. †"""
    token = lab.grant("a1")
    lab.queue("b1")
    lab.pass_time(10)
    lab.renew("a1", token)
    lab.release("a1", token)
    left_ms = lab.number("deadline_ms") - lab.view.now_ms
    assert 3_000 < left_ms <= 5_000
    assert isinstance(lab.renew("b1", lab.number("token")), Renewed)
    assert lab.number("deadline_ms") - lab.view.now_ms > 29_000
    assert lab.mail("b1") == []


def test_an_unconfirmed_grant_expires_without_reclaim(lab: Lab) -> None:
    """No body ran, so nothing is reclaimed; the next one is granted. †"""
    token = lab.grant("a1")
    lab.queue("b1")
    lab.release("a1", token)
    lab.pass_time(TTL_S + 1)
    lab.grant("c1")
    assert lab.events("LeaseReclaimed") == []
    assert [event["waiter"] for event in lab.events("GrantExpired")] == ["b1"]


def test_a_refused_confirmation_queues_again_at_the_old_place(lab: Lab) -> None:
    """It was slow, not dead: renewing is refused, asking again with its score puts it first. †"""
    token = lab.grant("a1")
    score = lab.queue("b1").score
    lab.release("a1", token)
    late = lab.number("token")
    lab.pass_time(TTL_S + 1)
    lab.grant("c1")
    lab.queue("d1")
    assert isinstance(lab.renew("b1", late), Lost)
    assert lab.queue("b1", score=score).position == 0
    assert lab.waiting == ["b1", "d1"]


def test_a_renewal_extends_and_tells_how_many_wait(lab: Lab) -> None:
    """The deadline is a full lease ahead again."""
    token = lab.grant("a1")
    lab.queue("b1")
    lab.pass_time(12)
    assert lab.renew("a1", token).pending == 1
    assert lab.number("deadline_ms") - lab.view.now_ms > 29_000


def test_a_holder_that_is_silent_for_a_lease_loses_it(lab: Lab) -> None:
    """Cases L04, L08. Renewing is refused from then on, whoever asks, and the next one holds."""
    token = lab.grant("a1")
    lab.pass_time(12)
    lab.queue("b1")
    lab.pass_time(12)
    lab.queue("b1")
    lab.pass_time(12)
    reply = lab.renew("a1", token)
    assert isinstance(reply, Lost)
    assert (lab.holder, reply.holder) == ("b1", "b")
    assert [(event["job"], event["why"]) for event in lab.events("LeaseReclaimed")] == [("a", "expired")]
    assert isinstance(lab.release("a1", token), NotHolder)


def test_nothing_that_a_former_holder_sends_touches_the_next_one(lab: Lab) -> None:
    """Case L08. Renewal, yield and cancel of an old lease leave the new one alone."""
    old = lab.grant("a1")
    lab.pass_time(LEASE_S + 1)
    token = lab.grant("b1")
    assert isinstance(lab.renew("a1", old), Lost)
    assert isinstance(lab.release("a1", old), NotHolder)
    lab.cancel("a1")
    assert (lab.holder, lab.number("token")) == ("b1", token)


def test_dead_waiters_are_passed_over_together(lab: Lab) -> None:
    """However many died, the living waits for one grant to expire, not for one each. More than one sweep holds too."""
    token = lab.grant("a1")
    for n in range(150):
        lab.send(scripts.acquire(lab.group, lab.request(f"d{n}")))
    score = lab.queue("z1").score
    lab.pass_time(10)
    lab.queue("z1")
    lab.renew("a1", token)
    lab.release("a1", token)
    assert lab.holder == "d0"
    lab.pass_time(6)
    reply = lab.ask("z1", score=score)
    assert isinstance(reply, Granted)
    assert lab.waiting == []
    assert lab.redis.hlen(lab.group.waiters) == 0


def test_a_waiter_is_never_reaped_for_waiting_long(lab: Lab) -> None:
    """It refreshes, so it lives, and is granted in the end."""
    token = lab.grant("a1")
    for _ in range(20):
        lab.queue("b1")
        lab.renew("a1", token)
        lab.pass_time(9)
    lab.renew("a1", token)
    lab.queue("b1")
    lab.release("a1", token)
    assert lab.holder == "b1"


def test_a_reaped_waiter_comes_back_to_its_place(lab: Lab) -> None:
    """It was only slow: with its old score it stands before those who came later."""
    token = lab.grant("a1")
    score = lab.queue("b1").score
    lab.pass_time(TTL_S + 1)
    lab.queue("c1")
    lab.renew("a1", token)
    assert lab.waiting == ["c1"]
    lab.queue("b1", score=score)
    assert lab.waiting == ["b1", "c1"]


def test_lock_only_of_a_served_group_is_refused(lab: Lab) -> None:
    """Agents swap there; a lock would let two states on the device. †"""
    lab.join("n1")
    with pytest.raises(GroupModeError, match="group g is served"):
        lab.ask("a1")
    assert lab.waiting == []


def test_undeclared_and_unserved_waits_and_says_why(lab: Lab) -> None:
    """No agent, no declaration: nobody is granted. †"""
    reply = lab.queue("a1", served=True)
    assert (reply.phase, reply.reason, reply.mode) == ("blocked", "no agent serves this group", "")


def test_an_undeclared_request_takes_a_lock_group_as_it_is(lab: Lab) -> None:
    """The mode is the group's, declared by whoever came first."""
    lab.release("a1", lab.grant("a1"))
    reply = lab.ask("b1", served=True)
    assert isinstance(reply, Granted)
    assert reply.mode == "lock"


def test_register_needs_an_agent_on_the_host_and_is_asked_for_until_done(lab: Lab) -> None:
    """A process is told in each reply that its host's agent does not know it."""
    record = '{"start":1}'
    assert lab.run(scripts.register(lab.group, "a", "n1", 7, record)) is False
    lab.join("n1")
    reply = lab.ask("a1", served=True)
    assert isinstance(reply, Granted)
    assert reply.registered is False
    assert lab.run(scripts.register(lab.group, "a", "n1", 7, record)) is True
    assert lab.ask("a1", served=True).registered is True
    assert lab.view.targets == {"a/n1/7": record}


def test_a_process_on_another_host_needs_no_registration(lab: Lab) -> None:
    """Nobody would watch it there."""
    lab.join("n1")
    reply = lab.ask("a1", served=True, host="laptop")
    assert isinstance(reply, Granted)
    assert reply.registered is True


def test_script_flush_is_no_event(lab: Lab) -> None:
    """The server forgets every script between any two calls; state and answers are unharmed."""
    token = lab.grant("a1")
    lab.redis.script_flush()
    assert isinstance(lab.queue("b1"), Queued)
    lab.redis.script_flush()
    assert isinstance(lab.renew("a1", token), Renewed)
    lab.redis.script_flush()
    assert isinstance(lab.release("a1", token), Yielded)
    assert lab.holder == "b1"
