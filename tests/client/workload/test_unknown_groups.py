"""A workload or a server that is registered for a group of another name than was meant."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import timeslice
from tests.client.world import World
from tests.support.jobs import wait_until
from timeslice.arena import Arena
from timeslice.client.identity import declared
from timeslice.client.workload import register_workload
from timeslice.errors import UnknownGroupError
from timeslice.locks import scripts
from timeslice.locks.drivers import SyncDriver
from timeslice.locks.scripts import Call


def workload(group: str) -> timeslice.Workload:
    return register_workload(group, on_suspend=lambda *_: 0, on_restore=lambda *_: 0, job="a")


def server(group: str) -> object:
    return timeslice.register_server(group, "http://127.0.0.1:8000", dialect="vllm", job="a")


@pytest.mark.parametrize("register", [workload, server])
def test_a_mistyped_group_is_refused_with_the_nearest_names(world: World, register: Callable[[str], object]) -> None:
    """As a hold of it is: agents serve other groups, and never served this one. Nothing stays of it."""
    world.serve("samplers", "trainers")
    with pytest.raises(UnknownGroupError, match="no agent serves group 'sampler'; served are: samplers"):
        register("sampler")
    assert ("sampler", "a") not in declared
    assert not world.redis.exists(*world.group("sampler").all)


def test_a_group_whose_agent_is_still_to_come_is_waited_for(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where no agent serves anything, the job may have come first. It is said, with node and remedy, and told again."""
    monkeypatch.setattr(timeslice.client.workload, "REFRESH_S", 0.2)
    made = workload("samplers")
    try:
        assert [line for line in caplog.messages if "known to nobody yet: no agent of node n1 serves" in line]
        world.serve("samplers")
        wait_until(lambda: bool(world.view("samplers").targets), "it is registered")
    finally:
        made.close()


def test_a_group_whose_agents_have_left_is_no_mistake(world: World) -> None:
    """They come back, as after an upgrade; other groups are served meanwhile."""
    world.serve("samplers", "trainers")
    world.run(scripts.leave(world.group("samplers"), "n1", []))
    workload("samplers").close()


def test_a_mistyped_group_is_told_when_the_server_can_be_asked_at_last(
    monkeypatch: pytest.MonkeyPatch, world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """It may be away when the workload registers: then the log has it."""
    world.serve("samplers")
    real, away = SyncDriver.run, [world.group("sampler").state]

    def run(driver: SyncDriver, call: Call[object], **options: Any) -> object:
        if call.keys[0] in away:  # not of another thread that is still about
            away.clear()
            raise timeslice.RedisUnreachableError("away")
        return real(driver, call, **options)

    monkeypatch.setattr(SyncDriver, "run", run)
    made = workload("sampler")
    try:
        wait_until(lambda: "served are: samplers" in caplog.text, "it is told")
    finally:
        made.close()


def test_an_arena_is_registered_as_a_workload_is(world: World) -> None:
    """What stands on register_workload is refused with it."""
    world.serve("samplers")
    arena: Arena = object.__new__(Arena)
    with pytest.raises(UnknownGroupError):
        timeslice.register_arena("sampler", arena, job="a")
