"""A gang whose ranks have not all arrived waits: a monitor must not start its job again."""

from __future__ import annotations

from dataclasses import replace

from tests.cli.conftest import Cli, World
from tests.readiness.conftest import readiness, state
from timeslice.locks import scripts
from timeslice.locks.scripts import Granted, Party, Queued, Request

LACKS = "gang 1/2, rank 1 has not arrived"


def request(world: World, rank: int, *, waiter: str = "", lock_only: bool = True) -> Request:
    """One rank of job a's gang of two."""
    party = Party("g1", rank, 2)
    return world.request("a", waiter=waiter or f"w{rank}", party=party, label="train", lock_only=lock_only)


def forms(world: World, group: str, *, lock_only: bool = True) -> str:
    """Rank 0 asks, and rank 1 does not. Returns the gang."""
    answer = world.driver.run(scripts.join(world.index(group), request(world, 0, lock_only=lock_only)))
    assert isinstance(answer, Queued)
    return answer.gang


def test_its_job_waits_for_the_rank_that_is_missing(port: int, cli: Cli, world: World) -> None:
    """For probes, for the command, and in the list of jobs."""
    forms(world, "samplers")
    found = readiness(port, "a")
    assert (found["state"], found["reason"]) == ("waiting", f"samplers: {LACKS}")
    assert [each["phase"] for each in found["groups"]] == ["train"]
    assert readiness(port, "a", "samplers")["reason"] == LACKS
    assert cli("ready", "a").exit_code == 1
    (row,) = cli.json("jobs")["jobs"]
    assert (row["job"], row["waiting"], row["holds"]) == ("a", 1, False)
    assert "waits" in cli("jobs").stdout


def test_it_is_counted_among_those_that_wait(cli: Cli, world: World) -> None:
    """In the line of its group."""
    forms(world, "samplers")
    (row,) = [line.split() for line in cli("status").stdout.splitlines() if line.startswith("samplers")]
    assert row[:5] == ["samplers", "idle", "-", "-", "1"]
    (summary,) = cli.json("groups")["groups"]
    assert summary["waiting"] == 1


def test_it_is_told_before_what_else_is_in_the_way(port: int, world: World) -> None:
    """While others hold, too: nobody queues for a gang that is not whole. In a served group it does not idle."""
    world.serve("trainers")
    world.acquire("trainers", "b")
    forms(world, "trainers", lock_only=False)
    (found,) = readiness(port, "a")["groups"]
    assert (found["state"], found["reason"]) == ("waiting", LACKS)


def test_one_whose_rank_has_fallen_silent_waits_for_nothing(port: int, world: World) -> None:
    """Its time is over, though nobody has swept it away yet."""
    gang = forms(world, "samplers")
    world.driver.client.zadd(world.keys.group("samplers").alive, {gang: world.now_ms() - 1})
    assert state(port, "a") == "absent"


def test_a_gang_that_is_inside_is_ready_whoever_of_it_asks_again(port: int, world: World) -> None:
    """A rank that is early for the next round changes nothing."""
    forms(world, "samplers")
    group = world.keys.group("samplers")
    granted = world.driver.run(scripts.join(group, request(world, 1)))
    assert isinstance(granted, Granted)
    for rank in range(2):
        world.driver.run(scripts.renew(group, replace(request(world, rank), waiter=granted.gang), granted.token))
    assert state(port, "a") == "ready"
    world.driver.run(scripts.yield_(group, granted.gang, granted.token, rank=0))
    world.driver.run(scripts.join(group, request(world, 0, waiter="w2")))
    assert world.driver.view(group).forming
    assert state(port, "a") == "ready"


def test_a_gang_is_ready_only_while_all_of_it_is_at_work(port: int, world: World) -> None:
    """From the moment in which its last rank has come in, to that in which one is known to have died or given up: the
    others hear of it at their next renewals, and till then they hold."""
    forms(world, "samplers")
    group = world.keys.group("samplers")
    granted = world.driver.run(scripts.join(group, request(world, 1)))
    assert isinstance(granted, Granted)
    found = readiness(port, "a")
    assert (found["state"], found["reason"]) == (
        "waiting",
        "samplers: gang: it was granted, and rank 0 has not begun",
    )
    for rank in range(2):
        world.driver.run(scripts.renew(group, replace(request(world, rank), waiter=granted.gang), granted.token))
    assert state(port, "a") == "ready"
    world.driver.run(scripts.cancel(group, "w1"))
    assert world.driver.view(group).holder == "a"
    found = readiness(port, "a")
    assert (found["state"], found["reason"]) == (
        "waiting",
        "samplers: gang: one of its ranks has died or given up, which ends the hold of all",
    )
