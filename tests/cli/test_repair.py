"""`timeslice repair`: what needs no guess is put right, the rest is named with the next step."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cli.conftest import NODE, Cli, World
from timeslice.locks import scripts
from timeslice.locks.scripts import Observed
from timeslice.models import Target


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """No real agent will answer here."""
    monkeypatch.setattr("timeslice.cli.repair.LOOK_S", 0.2)


def left(cli: Cli, *more: str) -> list[str]:
    """What is in the way of `trainers`, as "what. Next: step" lines, with exit code 6."""
    result = cli("repair", "trainers", *more)
    assert result.exit_code == 6, result.stderr
    return [line.removeprefix("left: ") for line in result.stderr.splitlines() if line.startswith("left: ")]


def test_a_healthy_group_needs_nothing(cli: Cli, world: World) -> None:
    """Exit code 0, and no event."""
    world.serve("trainers")
    for _ in range(2):
        result = cli("repair", "trainers")
        assert result.exit_code == 0
        assert "trainers is idle; there is nothing to repair" in result.stderr
    assert "GroupRepaired" not in cli("events", "trainers").stdout


def test_half_records_and_lost_indexes_are_put_right(cli: Cli, world: World) -> None:
    """L24: a dry run says what would be done and does nothing; the second repair finds nothing."""
    world.serve("trainers")
    keys, client = world.keys.group("trainers"), world.driver.client
    client.srem(world.keys.groups, "trainers")
    client.srem(world.keys.nodes, NODE)
    client.hset(keys.jobs, "x/residency", "faulted")

    def repair(*more: str) -> Any:
        result = cli.json("repair", "trainers", *more)
        return result["repaired"]

    planned = cli("repair", "trainers", "--dry-run", "--json")
    assert planned.exit_code == 6  # the unknown state is still in the way
    assert client.hexists(keys.jobs, "x/residency")
    assert cli("groups", "--json").stdout.count("trainers") == 0
    done = repair()
    assert len(done) == 3
    assert all(line in planned.stdout for line in done)
    assert [group["group"] for group in cli.json("groups")["groups"]] == ["trainers"]
    assert [node["node"] for node in cli.json("nodes")["nodes"]] == [NODE]
    assert repair() == []
    assert "GroupRepaired" in cli("events", "trainers").stdout


def test_agents_are_asked_to_look_again(cli: Cli, world: World) -> None:
    """Each that lives gets the request on its stream, and no dry run sends one."""
    world.serve("trainers")
    world.serve("trainers", "node-2", ttl_ms=-1)
    cli("repair", "trainers", "--dry-run")
    assert world.entries(world.keys.commands(NODE)) == []
    cli("repair", "trainers")
    ((_, entry),) = world.entries(world.keys.commands(NODE))
    assert entry == {"look": "trainers"}
    assert world.entries(world.keys.commands("node-2")) == []


def test_a_holder_that_lives_is_named(cli: Cli, world: World) -> None:
    """Somebody waits: revoke is the next step; with nobody waiting a held group is well."""
    world.hold_lock_only("trainers", "a")
    assert cli("repair", "trainers").exit_code == 0
    world.acquire("trainers", "b", lock_only=True)
    (line,) = left(cli, "--dry-run")
    assert "job a holds it for" in line
    assert "timeslice revoke trainers --job a" in line
    assert cli.json("queue", "trainers")["holder"]["job"] == "a"


def test_a_silent_node_is_named_with_what_is_on_it(cli: Cli, world: World) -> None:
    """Start its agent, or forget it with what would be lost."""
    world.serve("trainers")
    keys = world.keys.group("trainers")
    seen = [Observed("a", "suspended", 5)]
    world.driver.run(scripts.report(keys, NODE, world.driver.view(keys).counter, seen))
    world.driver.client.zadd(keys.nodes, {NODE: 1})
    (line,) = left(cli, "--dry-run")
    assert f"node {NODE} is unreachable for" in line
    assert f"timeslice node forget {NODE} --lose a" in line


def test_a_job_of_unknown_state_is_named_with_its_processes(cli: Cli, world: World) -> None:
    """F05: end them; its record is not dropped by a guess."""
    world.serve("trainers")
    keys = world.keys.group("trainers")
    world.driver.run(scripts.own(keys, "c1"))
    world.driver.run(scripts.register(keys, "a", NODE, 77, "{}"))
    world.driver.run(scripts.report(keys, NODE, world.driver.view(keys).counter, [Observed("a", "faulted", 0, 5)]))
    (line,) = left(cli, "--dry-run")
    assert "the device state of job a is unknown" in line
    assert f"end its processes ({NODE} process 77)" in line


def test_a_workload_behind_a_gateway_has_to_speak_for_itself(cli: Cli, world: World) -> None:
    """The process that agents know only stands in for it, so ending that would tell nothing."""
    world.serve("trainers")
    keys = world.keys.group("trainers")
    world.driver.run(scripts.own(keys, "c1"))
    facts = {"host": NODE, "pid": 77, "start": 1, "uid": 0, "pid_namespace": "x", "backend": "channel"}
    record = Target.model_validate({"job": "a", **facts}).model_dump_json()
    world.driver.run(scripts.register(keys, "a", NODE, 77, record))
    world.driver.run(scripts.report(keys, NODE, world.driver.view(keys).counter, [Observed("a", "faulted")]))
    (line,) = left(cli, "--dry-run")
    assert f"have its workload register with the gateway of {NODE} again" in line
    assert "end its processes" not in line


def test_a_swap_in_the_middle_is_waited_for(cli: Cli, world: World) -> None:
    """It is named with the node that is at it, and nothing of it is dropped."""
    world.serve("trainers")
    swap = world.swap("trainers", out="a", into="b")
    (line,) = left(cli)
    assert f"node {NODE} is in the middle of a swap (begun commit). Next: wait" in line
    assert world.driver.view(world.keys.group("trainers")).swap == swap


def test_a_swap_without_a_coordinator_says_what_to_start(cli: Cli, world: World) -> None:
    """Nobody will ever carry it out."""
    world.serve("trainers")
    world.acquire("trainers", "a")
    world.acquire("trainers", "b")
    world.driver.run(scripts.yield_(world.keys.group("trainers"), "w-a", None))
    (line,) = left(cli, "--dry-run")
    assert "no coordinator drives its swap. Next: start one: timeslice coordinator" in line


def test_a_group_nobody_serves_and_one_that_is_paused(cli: Cli, world: World) -> None:
    """The two words that only a person can take back, and the agent that only a person can start."""
    world.index("trainers")
    assert cli("group", "create", "trainers").exit_code == 0
    assert cli("pause", "trainers").exit_code == 0
    agent, paused = left(cli, "--dry-run")
    assert "no agent serves it. Next: start one: timeslice agent --group trainers" in agent
    assert "timeslice resume trainers" in paused


def test_no_coordinator_is_named_where_one_is_needed(cli: Cli, world: World) -> None:
    """Somebody's state is on the device, so the next one can't get in. An empty group lets one in as it is."""
    world.serve("trainers")
    assert cli("repair", "trainers", "--dry-run").exit_code == 0
    granted = world.acquire("trainers", "a")
    keys = world.keys.group("trainers")
    world.driver.run(scripts.yield_(keys, "w-a", granted.token))
    (line,) = left(cli)
    assert line == "no coordinator drives its swaps. Next: start one: timeslice coordinator"
    world.driver.run(scripts.own(keys, "c1"))
    assert cli("repair", "trainers", "--dry-run").exit_code == 0


def test_what_nobody_can_see_is_named_with_the_way_out(cli: Cli, world: World) -> None:
    """Whoever runs it from a script gives the word as an option; of a job that is known it is refused."""
    world.serve("trainers")
    keys = world.keys.group("trainers")
    world.driver.run(scripts.own(keys, "c1"))
    seen = [Observed("a", "unknown", why="its process is hidden"), Observed("b", "suspended", 5)]
    world.driver.run(scripts.report(keys, NODE, world.driver.view(keys).counter, seen))
    (line,) = left(cli, "--dry-run")
    assert f"job a may still be on the devices of node {NODE}: its process is hidden" in line
    assert "timeslice repair trainers --out a" in line
    refused = cli("repair", "trainers", "--out", "b")
    assert refused.exit_code == 6
    assert "job b is suspended, which is known" in refused.stderr
    assert cli("repair", "trainers", "--out", "a").exit_code == 0
    assert [job.job for job in world.driver.view(keys).jobs.values()] == ["b"]


def test_status_and_queue_tell_why_nobody_is_let_in_beside_what_nobody_sees(cli: Cli, world: World) -> None:
    """The reason names job, node and cause, for people and for programs."""
    world.serve("trainers")
    keys = world.keys.group("trainers")
    seen = [Observed("a", "unknown", why="its process is hidden")]
    world.driver.run(scripts.report(keys, NODE, world.driver.view(keys).counter, seen))
    world.driver.run(scripts.acquire(keys, scripts.Request("b1", "b", "elsewhere", 7, 1)))
    why = f"job a may still be on the devices of node {NODE}: its process is hidden"
    assert why in cli("status", "trainers").stdout
    assert why in cli("queue", "trainers").stdout
    told = cli.json("status", "trainers")
    assert told["groups"][0]["reason"] == why
    assert cli("doctor").exit_code == 1
