"""One lease, many parties: how a gang forms, is granted, and is given up."""

from __future__ import annotations

import pytest
import redis

from tests.gang.lab import NOTHING, GangLab
from tests.locks.test_long_queues import MOST, crowd
from timeslice.errors import RefusedError
from timeslice.locks import scripts
from timeslice.locks.scripts import Ended, Granted, Lost, NotHolder, Queued, Renewed, Yielded


def test_the_group_is_granted_when_the_last_rank_is_there(lab: GangLab) -> None:
    """Before that nobody is in, and each refresh says who is missing; then all have one lease and one token."""
    ranks = [lab.rank(n, 3) for n in range(3)]
    first = ranks[2].ask()
    assert isinstance(first, Queued)
    assert first.reason == "ranks 0, 1 of 3 have not arrived"
    assert ranks[0].ask().reason == "rank 1 of 3 has not arrived"
    assert (lab.holder, lab.waiting) == ("", [])
    granted = ranks[1].ask()
    assert isinstance(granted, Granted)
    assert granted.gang == lab.holder
    for other in (ranks[0], ranks[2]):
        assert other.read()
        assert isinstance(other.renew(), Renewed)
    assert {rank.gang for rank in ranks} == {lab.holder}
    assert {rank.token for rank in ranks} == {granted.token}


def test_a_gang_that_forms_is_in_nobodys_way(lab: GangLab) -> None:
    """Its place is taken when it is complete: whoever asked before goes first, though its first rank came earlier."""
    early = lab.rank(0, 2)
    early.ask()
    token = lab.grant("b1")
    lab.queue("c1")
    late = lab.rank(1, 2)
    late.ask()
    assert lab.waiting == ["c1", early.gang]
    lab.release("b1", token)
    assert lab.holder == "c1"
    lab.release("c1", lab.number("token"))
    assert lab.holder == early.gang
    assert early.read()


def test_the_group_is_free_when_all_ranks_have_left(lab: GangLab) -> None:
    """Not before; and nothing is left of the gang."""
    ranks = lab.holding(3)
    lab.queue("b1")
    for rank in ranks[:2]:
        assert isinstance(rank.leave(), Yielded)
        assert lab.holder == ranks[0].gang
    ranks[2].leave()
    assert lab.holder == "b1"
    assert [event["waiter"] for event in lab.events("LeaseYielded")] == [ranks[0].gang]
    lab.release("b1", lab.number("token"))
    assert lab.leftovers() == NOTHING
    for rank in ranks:
        assert isinstance(rank.leave(), Yielded)  # asked again


def test_a_rank_that_left_is_not_inside_any_more(lab: GangLab) -> None:
    """A late renewal of it, or a late join with its old id, does not bring it back."""
    ranks = lab.holding(2)
    ranks[0].leave()
    assert isinstance(ranks[0].renew(), Lost)
    assert isinstance(ranks[0].ask(), Ended)
    assert isinstance(ranks[1].renew(), Renewed)
    ranks[1].leave()
    assert lab.holder == ""


def test_a_rank_that_had_left_has_yielded_whatever_became_of_the_others(lab: GangLab) -> None:
    """Its repeated yield is answered like the first, though another rank's death ended the lease meanwhile."""
    ranks = lab.holding(2)
    assert isinstance(ranks[0].leave(), Yielded)
    ranks[1].give_up()
    assert isinstance(ranks[0].leave(), Yielded)


def test_a_late_repeat_of_the_first_call_begins_no_new_round(lab: GangLab) -> None:
    """The network brings it again when the rank, or all ranks, have done with the lease."""
    ranks = lab.holding(2)
    for rank in ranks:
        rank.leave()
        assert isinstance(ranks[0].ask(gang=""), Ended)
    assert lab.leftovers() == NOTHING


@pytest.mark.parametrize("silent", [0, 1])
def test_the_lease_ends_for_all_when_one_rank_is_silent(lab: GangLab, silent: int) -> None:
    """However often the others renew; they are told who it was. What a repeated yield then says is that it is lost."""
    ranks = lab.holding(2)
    alive = ranks[1 - silent]
    for _ in range(3):
        lab.pass_time(9)
        assert isinstance(alive.renew(), Renewed)
    lab.pass_time(4)
    lost = alive.renew()
    assert isinstance(lost, Lost)
    assert lost.reason == f"rank {silent} (process {100 + silent} on node n1) gave no sign of life"
    assert isinstance(alive.leave(), NotHolder)
    assert isinstance(ranks[silent].renew(), Lost)
    assert lab.holder == ""
    assert lab.leftovers() == NOTHING
    assert lab.events("LeaseReclaimed")[0]["why"] == lost.reason


