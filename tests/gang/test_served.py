"""Gangs in a served group: agents vouch for each rank, see ranks end, and the device stays safe."""

from __future__ import annotations

from tests.gang.lab import NOTHING, GangLab
from timeslice.locks import scripts
from timeslice.locks.scripts import Exited, Granted, Lost, Observed, Queued, Renewed, text


def beat(lab: GangLab, node: str, gang: str, *ranks: int) -> None:
    lab.run(scripts.heartbeat(lab.group, node, 15_000, vouch=gang, ranks=ranks))


def test_a_rank_that_can_not_renew_is_vouched_for(lab: GangLab) -> None:
    """By the agent of its own node; nobody else's word counts."""
    lab.join("n1", "n2")
    ranks = lab.gang(2, served=True)
    ranks[1].token = lab.number("token")
    ranks[0].read()
    for rank in ranks:
        rank.renew()
    for _ in range(20):
        lab.pass_time(9)
        beat(lab, "n1", ranks[0].gang, 1)
        assert isinstance(ranks[0].renew(), Renewed)
    for _ in range(3):
        lab.pass_time(9)
        beat(lab, "n2", ranks[0].gang, 1)  # not its node
        ranks[0].renew()
    lab.pass_time(9)
    lost = ranks[0].renew()
    assert isinstance(lost, Lost)
    assert "rank 1" in lost.reason


def test_no_agent_vouches_for_ever(lab: GangLab) -> None:
    """A rank that hangs outside of Python loses the lease in the end, also if its neighbour renews."""
    lab.join("n1")
    ranks = lab.holding(2, served=True)
    for _ in range(34):
        lab.pass_time(9)
        beat(lab, "n1", ranks[0].gang, 0, 1)
        answer = ranks[0].renew()
    assert isinstance(answer, Renewed)
    for _ in range(4):
        lab.pass_time(9)
        beat(lab, "n1", ranks[0].gang, 0, 1)
        answer = ranks[0].renew()
    assert isinstance(answer, Lost)


def test_an_agent_does_not_confirm_a_grant(lab: GangLab) -> None:
    """A rank that was granted and has not answered may be on its way out."""
    lab.join("n1")
    ranks = lab.gang(2, served=True)
    ranks[0].read()
    ranks[0].renew()
    lab.pass_time(9)
    ranks[0].renew()
    assert [party.state for party in lab.view.parties] == ["inside", "arrived"]
    beat(lab, "n1", ranks[0].gang, 0, 1)
    lab.pass_time(7)
    assert isinstance(ranks[0].renew(), Lost)


def test_the_end_of_a_rank_s_process_ends_the_lease_at_once(lab: GangLab) -> None:
    """Its state is proved out before anybody is granted, and the other ranks learn who it was."""
    lab.join("n1")
    epoch = lab.own()
    ranks = lab.holding(2, served=True)
    lab.queue("b1", served=True)
    lab.report("n1", ended=[Exited("a", 101, 1)], whole=False)
    lost = ranks[0].renew()
    assert isinstance(lost, Lost)
    assert lost.reason == "rank 1 (process 101 on node n1) ended"
    assert lab.view.state["evict"] == "a"
    assert lab.carry_out(epoch, "n1", seen=[Observed("a", "gone")], how="first load").lease_id == "b1"
    assert lab.leftovers() == NOTHING


def test_the_end_of_a_rank_that_left_harms_nobody(lab: GangLab) -> None:
    """Programs end one rank after the other."""
    lab.join("n1")
    ranks = lab.holding(2, served=True)
    ranks[1].leave()
    lab.report("n1", ended=[Exited("a", 101, 1)], whole=False)
    assert isinstance(ranks[0].renew(), Renewed)


def test_the_end_of_a_rank_s_process_ends_the_wait_at_once(lab: GangLab) -> None:
    """Of a gang that forms and of one in the queue; another node's process with the same numbers is none of it."""
    lab.join("n1", "n2")
    lab.grant("b1", served=True)
    forming, queued = lab.rank(0, 2, served=True, pid=300), lab.gang(2, "c", served=True)
    forming.ask()
    lab.report("n2", ended=[Exited("a", 300, 1), Exited("c", 101, 1)], whole=False)
    assert lab.leftovers() != NOTHING
    lab.report("n1", ended=[Exited("a", 300, 1), Exited("c", 101, 1)], whole=False)
    assert lab.leftovers() == NOTHING
    assert forming.ask().reason == "rank 0 (process 300 on node n1) ended"
    assert queued[0].ask().reason == "rank 1 (process 101 on node n1) ended"


