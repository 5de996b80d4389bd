"""`timeslice doctor` on servers that refuse writes, and on replicas, sentinels and clusters that are set up badly."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Cli, World, eventually
from tests.cli.test_doctor_server import dial, doctor
from tests.conftest import NeedsTool, ServerFactory
from tests.support.ports import cluster_port, free_port
from timeslice.locks.permissions import user_rules
from timeslice.torture.fleet import Fleet, make_fleet

MakeFleet = Callable[[str], Fleet]


@pytest.fixture
def fleet(needs_tool: NeedsTool, tmp_path: Path) -> Iterator[MakeFleet]:
    """Start a fleet of a kind."""
    started: list[Fleet] = []

    def start(kind: str) -> Fleet:
        started.append(make_fleet(kind, tmp_path / kind, aof=False, binary=needs_tool("redis-server")))
        return started[-1].start()

    yield start
    for each in started:
        each.stop()


def findings(url: str, check: str) -> list[dict[str, str]]:
    result = Cli(url, "ts")("doctor", "--json")
    found: list[dict[str, str]] = json.loads(result.stdout)["findings"]
    return [each for each in found if each["check"] == check]


def two(found: list[dict[str, str]]) -> list[str]:
    """What two findings say; empty while they are not two: who is too busy to answer within a second is none."""
    return [each["what"] for each in found] if len(found) == 2 else []


@pytest.mark.parametrize("role", ["", "viewer", "client"])
def test_refused_writes_are_an_error(server_factory: ServerFactory, role: str) -> None:
    """Whoever asks: who may write tries a write that changes nothing, others see what INFO tells."""
    server = server_factory()
    world, url = World(server.url, "ts"), server.url
    admin: Any = world.driver.client
    world.hold_lock_only("trainers", "a")
    if role:
        admin.execute_command("ACL", "SETUSER", "ann", "on", ">hunter2two", *user_rules(role, world.keys))
        url = url.replace("unix://", "unix://ann:hunter2two@")
    before = {key: admin.dump(key) for key in admin.keys("*")}
    assert doctor(url)[1].get("writes", {}).get("level") == (None if role == "viewer" else "ok")
    assert {key: admin.dump(key) for key in admin.keys("*")} == before
    admin.config_set("min-replicas-to-write", 1)
    code, found = doctor(url)
    assert (code, found["writes"]["level"]) == (1, "error")
    assert "NOREPLICAS" in found["writes"]["what"]
    assert "lower that setting" in found["writes"]["do"]
    world.driver.close()


def test_a_monitor_leaves_no_line_in_the_log_of_refusals(server_factory: ServerFactory) -> None:
    """What a viewer may not do is not tried."""
    server = server_factory()
    world = World(server.url, "ts")
    admin: Any = world.driver.client
    admin.execute_command("ACL", "SETUSER", "ann", "on", ">hunter2two", *user_rules("viewer", world.keys))
    assert doctor(server.url.replace("unix://", "unix://ann:hunter2two@"))[1]["access"]["level"] == "ok"
    refused = str(admin.execute_command("ACL", "LOG")).lower()
    assert "persist" not in refused
    assert "config" not in refused
    world.driver.close()


@pytest.mark.parametrize("role", ["client", "agent"])
def test_what_a_user_may_not_read_is_not_looked_at(server_factory: ServerFactory, role: str) -> None:
    """No coordinator is said to be missing, or to be needless, by who can't see them."""
    server = server_factory()
    world = World(server.url, "ts")
    admin: Any = world.driver.client
    world.serve("trainers")
    admin.zadd(world.keys.coordinators, {"c1": world.now_ms() + 60_000})
    admin.execute_command("ACL", "SETUSER", "ann", "on", ">hunter2two", *user_rules(role, world.keys))
    code, found = doctor(server.url.replace("unix://", "unix://ann:hunter2two@"))
    assert (code, found["coordinator"]["level"]) == (0, "info")
    assert found["coordinator"]["what"].startswith("not looked at")
    assert "node node-1" not in found
    world.driver.close()


def test_replicas_are_looked_at_too(server_factory: ServerFactory, tmp_path: Path) -> None:
    """One that could evict, and has no file, would be as bad a master; one replica is told in the singular."""
    master = server_factory(port=free_port(), data=tmp_path / "data")
    replica = server_factory(port=free_port(), args=["--maxmemory-policy", "allkeys-lru"])
    with dial(master) as client, dial(replica) as follower:
        follower.replicaof("127.0.0.1", str(master.port))
        eventually(lambda: client.info("replication").get("slave0", {}).get("state") == "online")
        told = eventually(lambda: two(findings(master.url, "replica")))
        assert f"127.0.0.1:{replica.port} has maxmemory-policy allkeys-lru" in told[0]
        assert "no append-only file" in told[1]
        (found,) = findings(master.url, "replication")
        assert found["what"].startswith("1 replica follows asynchronously and is not waited for")
        assert "min-replicas-max-lag 2," in found["do"]
        client.config_set("appendfsync", "no")
        assert findings(master.url, "appendfsync")[0]["level"] == "warning"


@pytest.mark.slow
def test_sentinels_are_looked_at(fleet: MakeFleet) -> None:
    """One that is away, and ones that notice a dead master too late."""
    servers = fleet("sentinel")
    eventually(lambda: not findings(servers.url, "sentinel"))
    servers.kill("sentinel3")
    with servers.client("sentinel2") as sentinel:
        sentinel.execute_command("SENTINEL", "SET", "timeslice", "down-after-milliseconds", 30_000)
    late, away = (f"127.0.0.1:{servers.ports[name]}" for name in ("sentinel2", "sentinel3"))

    def told() -> bool:
        found = findings(servers.url, "sentinel")
        words = sorted(each["what"].partition(" (")[0] for each in found)
        return {each["level"] for each in found} == {"warning"} and words == sorted(
            [
                f"{late} notices a dead master only after 30000 ms: holders may lose their leases meanwhile",
                f"{away} does not answer",
            ]
        )

    eventually(told)


@pytest.mark.slow
def test_every_shard_is_looked_at(fleet: MakeFleet) -> None:
    """A master without a replica, one that refuses writes, one that notices too late."""
    servers = fleet("cluster")
    assert findings(servers.url, "writes")[0]["level"] == "ok"
    with servers.client("master2") as client:
        client.config_set("min-replicas-to-write", 5)
        client.config_set("cluster-node-timeout", 15_000)
    where = f"127.0.0.1:{servers.ports['master2']}"
    (refused,) = findings(servers.url, "writes")
    assert refused["level"] == "error"
    assert where in refused["what"]
    (late,) = findings(servers.url, "shards")
    assert f"{where} notices a dead master only after 15000 ms" in late["what"]


def test_a_cluster_without_replicas_is_told(server_factory: ServerFactory) -> None:
    """Its groups stand still when that server dies."""
    server = server_factory(port=cluster_port(), args=["--cluster-enabled", "yes"])
    with dial(server) as client:
        client.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16_383)
        eventually(lambda: b"cluster_state:ok" in client.execute_command("CLUSTER", "INFO"))
    told = findings(f"redis+cluster://127.0.0.1:{server.port}", "shards")
    assert any(f"no replica follows 127.0.0.1:{server.port}" in each["what"] for each in told)
