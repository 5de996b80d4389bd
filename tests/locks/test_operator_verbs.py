"""pause, configure and delete."""

from __future__ import annotations

import pytest

from tests.locks.lab import Lab
from timeslice.errors import GroupModeError, RefusedError, UnknownGroupError, UsageError
from timeslice.locks import scripts
from timeslice.locks.scripts import Granted, Renewed


def pause(lab: Lab, on: bool) -> str:
    return lab.run(scripts.pause(lab.group, on, "eve"))


def test_a_paused_group_queues_and_grants_nothing_and_the_holder_keeps(lab: Lab) -> None:
    """Resuming grants the first at once."""
    token = lab.grant("a1")
    assert pause(lab, True) == "held"
    assert isinstance(lab.renew("a1", token), Renewed)
    lab.release("a1", token)
    assert (lab.view.phase, lab.view.reason) == ("paused", "paused by eve")
    reply = lab.queue("b1")
    assert (reply.phase, reply.reason) == ("paused", "paused by eve")
    assert pause(lab, False) == "held"
    assert lab.holder == "b1"
    assert len(lab.events("GroupPaused")) == len(lab.events("GroupResumed")) == 1


def test_a_swap_under_way_ends_when_the_group_is_paused_and_grants_after(lab: Lab) -> None:
    """The device is not left in between; the waiter gets its turn at the resume, without another swap."""
    lab.join("n1")
    token = lab.grant("a1", served=True)
    lab.queue("b1", served=True)
    lab.release("a1", token)
    pause(lab, True)
    seen = [scripts.Observed("a", "suspended"), scripts.Observed("b", "resident")]
    assert lab.carry_out(lab.own(), "n1", seen=seen).lease_id == ""
    assert lab.view.phase == "paused"
    pause(lab, False)
    assert lab.holder == "b1"


def test_a_group_is_created_once(lab: Lab) -> None:
    """Its mode and settings are kept; a second creation is refused, a change is not."""
    assert lab.run(scripts.configure(lab.group, {"order": "3"}, mode="lock", only_new=True)) == "lock"
    with pytest.raises(RefusedError, match="exists already"):
        lab.run(scripts.configure(lab.group, {"order": "5"}, mode="lock", only_new=True))
    assert lab.view.config.order == 3
    assert lab.run(scripts.configure(lab.group, {"order": "4"})) == "lock"
    assert lab.view.config.order == 4
    with pytest.raises(GroupModeError):
        lab.run(scripts.configure(lab.group, {}, mode="served"))


def test_a_setting_that_can_t_be_read_is_named(lab: Lab) -> None:
    """Somebody wrote into the hash by hand."""
    lab.redis.hset(lab.group.config, "order", "first")
    with pytest.raises(UsageError, match="setting order"):
        _ = lab.view


def test_a_group_in_use_is_not_deleted(lab: Lab) -> None:
    """The refusal says by whom: holder, waiters, swap, agents; in the end nothing is left."""
    delete = scripts.delete(lab.group)
    lab.join("n1")
    token = lab.grant("a1", served=True)
    with pytest.raises(RefusedError, match="job a holds it"):
        lab.run(delete)
    lab.queue("b1", served=True)
    lab.release("a1", token)
    with pytest.raises(RefusedError, match="a swap is under way"):
        lab.run(delete)
    pause(lab, True)
    lab.cancel("b1")
    lab.queue("b2", served=True)
    with pytest.raises(RefusedError, match="jobs are waiting"):
        lab.run(delete)
    lab.cancel("b2")
    with pytest.raises(RefusedError, match="agents serve it"):
        lab.run(delete)
    lab.run(scripts.leave(lab.group, "n1"))
    lab.run(delete)
    assert list(lab.redis.scan_iter(f"{lab.group.prefix}:*")) == [lab.group.ended.encode()]
    assert 0 < lab.redis.ttl(lab.group.ended) <= 120
    with pytest.raises(UnknownGroupError):
        lab.run(scripts.delete(lab.group))


def test_a_repeat_of_a_delete_spares_the_group_that_was_made_since(lab: Lab) -> None:
    """The reply was lost and the call is sent again, late: it is answered like the first, and touches nothing."""
    lab.run(scripts.configure(lab.group, {}, mode="lock"))
    delete = scripts.delete(lab.group)
    lab.run(delete)
    lab.run(scripts.configure(lab.group, {"order": "3"}, mode="lock", only_new=True))
    lab.run(delete)
    assert lab.view.config.order == 3
    assert lab.redis.ttl(lab.group.ended) == -1


def test_a_repeat_of_a_creation_is_no_second_one(lab: Lab) -> None:
    """The reply to `group create` was lost: the repeat says that it went well; another's creation is refused."""
    create = scripts.configure(lab.group, {"order": "3"}, mode="lock", only_new=True)
    assert [lab.run(create), lab.run(create)] == ["lock", "lock"]
    with pytest.raises(RefusedError, match="exists already"):
        lab.run(scripts.configure(lab.group, {}, mode="lock", only_new=True))
    assert len(lab.events("GroupConfigured")) == 1


def test_a_node_that_left_has_left(lab: Lab) -> None:
    """The reply to its leave was lost, or it never joined: the answer is the same."""
    lab.join("n1")
    assert lab.run(scripts.leave(lab.group, "n1")) is True
    assert lab.run(scripts.leave(lab.group, "n1")) is True
    assert len(lab.events("NodeLeft")) == 1


def test_what_has_ended_is_remembered_up_to_a_number(lab: Lab) -> None:
    """However many waiters are cancelled within the two minutes; the latest are kept."""
    lab.redis.eval("for i = 1, 20000 do redis.call('ZADD', KEYS[1], ARGV[1] + i, 'w' .. i) end", 1, lab.group.ended,
                   lab.view.now_ms - 60_000)  # fmt: skip
    lab.cancel("last")
    assert 9_999 <= lab.redis.zcard(lab.group.ended) <= 10_000
    assert lab.redis.zscore(lab.group.ended, "w1") is None
    assert None not in lab.redis.zmscore(lab.group.ended, ["w20000", "last"])


def test_a_deleted_group_may_come_back_in_another_mode(lab: Lab) -> None:
    """The name is free again."""
    lab.join("n1")
    lab.run(scripts.leave(lab.group, "n1"))
    lab.run(scripts.delete(lab.group))
    reply = lab.ask("a1")
    assert isinstance(reply, Granted)
    assert reply.mode == "lock"
