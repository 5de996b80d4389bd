"""R03: what clients and commands do with several groups, which live on different servers of a cluster."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.cli.conftest import Cli
from tests.client.faces import AsyncFace, Face, SyncFace, in_thread
from tests.client.world import World
from tests.locks.conftest import cluster, sentinel
from timeslice import Client
from timeslice.errors import AcquireTimeoutError, DeadlockError, UnknownGroupError

__all__ = ["cluster", "sentinel"]  # fixtures

pytestmark = pytest.mark.slow
GROUPS = tuple(f"g{number}" for number in range(6))


@pytest.fixture(params=["cluster", "sentinel"])
def url(request: pytest.FixtureRequest) -> str:
    fleet: Any = request.getfixturevalue(request.param)
    return str(fleet.url)


@pytest.fixture
def world(url: str, prefix: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setenv("TIMESLICE_URL", url)
    monkeypatch.setenv("TIMESLICE_PREFIX", prefix)
    monkeypatch.setenv("TIMESLICE_NODE", "n1")
    made = World(url, prefix)
    yield made
    made.close()


@pytest.fixture(params=[SyncFace, AsyncFace], ids=["sync", "async"])
def face(request: pytest.FixtureRequest) -> Iterator[Face]:
    made = request.param()
    yield made
    made.end()


def test_several_groups_are_held_together(world: World, face: Face) -> None:
    """All or none, and each is free again afterwards."""
    client = face.client(job="a")
    seen: list[list[str]] = []
    face.hold(client, *GROUPS, body=lambda _: seen.append([world.holder(g) for g in GROUPS]), lock_only=True).result(30)
    assert seen == [["a"] * len(GROUPS)]
    assert [world.holder(group) for group in GROUPS] == [""] * len(GROUPS)


def test_one_that_is_taken_gives_the_others_back(world: World, face: Face) -> None:
    """The wait limit passes while the last is another's."""
    other, client = face.client(job="b"), face.client(job="a")
    lease = face.acquire(other, GROUPS[-1], lock_only=True).result(30)
    with pytest.raises(AcquireTimeoutError):
        face.hold(client, *GROUPS, body=lambda _: None, lock_only=True, timeout=0.3).result(30)
    assert [world.holder(group) for group in GROUPS] == [""] * (len(GROUPS) - 1) + ["b"]
    face.give_up(lease)


def test_a_cycle_over_several_servers_is_found(world: World) -> None:
    """Each job holds what the other one asks for: one of them is told, and the other goes on."""
    both_hold = threading.Barrier(2)

    def work(job: str, first: str, second: str) -> str:
        with Client(job=job) as client, client.hold(first, lock_only=True):
            both_hold.wait(20)
            with client.hold(second, lock_only=True, timeout=60):
                return job

    futures = [in_thread(lambda: work("a", *GROUPS[:2])), in_thread(lambda: work("b", *GROUPS[1::-1]))]
    assert {type(future.exception(60)) for future in futures} == {DeadlockError, type(None)}


def test_an_unknown_group_is_found_out_by_asking_all(world: World, face: Face) -> None:
    """The groups that agents serve are counted wherever they live."""
    world.serve(*GROUPS)
    with pytest.raises(UnknownGroupError, match="g1"):
        face.acquire(face.client(job="a"), "h1").result(30)


def test_every_command_works(world: World, prefix: str) -> None:
    """Those that look, those that wait, those that change."""
    cli = Cli(world.url, prefix)
    try:
        for group in GROUPS:
            assert cli("group", "create", group, "--lock-only").exit_code == 0
        held = cli.start("hold", "g1", "--job", "a", "--", "true")
        assert held.wait(60) == 0
        names = {group["group"] for group in cli.json("groups")["groups"]}
        assert names == set(GROUPS)
        for command in (["status"], ["status", "g1"], ["queue", "g1"], ["nodes"], ["jobs"], ["doctor"]):
            result = cli(*command)
            assert result.exit_code == 0, (command, result.output)
        events = [json.loads(line)["event"] for line in cli("events", "--json").stdout.splitlines()]
        assert {"GroupConfigured", "LeaseGranted", "LeaseYielded"} <= set(events)
        assert cli("group", "delete", "g2").exit_code == 0
        assert "g2" not in cli("groups").stdout
    finally:
        cli.close()
