"""News of phases when the server is away, answers get lost, or there are too many."""

from __future__ import annotations

import time
from typing import Any

import pytest

import timeslice
from tests.client.world import World
from tests.phases.tale import events, story, told
from tests.support.jobs import wait_until
from timeslice import Client
from timeslice.client import renewal
from timeslice.events import PhaseBegan, PhaseEnded
from timeslice.locks import scripts
from timeslice.locks.scripts import Ended, Stretch
from timeslice.locks.scripts.phases import Kind
from timeslice.torture.proxy import Proxy


@pytest.fixture
def behind(proxy: Proxy, world: World, monkeypatch: pytest.MonkeyPatch) -> Proxy:
    """Job a has held g, over a network that obeys the test."""
    monkeypatch.setenv("TIMESLICE_JOB", "a")
    monkeypatch.setenv("TIMESLICE_URL", proxy.url)
    with timeslice.hold("g", lock_only=True):
        pass
    return proxy


def test_without_a_server_nothing_waits_and_nothing_is_lost(behind: Proxy, world: World) -> None:
    """The body runs at once; when the server is back, all is told once and in order."""
    behind.cut()
    began = time.monotonic()
    for name in ("one", "two"):
        with timeslice.phase(name):
            pass
    assert time.monotonic() - began < 8  # one call alone is tried for ten seconds
    behind.heal()
    told(world, PhaseEnded, 2)
    assert story(world) == ["began one", "ended one", "began two", "ended two"]


@pytest.mark.parametrize("kind", ["began", "ended"])
@pytest.mark.parametrize("fault", ["lose_reply_to", "repeat_request_to"])
def test_a_repeated_message_is_told_once(behind: Proxy, world: World, kind: str, fault: str) -> None:
    """Whether its answer was lost or it arrived twice."""
    getattr(behind, fault)(f"${len(kind)}\r\n{kind}\r\n")
    with timeslice.phase("verify"):
        pass
    with timeslice.phase("next"):
        pass
    told(world, PhaseEnded, 2)
    assert story(world) == ["began verify", "ended verify", "began next", "ended next"]
    assert behind.lost_replies + behind.repeated_requests == 1


def test_of_too_many_the_oldest_are_dropped(behind: Proxy, world: World) -> None:
    """A server that stays away costs a bounded amount of memory; what is told later is what was last."""
    behind.cut()
    most = renewal._NEWS_MOST
    for number in range(most):
        with timeslice.phase(f"p{number}"):
            pass
    with timeslice.phase("last"):
        pass
    behind.heal()
    wait_until(lambda: story(world)[-1:] == ["ended last"], "all is told")
    assert story(world)[-most] == f"began p{most // 2 + 1}"
    assert len(story(world)) <= most + 1  # one was on its way


def test_a_late_repeat_does_not_bring_a_phase_back(world: World) -> None:
    """A begin that arrives again after the end: no event, and the job is shown in no phase."""
    world.serve("g")
    world.run(scripts.acquire(world.group(), scripts.Request("w", "a", "n1", 1, 1)))
    world.run(scripts.yield_(world.group(), "w", None))
    stretch = Stretch("s", "a", "verify", "n1", 1)
    twice: tuple[Kind, ...] = ("began", "ended", "began", "ended")
    for kind in twice:
        assert world.run(scripts.phase(world.group(), stretch, kind, seconds=1.5))
    assert story(world) == ["began verify", "ended verify"]
    assert world.view().jobs["a"].phase == ""
    assert events(world, PhaseEnded)[0].seconds == 1.5
    assert not events(world, PhaseBegan)[0].details().get("seconds")


def test_many_phases_push_no_lease_out_of_memory(world: World) -> None:
    """The ids of ended leases are few, and those of phases may be many: the latter make room."""
    with Client(job="a") as client:
        client.acquire("g", lock_only=True).yield_()
    lease = next(event["waiter"] for event in world.events() if event["type"] == "LeaseYielded")
    keys = world.group()
    world.run(scripts.phase(keys, Stretch("s", "a", "verify", "n1", 1), "began"))
    score = world.redis.zscore(keys.ended, "s/began")
    crowd: dict[Any, float] = {f"s{number}/began": score for number in range(10_001)}
    world.redis.zadd(keys.ended, crowd)
    world.run(scripts.phase(keys, Stretch("t", "a", "verify", "n1", 1), "began"))
    assert world.redis.zcard(keys.ended) <= 10_001
    request = scripts.Request(lease, "a", "n1", 1, 1, lock_only=True)
    assert isinstance(world.run(scripts.acquire(keys, request)), Ended)
