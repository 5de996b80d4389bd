"""The server forgets: a gang that held holds on, one that waited comes back to its place."""

from __future__ import annotations

from tests.gang.lab import NOTHING, GangLab
from timeslice.locks.scripts import Granted, Lost, Queued, Renewed


def test_the_ranks_put_their_lease_back(lab: GangLab) -> None:
    """The first to renew brings it, the others join it; then it is given up as ever."""
    ranks = lab.holding(3)
    lab.lose_everything()
    for rank in ranks:
        assert isinstance(rank.renew(), Renewed)
    assert lab.holder == ranks[0].gang
    assert [(party.rank, party.host, party.state) for party in lab.view.parties] == [
        (n, "n1", "inside") for n in range(3)
    ]
    for rank in ranks:
        rank.leave()
    assert lab.holder == ""
    assert lab.leftovers() == NOTHING


def test_a_rank_that_does_not_come_back_ends_the_lease(lab: GangLab) -> None:
    """It died with the server, or had left before; nobody can tell, so the lease ends by its term and all learn it."""
    ranks = lab.holding(2)
    ranks[1].leave()
    lab.lose_everything()
    assert isinstance(ranks[0].renew(), Renewed)
    for _ in range(3):
        lab.pass_time(9)
        assert isinstance(ranks[0].renew(), Renewed)
    lab.pass_time(9)
    lost = ranks[0].renew()
    assert isinstance(lost, Lost)
    assert lost.reason == "rank 1 gave no sign of life"
    assert lab.leftovers() == NOTHING


def test_a_rank_that_leaves_a_lease_that_was_lost_ends_it_for_all(lab: GangLab) -> None:
    """Nobody can say later who else is inside; and nobody is granted before all of them know."""
    ranks = lab.holding(2)
    lab.lose_everything()
    ranks[0].leave()
    lost = ranks[1].renew()
    assert isinstance(lost, Lost)
    assert lost.reason == "rank 0 gave it up after the server had lost data"
    assert isinstance(lab.ask("b1"), Queued)


def test_a_gang_that_waited_comes_back_to_its_place(lab: GangLab) -> None:
    """When the last of its ranks has come back, before whoever came behind it."""
    token = lab.grant("b1")
    ranks = lab.gang(2)
    for rank in ranks:
        rank.ask()
    behind = lab.queue("c1")
    lab.lose_everything()
    lab.renew("b1", token, floor=token)
    lab.ask("c1", score=behind.score, floor=token)
    for rank in ranks:
        rank.ask()
    assert lab.waiting == [ranks[0].gang, "c1"]


def test_a_grant_that_some_ranks_had_read_is_one_lease_again(lab: GangLab) -> None:
    """The one that had not read it asks again, and is told the lease that the other put back; in either order."""
    for first in (0, 1):
        ranks = lab.gang(2, gang=f"g{first}")
        assert ranks[0].read()
        ranks[0].renew()
        lab.lose_everything()
        if first:
            assert isinstance(ranks[1].ask(), Queued)
        assert isinstance(ranks[0].renew(), Renewed)
        granted = ranks[1].ask()
        assert isinstance(granted, Granted)
        assert (granted.gang, granted.token) == (ranks[0].gang, ranks[0].token)
        for rank in ranks:
            rank.leave()
        assert lab.holder == ""
        assert lab.leftovers() == NOTHING


def test_a_rank_that_knew_no_gang_yet_and_one_that_did_meet(lab: GangLab) -> None:
    """Whoever comes first makes the round anew."""
    first, second = lab.rank(0, 2), lab.rank(1, 2)
    first.ask()
    lab.lose_everything()
    second.ask()
    granted = first.ask()
    assert isinstance(granted, Granted)
    assert granted.gang == second.gang
