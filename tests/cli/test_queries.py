"""What the commands that only look print: tables for people, one stable schema for programs."""

from __future__ import annotations

import pytest

from tests.cli.conftest import NODE, Cli, World, eventually
from timeslice.locks import scripts

LOOKING = [("groups",), ("status",), ("events",), ("nodes",), ("jobs",)]


@pytest.mark.parametrize("command", LOOKING, ids=lambda command: command[0])
def test_nothing_there_is_no_failure(cli: Cli, command: tuple[str, ...]) -> None:
    """On an empty server a list is empty: exit code 0, nothing on stdout, a word on stderr."""
    result = cli(*command)
    assert (result.exit_code, result.stdout) == (0, "")
    assert result.stderr.strip()


@pytest.mark.parametrize("command", LOOKING, ids=lambda command: command[0])
def test_json_is_valid_and_alone_on_stdout_even_when_empty(cli: Cli, command: tuple[str, ...]) -> None:
    """A program that reads --json never meets a message instead."""
    result = cli(*command, "--json")
    assert result.exit_code == 0
    if command[0] == "events":
        assert not result.stdout  # one object a line, and there is none
    else:
        assert cli.json(*command) == {"schema": 1, command[0].replace("status", "groups"): []}


def test_the_queue_shows_the_holder_and_its_phase(cli: Cli, world: World) -> None:
    """`queue --json` names job, token, process and phase of who holds, and since when."""
    granted = world.hold_lock_only("trainers", "a", label="train")
    held = cli.json("queue", "trainers")["holder"]
    assert held["job"] == "a"
    assert held["token"] == granted.token
    assert held["job_phase"] == "train"
    assert held["host"] == NODE
    assert held["confirmed"] is True
    assert 0 <= held["held_s"] < 60
    assert 0 < held["lease_left_s"] <= 30


def test_the_queue_is_in_service_order_and_says_why_each_waits(cli: Cli, world: World) -> None:
    """Higher priority first, then first come; each row tells who is in the way and how many are before it."""
    world.hold_lock_only("trainers", "a", label="train")
    world.acquire("trainers", "b", lock_only=True)
    world.acquire("trainers", "c", lock_only=True, priority=5)
    waiting = cli.json("queue", "trainers")["waiters"]
    assert [(each["position"], each["job"], each["priority"]) for each in waiting] == [(0, "c", 5), (1, "b", 0)]
    assert waiting[0]["why"].startswith("job a holds it for")
    assert "(train)" in waiting[0]["why"]
    assert waiting[1]["why"].endswith("; 1 before it")


def test_a_piped_queue_is_readable_and_cuts_nothing(cli: Cli, world: World) -> None:
    """Without a terminal there are aligned columns, a heading line, one line a waiter, no drawing and no colour."""
    world.hold_lock_only("trainers", "a")
    world.acquire("trainers", "b", lock_only=True, waiter="w" * 60)
    result = cli("queue", "trainers")
    heading, row = result.stdout.splitlines()
    assert heading.split()[:3] == ["NEXT", "JOB", "PRIORITY"]
    assert row.split()[:3] == ["1", "b", "0"]
    assert "w" * 60 in row
    assert row.index("job a holds it") == heading.index("WHY IT WAITS")
    assert "\x1b" not in result.stdout
    assert "job a holds trainers" in result.stderr


def test_a_paused_group_is_given_as_the_reason(cli: Cli, world: World) -> None:
    """Who waits for a paused group is told so, and how to go on."""
    world.acquire("trainers", "x", lock_only=True)
    assert cli("pause", "trainers").exit_code == 0
    world.acquire("trainers", "b", lock_only=True)
    world.driver.run(scripts.yield_(world.keys.group("trainers"), "w-x", None))
    found = cli.json("queue", "trainers")
    assert found["phase"] == "paused"
    assert found["paused"] is True
    assert "timeslice resume trainers" in found["waiters"][0]["why"]


def test_status_of_a_swap_says_what_moves_where(cli: Cli, world: World) -> None:
    """While state moves, status and queue show who goes out, who comes in, and how far each node is."""
    world.serve("trainers")
    swap = world.swap("trainers", out="a", into="b")
    (group,) = cli.json("status", "trainers")["groups"]
    assert group["phase"] == "swapping"
    assert group["coordinator"] == "coordinator-1"
    assert group["residents"] == ["a"]
    moving = group["swap"]
    assert (moving["swap"], moving["job"], moving["step"]) == (swap, "b", "commit")
    assert (moving["out"], moving["into"]) == (["a"], "b")
    assert moving["nodes"] == [{"node": NODE, "step": "begun commit", "kind": "", "error": ""}]
    assert group["waiters"][0]["why"].startswith("its turn; swap for b, commit")
    for command in (("status", "trainers"), ("status",), ("queue", "trainers")):
        shown = cli(*command)
        assert "out: a; in: b; node-1 begun commit" in shown.stdout + shown.stderr


def test_a_group_without_coordinator_and_agents_says_what_is_missing(cli: Cli, world: World) -> None:
    """A blocked group shows its reason in status and at each waiter (times in words, never raw numbers)."""
    world.serve("trainers", ttl_ms=-1)
    world.acquire("trainers", "a")
    world.acquire("samplers", "b")
    groups = {group["group"]: group for group in cli.json("status")["groups"]}
    assert groups["samplers"]["phase"] == "blocked"
    assert groups["samplers"]["mode"] == "undeclared"
    assert groups["samplers"]["reason"] == "no agent serves this group"
    assert groups["samplers"]["waiters"][0]["why"] == "blocked: no agent serves this group"
    table = cli("status").stdout
    assert "no agent serves this group" in table
    assert "0 of 1 alive" in table


