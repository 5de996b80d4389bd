"""How a gang begins and ends as one: no body before all ranks confirmed, nobody else in while one may still work."""

from __future__ import annotations

import pytest

from tests.gang.lab import NOTHING, GangLab, Rank
from timeslice.locks import scripts
from timeslice.locks.scripts import Ended, Exited, Granted, Lost, NotHolder, Queued, Renewed, Yielded


def ends(lab: GangLab, rank: Rank) -> None:
    """An agent saw the rank's process end."""
    request = rank.request
    lab.report(request.host, ended=[Exited(request.job, request.pid, request.start)], whole=False)


def test_no_body_begins_before_all_have_confirmed(lab: GangLab) -> None:
    """Each is told how many are missing; the last one to confirm wakes the others."""
    lab.twice = False
    ranks = lab.gang(3)
    granted = ranks[0].ask()
    assert isinstance(granted, Granted)
    assert granted.unconfirmed == 2  # rank 0 came last, and knows of its grant
    ranks[1].token = ranks[2].token = granted.token
    assert [entry["kind"] for entry in lab.mail(ranks[0].gang)] == ["grant"]
    second = ranks[1].renew()
    assert (second.unconfirmed, ranks[0].renew().unconfirmed) == (1, 1)
    assert ranks[2].renew().unconfirmed == 0
    assert [entry["kind"] for entry in lab.mail(ranks[0].gang)] == ["grant", "all"]
    assert {rank.renew().unconfirmed for rank in ranks} == {0}


def test_a_gang_of_which_one_never_confirms_frees_the_group_at_once(lab: GangLab) -> None:
    """No body has begun, so there is nobody to wait for; the others are told who it was."""
    ranks = lab.gang(2)
    lab.queue("b1")
    assert ranks[0].read()
    for _ in range(2):
        assert ranks[0].renew().unconfirmed == 1
        lab.pass_time(8)
        lab.ask("b1")
    lost = ranks[0].renew()
    assert isinstance(lost, Lost)
    assert "rank 1 (process 101 on node n1) gave no sign of life" in lost.reason
    assert lab.holder == "b1"


@pytest.mark.parametrize("told", ["renews", "yields", "asks", "dies", "is silent"])
def test_nobody_is_let_in_beside_a_rank_that_may_work(lab: GangLab, told: str) -> None:
    """A rank dies inside: the next waiter gets in once the other one knows of it, is dead too, or past its term."""
    lab.join("n1")
    dead, other = lab.holding(2, served=True)
    lab.queue("b1", served=True)
    ends(lab, dead)
    assert lab.holder == dead.gang
    assert lab.view.state["ending"] == "rank 0 (process 100 on node n1) ended"
    if told == "renews":
        assert isinstance(other.renew(), Lost)
    elif told == "yields":
        assert isinstance(other.leave(), NotHolder)
    elif told == "asks":
        assert isinstance(other.ask(), Ended)
    elif told == "dies":
        ends(lab, other)
    else:
        for _ in range(3):
            lab.pass_time(8)
            lab.queue("b1", served=True)
            assert lab.holder == dead.gang
        lab.pass_time(8)
        lab.queue("b1", served=True)
    assert lab.holder == ""
    assert lab.view.state["evict"] == "a"
    assert [event["why"] for event in lab.events("LeaseReclaimed")] == ["rank 0 (process 100 on node n1) ended"]
    reply = other.renew()
    assert isinstance(reply, Lost)
    assert "rank 0 (process 100 on node n1) ended" in reply.reason
    assert isinstance(other.leave(), NotHolder)


def test_an_ending_gang_is_not_prolonged(lab: GangLab) -> None:
    """Neither by its agent's word nor by a yield point."""
    lab.join("n1")
    dead, other = lab.holding(2, served=True)
    ends(lab, dead)
    deadline = lab.view.number("deadline_ms")
    lab.pass_time(5)
    lab.run(scripts.heartbeat(lab.group, "n1", 15_000, vouch=other.gang, ranks=(1,), fence=0, floor=0))
    assert lab.view.number("deadline_ms") <= deadline
    assert not other.point(1)


def test_a_plain_lease_after_a_gang_is_one(lab: GangLab) -> None:
    """Whatever the gang left in the state, a single holder renews and yields."""
    for rank in lab.holding(2):
        rank.leave()
    assert lab.leftovers() == NOTHING
    token = lab.grant("b1")
    assert lab.renew("b1", token).unconfirmed == 0
    assert isinstance(lab.release("b1", token), Yielded)


def test_the_longest_term_is_everybodys(lab: GangLab) -> None:
    """A rank with a long lease renews rarely: a short one of another does not end it."""
    lab.twice = False
    long, short = lab.rank(0, 2, lease_ms=30_000), lab.rank(1, 2, lease_ms=2_000)
    assert isinstance(long.ask(), Queued)
    short.ask()
    assert long.read()
    short.token = long.token
    short.gang = long.gang
    assert isinstance(long.renew(), Renewed)
    for _ in range(6):
        lab.pass_time(1.5)
        assert isinstance(short.renew(), Renewed)
    assert isinstance(long.renew(), Renewed)


def test_what_a_gang_leaves_expires(lab: GangLab) -> None:
    """Of one that ended while it formed, too: the stream that tells why."""
    first = lab.rank(0, 2)
    first.ask()
    first.give_up()
    assert lab.redis.ttl(lab.group.grant(first.gang)) > 0
    assert lab.leftovers() == NOTHING


def test_yield_points_count_anew_in_each_lease(lab: GangLab) -> None:
    """What an earlier lease decided decides nothing in the next."""
    lab.twice = False
    ranks = lab.holding(2)
    lab.queue("b1")
    assert [rank.point(1) for rank in ranks] == [True, True]
    for rank in ranks:
        rank.leave()
    assert isinstance(lab.release("b1", lab.number("token")), Yielded)
    ranks = lab.holding(2)
    assert [rank.point(1) for rank in ranks] == [False, False]
