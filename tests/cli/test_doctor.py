"""`timeslice doctor` finds what is wrong and says what to do."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import timeslice
from tests.cli.conftest import NODE, Cli, World
from tests.conftest import ServerFactory
from timeslice.addresses import parse_url
from timeslice.cli import checks, checks_groups
from timeslice.cli.facts import Facts
from timeslice.cli.finding import Finding
from timeslice.cli.main import main

HEALTHY = Facts(
    address=parse_url("rediss://redis:6379"),
    infos={"redis": {"redis_version": "7.2.4", "maxmemory_policy": "noeviction", "aof_enabled": 1}},
    skew_s=0.1,
    coordinators={"c1": 5.0},
)


def problems(findings: list[Finding]) -> dict[str, str]:
    return {each.check: each.level for each in findings if each.level != "ok"}


def with_info(**more: Any) -> Facts:
    return dataclasses.replace(HEALTHY, infos={"redis": {**HEALTHY.infos["redis"], **more}})


def test_a_healthy_server_has_no_findings_but_good_ones() -> None:
    """Nothing to complain of, nothing complained of."""
    assert problems(checks.server(HEALTHY) + checks_groups.coordinators(HEALTHY)) == {}


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (with_info(redis_version="6.2.14"), {"version": "error"}),
        (with_info(redis_version="10.0.1"), {}),
        (with_info(valkey_version="9.1.2"), {}),
        (with_info(maxmemory_policy="allkeys-lru"), {"eviction": "error"}),
        (with_info(maxmemory=1000, used_memory=950), {"memory": "error"}),
        (with_info(aof_enabled=0), {"persistence": "warning"}),
        (with_info(aof_last_write_status="err"), {"persistence": "error"}),
        (with_info(aof_last_bgrewrite_status="err"), {"persistence": "error"}),
        (with_info(role="slave", master_host="m"), {"replication": "error"}),
        (with_info(role="master", connected_slaves=2), {"replication": "warning"}),
        (with_info(role="master", connected_slaves=2, min_slaves_good_slaves=2), {}),
        (dataclasses.replace(HEALTHY, skew_s=-30.0), {"clock": "warning"}),
        (dataclasses.replace(HEALTHY, skew_s=None), {}),
        (dataclasses.replace(HEALTHY, infos={}, denied=("INFO",)), {"rights": "info"}),
        (dataclasses.replace(HEALTHY, cluster={"cluster_state": "ok", "cluster_slots_ok": "16384"}), {}),
        (dataclasses.replace(HEALTHY, cluster={"cluster_state": "fail"}), {"cluster": "error"}),
        (dataclasses.replace(HEALTHY, address=parse_url("redis://redis")), {"encryption": "info"}),
        (dataclasses.replace(HEALTHY, address=parse_url("redis://[::1]")), {}),
        (dataclasses.replace(HEALTHY, address=parse_url("/run/redis.sock")), {}),
        (dataclasses.replace(HEALTHY, address=parse_url("redis+cluster://localhost,10.0.0.1")), {"encryption": "info"}),
    ],
    ids=[
        *("old", "new", "valkey", "evicts", "full", "no AOF", "AOF fails", "AOF rewrite fails"),
        *("replica", "replicas", "replicas waited for", "skew", "no clock", "no INFO", "covered", "not covered"),
        *("plain", "loopback", "socket", "plain cluster"),
    ],
)
def test_each_fault_of_a_server_is_found(facts: Facts, expected: dict[str, str]) -> None:
    """One fault, one finding, with what to do."""
    findings = checks.server(facts)
    assert problems(findings) == expected
    assert all(each.do for each in findings if each.level != "ok")


def test_a_server_that_evicts_is_an_error_with_the_remedy(server_factory: ServerFactory) -> None:
    """On a real server with another maxmemory-policy, doctor exits 1 and prints the command that mends it."""
    server = server_factory(args=["--maxmemory-policy", "allkeys-lru"])
    result = Cli(server.url, "ts")("doctor")
    assert result.exit_code == 1
    assert "CONFIG SET maxmemory-policy noeviction" in result.stdout


def test_no_server_is_a_finding_and_exit_code_5() -> None:
    """The finding is on stdout like all others, also as JSON."""
    result = Cli("redis://127.0.0.1:1", "ts")("doctor", "--json")
    assert result.exit_code == 5
    findings = json.loads(result.stdout)["findings"]
    assert findings[-1]["level"] == "error"
    assert "does not answer" in findings[-1]["what"]


def test_no_server_known_is_exit_code_5_too(clean_environment: Path) -> None:
    """As documented: none is known, so none can be reached; a bad prefix stays a usage error."""
    result = CliRunner().invoke(main, ["doctor"])
    assert result.exit_code == 5
    assert "no server is known" in result.stdout
    assert CliRunner().invoke(main, ["--prefix", "{x}", "doctor"]).exit_code == 2


def test_lock_only_groups_need_nothing(cli: Cli, world: World) -> None:
    """Without served groups neither coordinator nor agents are missed; warnings alone are exit code 0."""
    world.hold_lock_only("trainers", "a")
    found = cli.json("doctor")["findings"]
    assert [each for each in found if each["level"] == "error"] == []


def test_a_served_group_without_coordinator_and_with_a_silent_node_is_two_errors(cli: Cli, world: World) -> None:
    """Each is named with the command that helps; exit code 1."""
    world.serve("trainers")
    world.serve("trainers", "node-2", ttl_ms=-1)
    result = cli("doctor")
    assert result.exit_code == 1
    assert "start one: timeslice coordinator" in result.stdout
    assert "timeslice node forget node-2" in result.stdout


def test_a_blocked_group_is_explained(cli: Cli, world: World) -> None:
    """The reason is shown together with what ends it."""
    world.acquire("trainers", "a")
    result = cli("doctor")
    assert result.exit_code == 1
    assert "blocked" in result.stdout
    assert "timeslice agent --group trainers" in result.stdout


def test_a_coordinator_that_lives_is_seen(cli: Cli, world: World) -> None:
    """Its sign of life in the index counts while its deadline is to come."""
    world.serve("trainers")
    seconds, _ = world.driver.client.time()
    world.driver.client.zadd(world.keys.coordinators, {"c1": (seconds + 60) * 1000, "c2": (seconds - 60) * 1000})
    (found,) = [each for each in cli.json("doctor")["findings"] if each["check"] == "coordinator"]
    assert found["level"] == "info"
    assert found["what"].startswith("c1 is alive, and the only one")
    world.driver.client.zadd(world.keys.coordinators, {"c3": (seconds + 60) * 1000})
    (found,) = [each for each in cli.json("doctor")["findings"] if each["check"] == "coordinator"]
    assert (found["level"], found["what"]) == ("ok", "c1, c3 alive")


def record(world: World, node: str, **changes: str) -> None:
    """What an agent of a node writes of itself."""
    now_ms = world.now_ms()
    told: dict[Any, Any] = {
        "heartbeat_at_ms": str(now_ms),
        "instance_until_ms": str(now_ms + 60_000),
        "version": timeslice.__version__,
    }
    world.driver.client.sadd(world.keys.nodes, node)
    world.driver.client.hset(world.keys.node_state(node), mapping=told | changes)


def test_agents_are_looked_at(cli: Cli, world: World) -> None:
    """One that is silent, one that was stopped, one of another version, one that complains, one that hangs, one that
    is well: each is told with what to do."""
    long_ago = str(world.now_ms() - 3_600_000)
    record(world, "silent", heartbeat_at_ms=long_ago, instance_until_ms=str(world.now_ms() - 3_580_000))
    record(world, "stopped", heartbeat_at_ms=long_ago, instance_until_ms="0")
    record(world, "old", version="0.0.1")
    record(world, "complains", complaints=json.dumps({"g": ["no device"], "h": []}))
    record(world, "hangs", overdue=json.dumps({"g": ["suspend of job a"]}))
    record(world, "well")
    world.driver.client.sadd(world.keys.nodes, "forgotten")
    result = cli("doctor", "--json")
    assert result.exit_code == 1
    found = {each["check"][5:]: each for each in json.loads(result.stdout)["findings"] if each["check"][:5] == "node "}
    assert {node: (each["level"], each["what"]) for node, each in found.items()} == {
        "silent": ("warning", "its agent was last heard 1 h 0 min ago"),
        "stopped": ("warning", "its agent was stopped and was last heard 1 h 0 min ago"),
        "forgotten": ("warning", "its agent has not been heard for a day"),
        "old": ("warning", f"its agent has version 0.0.1, this command {timeslice.__version__}"),
        "complains": ("warning", "group g: no device"),
        "hangs": ("error", "group g: overdue: suspend of job a"),
        "well": ("ok", f"agent {timeslice.__version__}"),
    }
    assert all(each["do"] for node, each in found.items() if node != "well")


def test_every_reason_that_a_script_gives_has_advice() -> None:
    """No blocked group is left with a shrug: each reason's beginning is in the table."""
    for reason in (
        "no agent serves this group",
        "no coordinator drives the swap",
        "data was lost; waiting for agents and holders to come back",
        "the device state of job a is unknown",
        "job a could not be moved off the device: no room",
        "eve@host took it from job a, which may not know before 2026-01-01 00:00:00 UTC",
        f"node {NODE} unreachable since 2026-01-01 00:00:00 UTC",
        "deferred: host memory: need 2 GiB, have 1 GiB",
    ):
        assert not checks_groups.remedy(reason, "trainers").startswith("details")


def test_another_distribution_of_the_same_name_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """llm-d's client installs `timeslice` too; the two shadow each other, which doctor says."""
    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.3" if name == "timeslice" else real(name))
    found = checks.installation()
    assert found.level == "error"
    assert "pip uninstall timeslice" in found.do


def test_this_installation_is_well() -> None:
    """Without the other distribution there is nothing to find."""
    assert checks.installation().level == "ok"