def test_a_gang_is_swapped_in_like_any_waiter(lab: GangLab) -> None:
    """One that is put off keeps its place; the swap's end grants all ranks."""
    lab.join("n1")
    epoch = lab.own()
    token = lab.grant("b1", served=True)
    ranks = lab.gang(2, served=True)
    lab.release("b1", token)
    assert lab.view.state["swap_waiter"] == ranks[0].gang
    lab.pass_time(2)
    lab.run(scripts.poke(lab.group, lab.swap, epoch))
    assert lab.mail(ranks[0].gang)[-1]["kind"] == "poke"
    assert isinstance(ranks[1].ask(), Queued)
    closed = lab.carry_out(epoch, "n1", seen=[Observed("b", "suspended", 9)], how="first load")
    assert closed.lease_id == ranks[0].gang
    for rank in ranks:
        assert rank.read()
        assert isinstance(rank.renew(), Renewed)
    refused = lab.run(scripts.evict(lab.group, "b", "eve", ""))
    assert refused is False  # there is none of it on the device


def test_a_group_with_a_gang_is_not_deleted(lab: GangLab) -> None:
    """Not while it forms either; afterwards nothing of it is left."""
    rank = lab.rank(0, 2)
    rank.ask()
    lab.twice = False
    reply = lab.send(scripts.delete(lab.group))
    assert reply == [b"refused", b"jobs are waiting for it"]
    rank.give_up()
    lab.run(scripts.delete(lab.group))
    assert not lab.view.exists


def test_a_pause_keeps_a_complete_gang_waiting(lab: GangLab) -> None:
    """And the holder keeps what it has."""
    lab.run(scripts.pause(lab.group, True, "eve"))
    ranks = lab.gang(2)
    assert (lab.holder, lab.waiting) == ("", [ranks[0].gang])
    lab.run(scripts.pause(lab.group, False, "eve"))
    assert lab.holder == ranks[0].gang


def test_a_repair_touches_no_gang_that_lives(lab: GangLab) -> None:
    """Forming, waiting or inside; what is left of one by half is taken away."""
    holding = lab.holding(2)
    forming, waiting = lab.rank(0, 2), lab.gang(2, "c")
    forming.ask()
    assert lab.run(scripts.repair(lab.group, "eve", "")) == ()
    assert isinstance(holding[0].renew(), Renewed)
    assert isinstance(waiting[0].ask(), Queued)
    lab.redis.zrem(lab.group.alive, forming.gang)
    lab.redis.hset(lab.group.waiters, mapping={"x/party/1": "i h 1 1 -", "i/gang": "x 1", "@n.a.2": "x"})
    lab.twice = False
    assert len(lab.run(scripts.repair(lab.group, "eve", ""))) == 2
    left = {text(key).split("/")[0] for key in lab.redis.hkeys(lab.group.waiters)}
    known = {rank.request.waiter for rank in (*holding, *waiting)}
    assert left == {holding[0].gang, waiting[0].gang} | known


def test_the_clock_goes_back_or_the_server_is_away(lab: GangLab) -> None:
    """Every rank gets its full term again, waiting or inside; nobody who died is kept for ever."""
    for seconds in (-3600, 3600):
        ranks = lab.holding(2)
        forming, waiting = lab.rank(0, 2), lab.gang(2, "c")
        forming.ask()
        lab.jump(seconds)
        assert isinstance(forming.ask(), Queued)
        assert isinstance(waiting[1].ask(), Queued)
        assert isinstance(ranks[0].renew(), Renewed)
        lab.pass_time(9)
        assert isinstance(waiting[0].ask(), Queued)
        lab.pass_time(9)
        assert isinstance(ranks[1].renew(), Renewed)
        for rank in ranks:
            rank.leave()
        lab.pass_time(40)
        lab.grant("z1")
        lab.release("z1", lab.number("token"))
        assert lab.leftovers() == NOTHING


def test_an_agent_vouches_on_after_an_outage(lab: GangLab) -> None:
    """A rank that could not renew by itself before the server went away need not do so at once when it is back."""
    lab.join("n1")
    ranks = lab.holding(2, served=True)
    lab.jump(3600)
    for _ in range(5):
        beat(lab, "n1", ranks[0].gang, 0, 1)
        lab.pass_time(9)
    assert isinstance(ranks[0].renew(), Renewed)


def test_after_a_failover_each_rank_renews_before_it_is_vouched_for(lab: GangLab) -> None:
    """The new server may have lost a rank's yield; that its process runs proves nothing then."""
    lab.join("n1")
    ranks = lab.holding(2, served=True)
    lab.plant(server="another", clock_ms=lab.view.now_ms - 100)
    assert isinstance(ranks[0].renew(), Renewed)
    for _ in range(4):
        lab.pass_time(9)
        beat(lab, "n1", ranks[0].gang, 0, 1)
    lost = ranks[0].renew()
    assert isinstance(lost, Lost)
    assert "rank 1" in lost.reason


def test_a_gang_is_granted_in_one_call_if_its_job_is_resident(lab: GangLab) -> None:
    """The last rank's call is the grant."""
    lab.join("n1")
    for rank in lab.holding(2, served=True):
        rank.leave()
    lab.rank(0, 2, served=True).ask()
    granted = lab.rank(1, 2, served=True).ask()
    assert isinstance(granted, Granted)
    assert granted.how == "no-op"
