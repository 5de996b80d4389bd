"""`timeslice doctor` on servers that are really misconfigured."""

from __future__ import annotations

import http.server
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import redis

from tests.cli.conftest import Cli, eventually
from tests.conftest import ServerFactory
from tests.support.clock import fake_clock
from tests.support.disk import fill, small_disk
from tests.support.ports import cluster_port, free_port
from timeslice.embedded import EmbeddedServer
from timeslice.torture.proxy import Link, Proxy


def doctor(url: str, *options: str) -> tuple[int, dict[str, dict[str, str]]]:
    """Exit code and what doctor finds, by what it looked at."""
    result = Cli(url, "ts")("doctor", "--json", *options)
    return result.exit_code, {each["check"]: each for each in json.loads(result.stdout)["findings"]}


def dial(server: EmbeddedServer) -> Any:
    return redis.Redis.from_url(server.url)


def test_without_an_append_only_file_is_a_warning(server_factory: ServerFactory, tmp_path: Path) -> None:
    """What a restart forgets is said; with a file all is well."""
    code, found = doctor(server_factory().url)
    assert (code, found["persistence"]["level"]) == (0, "warning")
    assert "forgets pauses, settings, and holders of lock-only groups" in found["persistence"]["what"]
    code, found = doctor(server_factory(data=tmp_path / "data").url)
    assert (code, found["persistence"]["level"]) == (0, "ok")


def test_an_append_only_file_that_fails_is_an_error(server_factory: ServerFactory, tmp_path: Path) -> None:
    """The server's disk is full: it still answers, and doctor says why nothing can be written."""
    with small_disk(tmp_path / "disk", "256k") as disk:
        server = server_factory(data=disk / "data")
        fill(disk)
        with dial(server) as client:

            def fails() -> bool:
                try:
                    client.set("x", "y" * 8192)
                except redis.exceptions.ResponseError:
                    pass  # MISCONF: it has noticed
                return str(client.info("persistence")["aof_last_write_status"]) == "err"

            eventually(fails)
        code, found = doctor(server.url)
        server.kill()
    assert (code, found["persistence"]["level"]) == (1, "error")
    assert "full or failing disk" in found["persistence"]["do"]


def test_memory_that_is_nearly_used_up_is_an_error(server_factory: ServerFactory) -> None:
    """Also when nothing fits any more, and doctor itself still runs."""
    server = server_factory()
    with dial(server) as client:
        client.config_set("maxmemory", int(client.info("memory")["used_memory"] * 1.05))
        code, found = doctor(server.url)
        assert (code, found["memory"]["level"]) == (1, "error")
        client.config_set("maxmemory", "1000")
        code, found = doctor(server.url)
    assert "no job can queue" in found["memory"]["what"]


@pytest.mark.slow
def test_a_clock_that_is_off_is_a_warning(server_factory: ServerFactory, tmp_path: Path) -> None:
    """Ahead and behind are told apart."""
    clock = fake_clock(tmp_path / "clock")
    server = server_factory(binary=clock.binary)
    assert doctor(server.url)[1]["clock"]["level"] == "ok"
    for shift, words in ((3600, "behind the server"), (-3600, "ahead of the server")):
        clock.set(shift)
        eventually(lambda w=words: w in doctor(server.url)[1]["clock"]["what"])  # type: ignore[misc]


class Older(Proxy):
    """A server that says it is version 6."""

    def _replies(self, link: Link) -> bool:
        data = link.far.recv(1 << 16)
        at = data.find(b"\nredis_version:")
        if at >= 0:
            data = data[: at + 15] + b"6" + data[at + 16 :]
        link.near.sendall(data)
        return bool(data)


def test_a_server_that_is_too_old_is_an_error(server: EmbeddedServer) -> None:
    """The version is shown with what to do."""
    proxy = Older(server.socket)
    code, found = doctor(proxy.url)
    proxy.close()
    assert (code, found["version"]["level"]) == (1, "error")
    assert found["version"]["do"].startswith("upgrade to Redis 7.0")


@pytest.fixture
def web_server() -> Iterator[str]:
    """Something that is no Redis."""
    serving = http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)
    serving.RequestHandlerClass.log_message = lambda *_: None  # type: ignore[attr-defined]
    threading.Thread(target=serving.serve_forever, daemon=True).start()
    yield f"127.0.0.1:{serving.server_address[1]}"
    serving.shutdown()
    serving.server_close()


