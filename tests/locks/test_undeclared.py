"""Groups that nobody declared or serves: misspelt names must leave nothing for ever."""

from __future__ import annotations

from tests.locks.lab import Lab
from timeslice.locks import scripts
from timeslice.locks.scripts import Granted


def _lasting(lab: Lab) -> set[str]:
    """Keys of the group that no expiry ends."""
    return {key.decode() for key in lab.redis.scan_iter(f"{lab.group.prefix}:*") if lab.redis.ttl(key) < 0}


def _request(waiter: str, *, lock_only: bool = False) -> scripts.Request:
    return scripts.Request(waiter, "a", "n1", 1, 1, lock_only=lock_only)


def test_a_name_that_nobody_serves_leaves_nothing_for_ever(redis_url: str) -> None:
    """Who asks for a misspelt group and gives up leaves only keys that expire."""
    lab = Lab(redis_url)
    lab.send(scripts.acquire(lab.group, _request("w")))
    assert lab.redis.exists(lab.group.queue)
    lab.send(scripts.cancel(lab.group, "w"))
    assert lab.redis.exists(lab.group.state)
    assert _lasting(lab) == set()


def test_a_group_that_gets_an_agent_later_lasts(redis_url: str) -> None:
    """A waiter that was there before the first agent keeps its place, and the group is kept from then on."""
    lab = Lab(redis_url)
    lab.send(scripts.acquire(lab.group, _request("w")))
    lab.send(scripts.heartbeat(lab.group, "n1", 15_000))
    assert {lab.group.state, lab.group.queue, lab.group.waiters, lab.group.alive} <= _lasting(lab)


def test_a_declared_group_lasts(redis_url: str) -> None:
    """A lock-only group does not vanish because nobody used it for a while."""
    lab = Lab(redis_url)
    call = scripts.acquire(lab.group, _request("w", lock_only=True))
    granted = call.parse(lab.send(call))
    assert isinstance(granted, Granted)
    lab.send(scripts.yield_(lab.group, "w", granted.token))
    assert lab.group.state in _lasting(lab)
