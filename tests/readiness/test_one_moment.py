"""A job in several groups is ready only if it was in all of them at one moment."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from tests.cli.conftest import Cli, World
from tests.readiness.conftest import readiness
from timeslice import web
from timeslice.locks import drivers, scripts
from timeslice.locks.keys import GroupKeys
from timeslice.locks.scripts import Call
from timeslice.locks.view import GroupView, look
from timeslice.readiness import LOOKS

GROUPS = ("samplers", "trainers")

Change = Callable[[str], None]


class Turns:
    """What happens between two looks at Redis: ``change`` is told which group is looked at next."""

    def __init__(self, world: World, change: Change) -> None:
        self.world, self.change = world, change
        self.looks: list[str] = []

    def look(self, group: GroupKeys) -> Call[GroupView]:
        if group.prefix == self.world.keys.prefix:
            self.looks.append(group.name)
            self.change(group.name)
        return look(group)


class Job:
    """Job a, which takes groups and gives them up; each time with a lease of its own."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.leases: dict[str, tuple[str, int]] = {}
        self._taken = itertools.count()

    def take(self, group: str) -> None:
        waiter = f"w{next(self._taken)}"
        granted = self.world.hold_lock_only(group, "a", waiter=waiter)
        request = self.world.request("a", waiter=waiter, lock_only=True)
        self.world.driver.run(scripts.renew(self.world.keys.group(group), request, granted.token))
        self.leases[group] = (waiter, granted.token)

    def give_up(self, group: str) -> None:
        self.world.driver.run(scripts.yield_(self.world.keys.group(group), *self.leases.pop(group)))


@pytest.fixture
def job(world: World) -> Job:
    return Job(world)


@pytest.fixture
def turns(world: World, monkeypatch: pytest.MonkeyPatch) -> Callable[[Change], Turns]:
    """For the port's looks and the command's."""

    def made(change: Change) -> Turns:
        found = Turns(world, change)
        monkeypatch.setattr(web, "look", found.look)
        monkeypatch.setattr(drivers, "look", found.look)
        return found

    return made


def test_who_takes_the_groups_by_turns_is_never_ready(
    port: int, cli: Cli, world: World, job: Job, turns: Callable[[Change], Turns]
) -> None:
    """Each group is held whenever it is looked at, and never both: 503, after a bounded number of looks."""

    def swap(group: str) -> None:
        (other,) = set(GROUPS) - {group}
        job.give_up(other)
        job.take(group)

    world.index("samplers")
    job.take("trainers")
    seen = turns(swap)
    found = readiness(port, "a")
    assert (found["state"], "came and went" in found["reason"]) == ("waiting", True)
    assert [each["ready"] for each in found["groups"]] == [False, False]
    assert len(seen.looks) == (1 + LOOKS) * len(GROUPS)
    result = cli("ready", "a")
    assert result.exit_code == 1
    assert "came and went" in result.stdout


def test_who_leaves_the_first_while_the_second_is_looked_at_is_what_he_is_then(
    port: int, world: World, job: Job, turns: Callable[[Change], Turns]
) -> None:
    """One turn is enough to tell: he waits for the first, which somebody else has."""

    def pass_on(group: str) -> None:
        if group == "trainers" and len(seen.looks) == 2:
            job.give_up("samplers")
            job.take("trainers")
            world.hold_lock_only("samplers", "b")
            world.acquire("samplers", "a", waiter="w2", lock_only=True)

    job.take("samplers")
    world.index("trainers")
    seen = turns(pass_on)
    found = readiness(port, "a")
    assert (found["state"], found["reason"]) == ("waiting", "samplers: job b holds it")


def test_who_holds_both_is_ready_though_he_took_the_second_meanwhile(
    port: int, cli: Cli, job: Job, turns: Callable[[Change], Turns]
) -> None:
    """What changed once is looked at again, and what then stays the same counts."""

    def renewed(group: str) -> None:
        if group == "samplers" and len(seen.looks) == 3:
            job.give_up(group)
            job.take(group)

    for group in GROUPS:
        job.take(group)
    seen = turns(renewed)
    assert readiness(port, "a")["state"] == "ready"
    assert seen.looks == [*GROUPS] * 3
    assert cli.json("ready", "a")["state"] == "ready"


def test_a_single_group_is_looked_at_once(port: int, job: Job, turns: Callable[[Change], Turns]) -> None:
    """There is nothing to compare it with; no more when one group is named."""
    job.take("samplers")
    seen = turns(lambda _: None)
    assert readiness(port, "a")["state"] == "ready"
    assert seen.looks == ["samplers"]
    job.take("trainers")
    assert readiness(port, "a", "trainers")["state"] == "ready"
    assert seen.looks == ["samplers", "trainers"]