@pytest.mark.parametrize("queued", [False, True], ids=["forming", "queued"])
def test_the_wait_ends_for_all_when_one_rank_is_silent(lab: GangLab, queued: bool) -> None:
    """In forming and in the queue."""
    token = lab.grant("b1")
    ranks = [lab.rank(n, 2 if queued else 3) for n in range(2)]
    for rank in ranks:
        rank.ask()
    lab.pass_time(9)
    ranks[0].ask()
    lab.renew("b1", token)
    lab.pass_time(9)
    ended = ranks[0].ask()
    assert isinstance(ended, Ended)
    assert ended.reason == "rank 1 (process 101 on node n1) gave no sign of life"
    assert lab.mail(ranks[0].gang)[-1] == {"kind": "ended", "reason": ended.reason}
    assert isinstance(ranks[1].ask(), Ended)
    assert lab.leftovers() == NOTHING


def test_a_grant_that_one_rank_never_confirms_ends_for_all(lab: GangLab) -> None:
    """Whoever had confirmed is inside and learns it as lost; the next waiter gets the group."""
    token = lab.grant("c1")
    ranks = lab.gang(2)
    lab.queue("b1")
    lab.release("c1", token)
    assert ranks[1].read()
    assert isinstance(ranks[1].renew(), Renewed)
    lab.pass_time(8)
    ranks[1].renew()
    lab.queue("b1")
    lab.pass_time(8)
    lost = ranks[1].renew()
    assert isinstance(lost, Lost)
    assert lost.reason == "rank 0 (process 100 on node n1) gave no sign of life"
    assert lab.holder == "b1"


def test_a_grant_that_nobody_confirms_passes_on(lab: GangLab) -> None:
    """All ranks died: no body ran, so nothing is reclaimed."""
    token = lab.grant("c1")
    lab.gang(2)
    lab.pass_time(9)
    lab.queue("b1")
    lab.release("c1", token)
    lab.pass_time(7)
    assert isinstance(lab.ask("b1"), Granted)
    assert [event["type"] for event in lab.events() if event["type"] in {"GrantExpired", "LeaseReclaimed"}] == [
        "GrantExpired"
    ]


def test_a_rank_that_gives_up_ends_the_wait_for_all_and_is_named(lab: GangLab) -> None:
    """Also for one whose own call is still under way: it does not begin a round by itself."""
    ranks = [lab.rank(n, 3) for n in range(2)]
    for rank in ranks:
        rank.ask()
    assert ranks[1].give_up("it was not granted within 5 s") == ("unknown" if lab.twice else "queued") or lab.twice
    ended = ranks[0].ask()
    assert isinstance(ended, Ended)
    assert ended.reason == (
        "rank 1 (process 101 on node n1) gave up: it was not granted within 5 s; rank 2 of 3 has not arrived"
    )
    assert isinstance(ranks[0].ask(gang=""), Ended)
    assert isinstance(ranks[1].ask(gang=""), Ended)
    assert lab.leftovers() == NOTHING


def test_a_rank_that_gives_up_at_its_grant_ends_the_lease_for_all(lab: GangLab) -> None:
    """Its program would wait for it in the first collective call."""
    ranks = lab.gang(2)
    ranks[1].read()
    ranks[1].renew()
    ranks[0].give_up()
    lost = ranks[1].renew()
    assert isinstance(lost, Lost)
    assert lost.reason == "rank 0 (process 100 on node n1) gave up"
    assert lab.leftovers() == NOTHING


def test_a_cancel_before_the_join_stops_it(lab: GangLab) -> None:
    """The order in which they arrive does not matter."""
    rank = lab.rank(0, 2)
    assert rank.give_up() == "unknown"
    assert isinstance(rank.ask(), Ended)
    assert lab.leftovers() == NOTHING


def test_a_rank_started_again_takes_its_earlier_place(lab: GangLab) -> None:
    """The earlier process is told who took it; the round goes on."""
    first, again, other = lab.rank(0, 2), lab.rank(0, 2, pid=555), lab.rank(1, 2)
    first.ask()
    assert again.ask().reason == "rank 1 of 2 has not arrived"
    ended = first.ask()
    assert isinstance(ended, Ended)
    assert ended.reason.startswith("rank 0 (process 555 on node n1) took its place; if these are two programs with one")
    assert isinstance(other.ask(), Granted)
    assert again.read()
    assert isinstance(again.renew(), Renewed)
    for rank in (again, other):
        rank.leave()
    assert lab.leftovers() == NOTHING


def test_the_next_round_forms_while_a_rank_is_still_inside(lab: GangLab) -> None:
    """Who is ahead waits for the others, who are not disturbed."""
    ranks = lab.holding(2)
    ranks[0].leave()
    ahead = lab.rank(0, 2)
    assert ahead.ask().reason == "rank 1 of 2 has not arrived"
    assert ahead.gang != ranks[0].gang
    assert isinstance(ranks[1].renew(), Renewed)
    ranks[1].leave()
    behind = lab.rank(1, 2)
    granted = behind.ask()
    assert isinstance(granted, Granted)
    assert ahead.read()
    assert ahead.token == granted.token > ranks[0].token


