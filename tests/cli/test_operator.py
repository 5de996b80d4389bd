"""An operator's orders, their effects and their exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import time

import pytest

from tests.cli.conftest import NODE, TIMESLICE, Cli, World
from timeslice.locks import scripts
from timeslice.locks.scripts import Ended
from timeslice.models import GroupConfig

NEEDS_GROUP = [
    ("status", "trainer"),
    ("queue", "trainer"),
    ("events", "trainer"),
    ("yield", "trainer", "--job", "a"),
    ("cancel", "trainer", "--job", "a"),
    ("pause", "trainer"),
    ("resume", "trainer"),
    ("group", "show", "trainer"),
    ("group", "set", "trainer", "--order", "1"),
    ("group", "delete", "trainer"),
]


@pytest.mark.parametrize("command", NEEDS_GROUP, ids=" ".join)
def test_an_unknown_group_is_exit_code_3_with_the_nearest_name(
    cli: Cli, world: World, command: tuple[str, ...]
) -> None:
    """A mistyped group is answered with what was probably meant, and nothing is created by asking."""
    world.hold_lock_only("trainers", "a")
    result = cli(*command)
    assert result.exit_code == 3
    assert result.stdout == ""
    assert result.stderr == "error: no group trainer; did you mean trainers? See: timeslice groups\n"
    assert [group["group"] for group in cli.json("groups")["groups"]] == ["trainers"]


def test_a_wrong_name_is_a_usage_error(cli: Cli) -> None:
    """A name that breaks the rule is exit code 2 with the rule, before anything is sent."""
    result = cli("status", "no good")
    assert result.exit_code == 2
    assert "use 1 to 63 of" in result.stderr


def test_nobody_answering_is_exit_code_5_soon(world: World) -> None:
    """An address where nothing listens is told within seconds, without a traceback or the password."""
    started = time.monotonic()
    result = Cli("redis://:geheim@127.0.0.1:1", "ts")("status")
    assert result.exit_code == 5
    assert result.stderr.startswith("error: Redis at redis://:***@127.0.0.1:1 does not answer")
    assert "timeslice up" in result.stderr
    assert "geheim" not in result.output
    assert time.monotonic() - started < 30


def test_without_any_server_named_the_message_says_how_to_get_one(world: World) -> None:
    """No flag, no variable and no `timeslice up`: a usage error that names both ways on."""
    from click.testing import CliRunner

    from timeslice.cli.main import main

    result = CliRunner().invoke(main, ["status"])
    assert result.exit_code == 2
    assert "timeslice up" in result.stderr
    assert "export TIMESLICE_URL=" in result.stderr


def test_yield_frees_the_group_for_the_next_waiter(cli: Cli, world: World) -> None:
    """An operator's yield ends the holder's lease and grants the waiter."""
    world.hold_lock_only("trainers", "a")
    world.acquire("trainers", "b", lock_only=True)
    assert cli.json("yield", "trainers", "--job", "a") == {"schema": 1, "group": "trainers", "job": "a", "waiting": 1}
    assert cli.json("queue", "trainers")["holder"]["job"] == "b"


def test_yield_for_a_job_that_does_not_hold_is_refused(cli: Cli, world: World) -> None:
    """Exit code 6, the holder is named and keeps its lease."""
    granted = world.hold_lock_only("trainers", "a")
    result = cli("yield", "trainers", "--job", "b")
    assert result.exit_code == 6
    assert "job b does not hold trainers; a does" in result.stderr
    renewed = world.driver.run(scripts.renew(world.keys.group("trainers"), world.request("a"), granted.token))
    assert isinstance(renewed, scripts.Renewed)


def test_cancel_by_job_withdraws_all_its_requests_and_tells_them_who_did_it(cli: Cli, world: World) -> None:
    """Each cancelled waiter reads the operator's name on its own stream and can't come back by itself."""
    world.hold_lock_only("trainers", "a")
    for waiter in ("b1", "b2"):
        world.acquire("trainers", "b", waiter=waiter, lock_only=True)
    world.acquire("trainers", "c", lock_only=True)
    done = cli.json("cancel", "trainers", "--job", "b")["cancelled"]
    assert done == [{"waiter": "b1", "was": "queued"}, {"waiter": "b2", "was": "queued"}]
    assert [each["job"] for each in cli.json("queue", "trainers")["waiters"]] == ["c"]
    ((_, told),) = world.entries(world.keys.group("trainers").grant("b1"))
    assert told["kind"] == "cancelled"
    assert "@" in told["by"]
    assert isinstance(world.acquire("trainers", "b", waiter="b1", lock_only=True), Ended)


def test_cancel_by_waiter_leaves_the_jobs_other_requests(cli: Cli, world: World) -> None:
    """--waiter is exact."""
    world.hold_lock_only("trainers", "a")
    for waiter in ("b1", "b2"):
        world.acquire("trainers", "b", waiter=waiter, lock_only=True)
    assert cli("cancel", "trainers", "--waiter", "b2").exit_code == 0
    assert [each["waiter"] for each in cli.json("queue", "trainers")["waiters"]] == ["b1"]


def test_cancel_does_not_touch_who_holds(cli: Cli, world: World) -> None:
    """Cancelling the holder is refused and points at yield; an unknown job or waiter is exit code 3."""
    world.hold_lock_only("trainers", "a")
    for option in (("--job", "a"), ("--waiter", "w-a")):
        result = cli("cancel", "trainers", *option)
        assert result.exit_code == 6
        assert "timeslice yield trainers --job a" in result.stderr
    assert cli("cancel", "trainers", "--job", "z").exit_code == 3
    assert cli("cancel", "trainers", "--waiter", "z").exit_code == 3
    assert cli("cancel", "trainers").exit_code == 2
    assert cli.json("queue", "trainers")["holder"]["job"] == "a"


def test_pause_stops_grants_and_resume_goes_on(cli: Cli, world: World) -> None:
    """While paused the holder keeps and requests queue; resuming grants the first. Both may be repeated."""
    granted = world.hold_lock_only("trainers", "a")
    assert cli.json("pause", "trainers")["changed"] is True
    assert cli.json("pause", "trainers")["changed"] is False
    world.acquire("trainers", "b", lock_only=True)
    world.driver.run(scripts.yield_(world.keys.group("trainers"), "w-a", granted.token))
    assert cli.json("queue", "trainers")["holder"] is None
    assert cli.json("resume", "trainers") == {
        "schema": 1,
        "group": "trainers",
        "paused": False,
        "changed": True,
        "phase": "held",
    }
    assert cli.json("queue", "trainers")["holder"]["job"] == "b"
    assert cli("resume", "trainers").stderr == "trainers was not paused; it is held\n"
    assert cli("pause", "trainers").stderr == "paused trainers; it is held now\n"
    assert cli("pause", "trainers").stderr == "trainers was paused already; it is held\n"
    assert cli("resume", "trainers").stderr == "resumed trainers; it is held now\n"


def test_a_group_is_created_changed_shown_and_deleted(cli: Cli) -> None:
    """The settings given are those shown; a second create is refused; a deleted group is gone from every list."""
    assert cli("group", "create", "licences", "--lock-only", "--order", "3").exit_code == 0
    again = cli("group", "create", "licences")
    assert again.exit_code == 6
    assert "timeslice group set licences" in again.stderr
    assert cli("group", "set", "licences", "--suspend-timeout", "0.5", "--host-reserve", "1G").exit_code == 0
    shown = cli.json("group", "show", "licences")
    assert shown["mode"] == "lock"
    assert shown["config"] == GroupConfig(order=3, suspend_timeout_ms=500, host_reserve_bytes=1 << 30).model_dump(
        mode="json"
    )
    assert cli("group", "set", "licences", "--mode", "discard", "--tag", "kv_cache", "--tag", "lora").exit_code == 0
    config = cli.json("group", "show", "licences")["config"]
    assert (config["mode"], config["tags"], config["order"]) == ("discard", ["kv_cache", "lora"], 3)
    assert cli("group", "set", "licences", "--mode", "", "--tag", "").exit_code == 0
    config = cli.json("group", "show", "licences")["config"]
    assert (config["mode"], config["tags"]) == ("", [])
    assert cli("group", "delete", "licences").exit_code == 0
    assert cli.json("groups")["groups"] == []
    assert cli("group", "show", "licences").exit_code == 3


def test_every_setting_of_a_group_can_be_set_from_the_command_line() -> None:
    """A setting that the model gains also gets its option."""
    from timeslice.cli.groups import set_

    options = {str(each.name) for each in set_.params}
    assert {name.removesuffix("_ms").removesuffix("_bytes") for name in GroupConfig.model_fields} <= options


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--order", "5000"),
        ("--suspend-timeout", "-1"),
        ("--suspend-timeout", "nan"),
        ("--prepare-timeout", "inf"),
        ("--restore-timeout", "1e300"),
        ("--host-reserve", "much"),
        ("--host-reserve", "9" * 400),
        ("--mode", "drop"),
        ("--tag", "kv,cache"),
    ],
)
def test_a_setting_out_of_range_is_refused_before_anything_is_written(cli: Cli, option: str, value: str) -> None:
    """Exit code 2; the group does not exist afterwards."""
    assert cli("group", "create", "licences", option, value).exit_code == 2
    assert cli.json("groups")["groups"] == []


def test_all_and_a_part_can_not_be_asked_for_at_once(cli: Cli) -> None:
    """`--tag ''` beside another tag has no meaning; exit code 2, and nothing is written."""
    result = cli("group", "create", "licences", "--tag", "kv_cache", "--tag", "")
    assert (result.exit_code, cli.json("groups")["groups"]) == (2, [])
    assert "can't go with another --tag" in result.stderr


def test_a_group_in_use_is_not_deleted(cli: Cli, world: World) -> None:
    """Exit code 6 naming who uses it."""
    world.hold_lock_only("trainers", "a")
    result = cli("group", "delete", "trainers")
    assert result.exit_code == 6
    assert "job a holds it" in result.stderr


def test_a_silent_node_can_be_forgotten_and_a_living_one_not(cli: Cli, world: World) -> None:
    """Forgetting takes a node out of its groups, so that they are no longer blocked by it."""
    world.serve("trainers")
    world.serve("trainers", "node-2", ttl_ms=-1)
    alive = cli("node", "forget", NODE)
    assert alive.exit_code == 6
    assert "is alive" in alive.stderr
    assert "repeat this" in alive.stderr  # a stopped agent's node stays
    assert "--leave" in alive.stderr
    assert cli("node", "forget", "node-2").exit_code == 0
    assert [node["node"] for node in cli.json("status", "trainers")["groups"][0]["nodes"]] == [NODE]
    assert cli("node", "forget", "node-2").exit_code == 3


def test_orders_are_in_the_audit_trail_with_who_gave_them(cli: Cli, world: World) -> None:
    """Pausing, resuming, cancelling and yielding leave events that name the operator, and why where that was said; a
    reason is shown as long as the group is paused."""
    world.hold_lock_only("trainers", "a")
    world.acquire("trainers", "b", lock_only=True)
    assert cli("pause", "trainers", "--reason", "new disk").exit_code == 0
    assert cli("yield", "trainers", "--job", "a").exit_code == 0
    assert cli.json("status", "trainers")["groups"][0]["reason"].endswith("(new disk)")
    for order in (("cancel", "trainers", "--job", "b"), ("resume", "trainers", "--reason", "done")):
        assert cli(*order).exit_code == 0
    told = [json.loads(line) for line in cli("events", "trainers", "--json").stdout.splitlines()]
    by = {each["event"]: each.get("by", "") for each in told}
    assert all("@" in by[kind] for kind in ("GroupPaused", "LeaseYielded", "WaiterCancelled", "GroupResumed"))
    assert [each["reason"] for each in told if each["event"] in {"GroupPaused", "GroupResumed"}] == ["new disk", "done"]


def test_a_node_that_serves_no_group_any_more_can_be_struck_off(cli: Cli, world: World) -> None:
    """Its groups were deleted, or forgetting it was cut short. Not while its agent lives."""
    client, record = world.driver.client, world.keys.node_state("node-9")
    client.sadd(world.keys.nodes, "node-9")
    client.hset(record, "instance_until_ms", str(world.now_ms() + 60_000))
    alive = cli("node", "forget", "node-9")
    assert alive.exit_code == 6
    assert "is alive: stop it" in alive.stderr
    client.hset(record, "instance_until_ms", "0")
    assert cli("node", "forget", "node-9").exit_code == 0
    assert cli("node", "forget", "node-9").exit_code == 3
    assert [each["node"] for each in cli.json("nodes")["nodes"]] == []


@pytest.mark.parametrize(
    "command",
    [
        ("revoke", "g", "--wait", "nan"),
        ("evict", "a", "--wait", "nan"),
        ("node", "drain", NODE, "--wait", "inf"),
        ("gateway", "--max-hold", "nan"),
        ("gateway", "--keepalive", "nan"),
    ],
)
def test_a_wait_is_a_number_of_seconds(cli: Cli, command: tuple[str, ...]) -> None:
    """``nan`` would be a wait without a deadline."""
    done = cli(*command)
    assert done.exit_code == 2
    assert command[-2] in done.stderr


@pytest.mark.parametrize("variable", ["TIMESLICE_PASSWORD", "TIMESLICE_USERNAME", "TIMESLICE_URL"])
def test_settings_that_are_no_text_are_told(variable: str) -> None:
    """Bytes of another encoding: exit code 2 with the variable's name, no traceback, and no byte of it is shown."""
    environment = {**os.environ, "TIMESLICE_URL": "redis://127.0.0.1:1", variable: "redis://s\udcffsame"}
    done = subprocess.run([TIMESLICE, "groups"], env=environment, capture_output=True, check=False, timeout=60)
    assert done.returncode == 2
    assert b"no UTF-8" in done.stderr
    assert b"same" not in done.stderr
    assert b"Traceback" not in done.stderr