def test_a_job_that_uses_the_device_unheld_is_flagged(cli: Cli, world: World) -> None:
    """C20: what an agent saw on the device without a hold is flagged in status, jobs and doctor."""
    world.serve("trainers")
    world.unheld("trainers", "b")
    (job,) = cli.json("jobs")["jobs"]
    assert (job["job"], job["unheld"], job["holds"], job["device_bytes"]) == ("b", True, False, 5 << 20)
    assert "UNHELD" in cli("jobs").stdout
    assert "UNHELD" in cli("status", "trainers").stdout
    assert "without holding trainers" in cli("doctor").stdout


def test_jobs_lists_who_holds_and_who_waits_over_all_groups(cli: Cli, world: World) -> None:
    """One row for each job and group, also for jobs without any device state."""
    world.hold_lock_only("trainers", "a", label="train")
    world.acquire("trainers", "b", lock_only=True)
    world.hold_lock_only("samplers", "b")
    rows = {(each["job"], each["group"]): each for each in cli.json("jobs")["jobs"]}
    assert set(rows) == {("a", "trainers"), ("b", "trainers"), ("b", "samplers")}
    assert rows["a", "trainers"]["holds"]
    assert rows["a", "trainers"]["job_phase"] == "train"
    assert rows["b", "trainers"]["waiting"] == 1
    assert rows["b", "samplers"]["holds"]


def test_the_time_used_counts_the_hold_that_goes_on(cli: Cli, world: World) -> None:
    """While a job holds, its time grows in `jobs` and `status`, and once it has yielded it stays."""
    world.serve("trainers")
    granted = world.acquire("trainers", "a")

    def used() -> float:
        (job,) = cli.json("jobs")["jobs"]
        (same,) = cli.json("status", "trainers")["groups"][0]["jobs"]
        assert same["usage_s"] >= job["usage_s"]
        return float(job["usage_s"])

    first = eventually(used)
    eventually(lambda: used() > first)
    world.driver.run(scripts.yield_(world.keys.group("trainers"), "w-a", granted.token))
    assert used() >= first
    assert used() == used()


def test_a_group_that_was_never_used_has_no_since(cli: Cli) -> None:
    """No time is made up: null for programs, nothing for people."""
    assert cli("group", "create", "licences", "--lock-only").exit_code == 0
    assert cli.json("queue", "licences")["since_s"] is None
    assert "licences is idle\n" in cli("queue", "licences").stderr
    assert " for " not in cli("status", "licences").stdout


def test_nodes_shows_what_an_agent_said_and_whether_it_lives(cli: Cli, world: World) -> None:
    """A node's version, capabilities and memory come from its agent; a silent one is unreachable since then."""
    world.serve("trainers")
    world.serve("trainers", "node-2", ttl_ms=-1)
    for name, value in (("version", "0.1.0"), ("capabilities", '{"arena": ["offload"]}'), ("memory", "no json")):
        world.driver.client.hset(world.keys.node_state(NODE), name, value)
    nodes = {node["node"]: node for node in cli.json("nodes")["nodes"]}
    assert nodes[NODE]["alive"]
    assert nodes[NODE]["capabilities"] == {"arena": ["offload"]}
    assert nodes[NODE]["memory"] == "no json"  # shown, not hidden
    assert not nodes["node-2"]["alive"]
    assert nodes["node-2"]["silent_s"] >= 0
    assert "unreachable for" in cli("nodes").stdout


def test_names_and_labels_from_elsewhere_can_not_steer_the_terminal(cli: Cli, world: World) -> None:
    """Control characters in what other programs wrote are shown as replacement characters."""
    world.hold_lock_only("trainers", "a", label="\x1b[2Jtrain\n")
    result = cli("status")
    assert "\x1b" not in result.stdout
    assert "\ufffd[2Jtrain\ufffd" in result.stdout


def test_a_bad_name_in_the_index_does_not_hide_the_good_ones(cli: Cli, world: World) -> None:
    """What is no group name, put into the index by something else, is warned of and passed over."""
    world.hold_lock_only("trainers", "a")
    world.driver.client.sadd(world.keys.groups, "not a {name}")
    result = cli("groups")
    assert result.exit_code == 0
    assert "trainers" in result.stdout
    assert "not a {name}" in result.stderr


def test_an_emulated_device_is_called_emulated(cli: Cli, world: World) -> None:
    """Status, queue and nodes never let an emulated device pass for a real one."""
    world.serve("trainers")
    world.serve("samplers")
    world.driver.client.hset(world.keys.node_state(NODE), "emulated", '{"trainers": 1048576}')
    assert {group["group"]: group["emulated"] for group in cli.json("status")["groups"]} == {
        "trainers": True,
        "samplers": False,
    }
    assert cli.json("queue", "trainers")["emulated"] is True
    assert "1 alive, emulated" in cli("status").stdout
    assert "emulated" in cli("status", "trainers").stdout
    assert "emulated" in cli("nodes").stdout
    assert "emulated" not in cli("status", "samplers").stdout


def test_an_idle_group_says_what_will_stop_its_next_swap(cli: Cli, world: World) -> None:
    """A node that went away unnoticed: in the list, in full, in the queue and in JSON."""
    world.serve("trainers")
    world.serve("trainers", "node-2", ttl_ms=-100_000)
    (group,) = cli.json("status")["groups"]
    assert (group["phase"], group["reason"].startswith("node node-2 unreachable for 1")) == ("idle", True)
    for command in (("status",), ("status", "trainers"), ("queue", "trainers")):
        assert "s; the next swap waits for it" in cli(*command).output
