"""Two programs that nothing tells apart: their ranks would complete each other's rounds."""

from __future__ import annotations

from tests.gang.lab import GangLab, Rank
from timeslice.locks.scripts import Ended, Granted, Queued, Renewed


def programs(lab: GangLab, count: int = 2) -> list[list[Rank]]:
    """Programs of two ranks under one name, each rank a process of its own on a node of its program's."""
    return [[lab.rank(rank, 2, host=f"h{program}") for rank in range(2)] for program in range(count)]


def once_more(lab: GangLab, rank: Rank) -> Rank:
    """The same process with a new request."""
    return lab.rank(rank.number, 2, host=rank.request.host)


def go_in(*ranks: Rank) -> None:
    for rank in ranks:
        assert rank.read()
        assert isinstance(rank.renew(), Renewed)


def test_ranks_of_two_programs_that_complete_each_other_s_round_are_told(lab: GangLab) -> None:
    """Nothing tells the programs apart but that each has a rank 0 that lives. Whoever came second is refused with what
    to set, at the latest when the first asks once more; its round ends for the others."""
    (a0, a1), (b0, b1) = programs(lab)
    a0.ask()
    assert isinstance(b1.ask(), Granted)
    go_in(a0)
    assert isinstance(b1.renew(), Renewed)
    b0.ask()
    a1.ask()  # the other halves wait behind
    a0.leave()
    b1.leave()
    go_in(b0, a1)
    later = once_more(lab, a0)
    assert isinstance(later.ask(), Queued)
    b0.leave()
    a1.leave()
    ended = once_more(lab, b0).ask()
    assert isinstance(ended, Ended)
    assert "another living process is rank 0 of 2, too; if these are two programs with one job id" in ended.reason
    assert "TIMESLICE_JOB" in ended.reason
    assert later.give_up() == "queued"


def test_a_program_beside_one_that_holds_is_refused_and_not_the_holder(lab: GangLab) -> None:
    """The second program came while the first computed. It may have been one that was started again, until the first
    asks once more: then the second's round is over, while it waits or when it asks next."""
    (a0, a1), (b0, b1) = programs(lab)
    for rank in (a0, a1):
        rank.ask()
    go_in(a0, a1)
    b0.ask()
    b1.ask()
    lab.pass_time(8)
    for rank in (a0, a1):
        assert isinstance(rank.renew(), Renewed)
    assert isinstance(b0.ask(), Queued)
    assert isinstance(b1.ask(), Queued)
    ahead = once_more(lab, a0)
    a0.leave()
    assert isinstance(ahead.ask(), Queued)
    ended = b0.ask()
    assert isinstance(ended, Ended)
    assert "too; if these are two programs" in ended.reason
    assert isinstance(b1.ask(), Ended)
    a1.leave()
    assert isinstance(once_more(lab, a1).ask(), Granted)


def test_a_rank_started_again_while_its_earlier_self_seems_inside_is_let_in(lab: GangLab) -> None:
    """Its earlier self died without a word: it never asks again, so nobody is taken for a second program."""
    (a0, a1), (b0, b1) = programs(lab)
    for rank in (a0, a1):
        rank.ask()
    go_in(a0, a1)
    for rank in (b0, b1):
        assert isinstance(rank.ask(), Queued)
    for _ in range(4):
        lab.pass_time(8)
        for rank in (b0, b1):
            assert isinstance(rank.ask(), Queued | Granted)
    assert lab.holder == b0.gang
    for rank in (b0, b1):
        rank.read()
        assert isinstance(rank.renew(), Renewed)
        rank.leave()
    again = [once_more(lab, rank) for rank in (b0, b1)]
    assert isinstance(again[0].ask(), Queued)
    assert isinstance(again[1].ask(), Granted)