def test_two_gangs_of_other_names_never_mix(lab: GangLab) -> None:
    """An elastic restart, or another job, is another gang."""
    old, new, other = lab.rank(0, 2), lab.rank(1, 2, gang="g2"), lab.rank(1, 2, "b")
    for rank in (old, new, other):
        assert "not arrived" in rank.ask().reason
    assert len({rank.gang for rank in (old, new, other)}) == 3
    assert isinstance(lab.rank(0, 2, gang="g2").ask(), Granted)
    assert lab.holder == new.gang


def test_a_gang_of_a_thousand(lab: GangLab) -> None:
    """The largest that is taken; the missing are named in a few words."""
    lab.twice = False
    ranks = [lab.rank(n, 1024) for n in range(1024)]
    assert ranks[1023].ask().reason == ("ranks 0, 1, 2, 3, 4, 5, 6, 7 and 1015 more of 1024 have not arrived")
    for rank in ranks[:-1]:
        last = rank.ask()
    assert isinstance(last, Granted)
    for rank in ranks:
        rank.gang, rank.token = last.gang, last.token
        rank.leave()
    assert lab.leftovers() == NOTHING
    assert lab.events("GangForming") == []


def test_a_round_that_waits_for_ranks_is_told_once(lab: GangLab) -> None:
    """At the first sign of life of one that is there already: every hold of a gang forms for a moment."""
    lab.twice = False
    first, second = lab.rank(0, 3), lab.rank(1, 3)
    first.ask()
    second.ask()
    assert lab.events("GangForming") == []
    for _ in range(2):
        first.ask()
        second.ask()
    (told,) = lab.events("GangForming")
    assert (told["arrived"], told["missing"]) == ("2", "rank 2 of 3 has not arrived")
    first.give_up()
    assert lab.leftovers() == NOTHING


@pytest.mark.parametrize(("number", "world"), [(2, 2), (-1, 2), (0, 0), (0, 1025), (0, 2000)])
def test_a_rank_that_can_not_be_is_refused(lab: GangLab, number: int, world: int) -> None:
    """The scripts take nobody's word for it; nothing is written."""
    rank = lab.rank(number, world)
    with pytest.raises(redis.exceptions.ResponseError, match="a rank is a number"):
        rank.ask()
    rank.gang, rank.token = "x", 5
    with pytest.raises(redis.exceptions.ResponseError, match="a rank is a number"):
        rank.renew()
    assert lab.leftovers() == NOTHING


def test_the_ranks_decide_together_where_they_yield(lab: GangLab) -> None:
    """Who comes first to a point decides; who is behind passes the points that the first passed, and yields at its."""
    ranks = lab.holding(2)
    assert [ranks[0].point(n) for n in (1, 2)] == [False, False]
    lab.queue("b1")
    assert not ranks[0].point(3, min_slice_ms=60_000)
    assert [ranks[1].point(n) for n in (1, 2, 3)] == [False, False, False]
    assert ranks[1].point(4)
    assert ranks[0].point(4)
    ranks[1].leave()
    assert not ranks[1].point(5)
    ranks[0].leave()
    assert lab.holder == "b1"
    lab.release("b1", lab.number("token"))
    lab.queue("b2") if lab.holder else None
    again = lab.holding(2)
    assert not again[0].point(1, min_slice_ms=60_000)


def test_an_operator_cancels_revokes_and_yields_a_gang(lab: GangLab) -> None:
    """By the gang's id, at each stage; all ranks learn who it was."""
    forming = lab.rank(0, 2)
    forming.ask()
    lab.cancel(forming.gang, by="eve")
    assert forming.ask() == Ended("eve")
    assert lab.mail(forming.gang)[-1] == {"kind": "cancelled", "by": "eve"}
    ranks = lab.holding(2)
    assert lab.cancel(ranks[0].gang, by="eve") == "holds"
    lab.run(scripts.revoke(lab.group, "a", ranks[0].gang, ranks[0].token, "eve", "stuck", at_once=True))
    assert [(r.renew().by, r.renew().reason) for r in ranks] == [("eve", "stuck")] * 2
    again = lab.holding(2)
    assert isinstance(lab.release(again[0].gang, None), Yielded)
    assert lab.holder == ""
    assert lab.leftovers() == NOTHING


def test_a_rank_that_comes_new_to_a_full_queue_is_refused(lab: GangLab) -> None:
    """Whether it would begin a round or end one; those who had come wait on, and it may come again."""
    first = lab.rank(0, 2)
    first.ask()
    names = crowd(lab, MOST)
    for rank in (lab.rank(1, 2), lab.rank(0, 2, "c")):
        with pytest.raises(RefusedError, match="10000 requests wait already"):
            rank.ask()
    assert [len(gang.parties) for gang in lab.view.forming] == [1]
    assert isinstance(first.ask(), Queued)
    lab.redis.zrem(lab.group.alive, *names)
    assert isinstance(lab.rank(1, 2).ask(), Granted)