def test_what_is_no_redis_is_named_as_such(web_server: str) -> None:
    """The finding says that the address is wrong, exit code 1."""
    code, found = doctor(web_server)
    assert (code, found["server"]["level"]) == (1, "error")
    assert "speaks no Redis" in found["server"]["what"]


def test_replication_that_may_lose_is_a_warning(server_factory: ServerFactory) -> None:
    """A master with replicas that nobody waits for: what can be lost is named. On the replica it is an error."""
    master, replica = server_factory(port=free_port()), server_factory()
    with dial(master) as client, dial(replica) as follower:
        follower.replicaof("127.0.0.1", str(master.port))
        eventually(lambda: client.info("replication")["connected_slaves"] == 1)
        code, found = doctor(master.url)
        assert (code, found["replication"]["level"]) == (0, "warning")
        assert "a lock-only group may have two holders" in found["replication"]["what"]
        assert "min-replicas-to-write 1" in found["replication"]["do"]
        client.config_set("min-replicas-to-write", "1")
        assert "replication" not in doctor(master.url)[1]
        code, found = doctor(replica.url)
        assert (code, found["replication"]["level"]) == (1, "error")


def test_a_cluster_that_does_not_cover_all_slots_is_an_error(server_factory: ServerFactory) -> None:
    """Half of the slots are nobody's: doctor says so, though the server refuses half of its questions."""
    server = server_factory(port=cluster_port(), args=["--cluster-enabled", "yes"])
    url = f"redis+cluster://127.0.0.1:{server.port}"
    with dial(server) as client:
        for first, last in ((0, 8000), (8001, 16_383)):
            client.execute_command("CLUSTER", "ADDSLOTSRANGE", first, last)
            if last == 8000:
                code, found = doctor(url)
                assert (code, found["cluster"]["level"]) == (1, "error")
                assert "8001 of 16384 slots" in found["cluster"]["what"]
        eventually(lambda: b"cluster_state:ok" in client.execute_command("CLUSTER", "INFO"))
        code, found = doctor(url)
        assert code == 0, found["server"]


def test_a_node_of_a_cluster_is_named_as_such(server_factory: ServerFactory) -> None:
    """With the URL of a single server: the right form is told."""
    server = server_factory(port=cluster_port(), args=["--cluster-enabled", "yes"])
    with dial(server) as client:
        client.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16_383)
        eventually(lambda: b"cluster_state:ok" in client.execute_command("CLUSTER", "INFO"))
    code, found = doctor(f"redis://127.0.0.1:{server.port}")
    assert (code, found["cluster"]["level"]) == (1, "error")
    assert "redis+cluster://" in found["cluster"]["do"]


def test_plain_traffic_over_a_network_is_told(server_factory: ServerFactory) -> None:
    """By the address that others see; on the loopback nothing is said."""
    own = [
        address.address
        for addresses in psutil.net_if_addrs().values()
        for address in addresses
        if address.family == socket.AF_INET and not address.address.startswith("127.")
    ]
    if not own:
        pytest.skip("this machine has no address but the loopback's")
    server = server_factory(port=free_port(), args=["--bind", "127.0.0.1", own[0], "--protected-mode", "no"])
    assert "encryption" not in doctor(f"127.0.0.1:{server.port}")[1]
    code, found = doctor(f"{own[0]}:{server.port}")
    assert (code, found["encryption"]["level"]) == (0, "info")
    assert "rediss://" in found["encryption"]["do"]


def test_a_password_on_the_command_line_is_a_warning(
    server_factory: ServerFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everybody on the machine can read it; in the environment it is not one, and it is never printed."""
    server = server_factory(port=free_port(), args=["--requirepass", "hunter2two"])
    plain = f"127.0.0.1:{server.port}"
    code, found = doctor(f"redis://:hunter2two@{plain}")
    assert (code, found["password"]["level"]) == (0, "warning")
    assert "hunter2two" not in json.dumps(found)
    monkeypatch.setenv("TIMESLICE_PASSWORD", "hunter2two")
    assert "password" not in doctor(plain)[1]
    monkeypatch.setenv("TIMESLICE_PASSWORD", "wrong4wrong")
    code, found = doctor(plain)
    assert code == 1
    assert "refuses these credentials" in found["server"]["what"]
