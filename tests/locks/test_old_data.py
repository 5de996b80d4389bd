"""The server comes back with an older picture, as after a failover or a restart from a snapshot."""

from __future__ import annotations

from tests.locks.lab import Lab
from timeslice.locks import scripts
from timeslice.locks.scripts import Granted, Lost, Observed, Renewed


def _snapshot(lab: Lab) -> dict[bytes, bytes]:
    keys = list(lab.redis.scan_iter(f"{lab.group.prefix}:*"))
    return {key: lab.redis.dump(key) for key in keys}  # type: ignore[misc]


def _go_back(lab: Lab, snapshot: dict[bytes, bytes]) -> None:
    lab.lose_everything()
    for key, dump in snapshot.items():
        lab.redis.restore(key, 0, dump)


def test_an_agent_can_prove_a_loss_before_anything_was_granted(lab: Lab) -> None:
    """What it learned when it joined is more than nothing: after FLUSHALL its next beat stops all grants. †"""
    floor = lab.run(scripts.heartbeat(lab.group, "n1", 15_000)).counter
    lab.report("n1")
    lab.grant("a1", served=True)
    lab.lose_everything()
    lab.run(scripts.heartbeat(lab.group, "n1", 15_000, floor=floor))
    lab.report("n1")
    assert lab.queue("b1", served=True).reason.startswith("data was lost")


def test_the_newer_lease_is_put_back_over_the_older_one(lab: Lab) -> None:
    """The picture shows a holder that has yielded since; the one granted after it is not told that it lost. †"""
    first = lab.grant("a1")
    old = _snapshot(lab)
    lab.queue("b1")
    lab.release("a1", first)
    second = lab.number("token")
    assert isinstance(lab.renew("b1", second), Renewed)
    _go_back(lab, old)
    assert lab.holder == "a1"
    assert isinstance(lab.renew("b1", second), Renewed)
    assert lab.holder == "b1"
    assert isinstance(lab.renew("a1", first), Lost)
    assert lab.number("token") == second


def test_a_swap_from_before_the_loss_is_dropped_and_the_group_goes_on(lab: Lab) -> None:
    """Nobody will ever report on it: agents refuse its orders as old. All nodes tell what is there, then it goes on."""
    lab.join("n1")
    epoch = lab.own()
    first = lab.grant("a1", served=True)
    lab.queue("b1", served=True)
    lab.release("a1", first)
    lab.prepare(epoch, "n1")
    old = _snapshot(lab)
    closed = lab.carry_out(epoch, "n1", seen=[Observed("a", "suspended", 9)], how="first load")
    assert closed.lease_id == "b1"
    floor = lab.counter
    _go_back(lab, old)
    assert lab.swap > 0
    pulse = lab.run(scripts.heartbeat(lab.group, "n1", 15_000, floor=floor))
    assert lab.swap == 0
    assert not pulse.known
    lab.report("n1", Observed("a", "suspended", 9), Observed("b", "resident", 0, 9))
    for _ in range(4):
        lab.pass_time(9)
        lab.beat("n1")
        answer = lab.ask("b2", "b", served=True)
    assert isinstance(answer, Granted)


def test_the_quiet_time_after_a_loss_ends_though_hardly_anybody_looks_in(lab: Lab) -> None:
    """Each silence of over ten seconds looks like an outage; it prolongs the quiet time once, not for ever."""
    token = lab.grant("a1")
    lab.release("a1", token)
    lab.lose_everything()
    for _ in range(8):
        answer = lab.ask("b1", floor=token)
        lab.jump(11.5)
    assert isinstance(answer, Granted)


def test_the_end_of_a_job_is_told_once_and_only_if_it_was_there(lab: Lab) -> None:
    """The audit trail has no end of a job that the node never showed, and no second end of one that it did."""
    lab.join("n1")
    lab.report("n1", Observed("stranger", "gone"))
    lab.report("n1", Observed("a", "suspended", 9))
    for _ in range(2):
        lab.report("n1", Observed("a", "gone"))
    assert [event["job"] for event in lab.events("JobGone")] == ["a"]
