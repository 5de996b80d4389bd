"""`timeslice evict`: a job that does not hold is moved to host memory now."""

from __future__ import annotations

import json

from tests.cli.conftest import Cli, World
from tests.cli.operated import SIZE, StartJob
from tests.cli.stack import Up, ask, ready, shown
from timeslice.locks import scripts


def test_a_job_that_has_yielded_is_moved_out_and_comes_back_whole(up: Up, job: StartJob) -> None:
    """Refused while it holds; then done; then there is nothing to do; later it holds again with its state as it was."""
    ready(up())
    first = job("a")
    first.do("hold", "inside")
    holding = ask("evict", "a")
    assert holding.exit_code == 6
    assert "it holds the group; take that away first: timeslice revoke" in holding.stderr
    first.do("yield", "yielded")
    done = ask("evict", "a", "--reason", "debugging", "--json")
    assert done.exit_code == 0, done.stderr
    (told,) = json.loads(done.stdout)["groups"]
    assert (told["group"], told["state"]) == ("trainers", "out")
    (group,) = shown("status", "trainers")["groups"]
    assert [(each["job"], each["residency"], each["host_bytes"]) for each in group["jobs"]] == [
        ("a", "suspended", SIZE)
    ]
    again = ask("evict", "a")
    assert again.exit_code == 0
    assert "job a has nothing on the device of trainers" in again.stderr
    assert first.do("hold", "inside").endswith("same")


def test_a_move_that_fails_is_told_and_changes_nothing(cli: Cli, world: World) -> None:
    """Exit code 1 with the reason; the job keeps the device."""
    world.serve("trainers")
    keys = world.keys.group("trainers")
    world.driver.run(scripts.own(keys, "c1", 60_000))
    granted = world.acquire("trainers", "a")
    world.driver.run(scripts.yield_(keys, "w-a", granted.token))
    pending = cli("evict", "a", "--wait", "0.3")
    assert pending.exit_code == 4
    view = world.driver.view(keys)
    world.driver.run(scripts.settle(keys, view.swap, view.epoch, "no room in host memory", 1000))
    process = cli.start("evict", "a")
    while not (view := world.driver.view(keys)).swap:
        assert process.poll() is None
    world.driver.run(scripts.settle(keys, view.swap, view.epoch, "no room in host memory", 1000))
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "could not be moved off the device of trainers: no room in host memory" in err
    assert world.driver.view(keys).resident == ("a",)


def test_each_group_is_asked_and_one_refusal_is_enough(cli: Cli, world: World) -> None:
    """F04: a job with roles in two groups; in one it holds, in the other there is nothing to do."""
    world.serve("trainers")
    world.serve("samplers")
    world.acquire("trainers", "a")
    world.acquire("samplers", "b")
    world.acquire("samplers", "a")
    result = cli("evict", "a", "--json")
    assert result.exit_code == 6
    assert {each["group"]: each["state"] for each in json.loads(result.stdout)["groups"]} == {
        "trainers": "refused",
        "samplers": "nothing to do",
    }
    alone = cli("evict", "a", "--group", "samplers")
    assert alone.exit_code == 0


def test_an_unknown_job_is_exit_code_3(cli: Cli, world: World) -> None:
    """A misspelt name is not "nothing to do"; an unknown group neither."""
    world.hold_lock_only("trainers", "a")
    assert cli("evict", "z").exit_code == 3
    assert cli("evict", "a", "--group", "trainer").exit_code == 3


def test_a_job_that_only_has_processes_is_asked_for_what_it_has(cli: Cli, world: World) -> None:
    """It may have loaded without a turn. Who can't be asked is no job that has nothing: refused, with the reason."""
    world.serve("trainers")
    keys = world.keys.group("trainers")
    world.driver.run(scripts.register(keys, "a", "node-1", 77, "{}"))
    refused = cli("evict", "a")
    assert refused.exit_code == 6
    assert "no coordinator drives the swap" in refused.stderr
    world.driver.run(scripts.own(keys, "c1", 60_000))
    pending = cli("evict", "a", "--wait", "0")
    assert pending.exit_code == 0
    assert world.driver.view(keys).state["evict"] == "a"
    gone = cli("evict", "b")
    assert gone.exit_code == 3
    assert "it has ended and left nothing, or is misspelt" in gone.stderr
