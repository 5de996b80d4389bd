"""The HTTP port by itself, over groups that are driven by hand."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
import socket
import threading
from contextlib import ExitStack

import pytest

from tests.cli.conftest import Cli, World, eventually
from tests.conftest import ServerFactory
from tests.readiness.conftest import DEADLINE_S, Port, ask, readiness, state
from tests.security.conftest import GROUP, OTHER, Users, guarded, users
from tests.support.ports import free_port
from timeslice import web
from timeslice.errors import RefusedError
from timeslice.locks import scripts
from timeslice.locks.drivers import AsyncDriver
from timeslice.locks.keys import Keys

__all__ = ["guarded", "users"]

RAW_S = 20.0


def raw(port: int, sent: bytes) -> bytes:
    """All that comes back for these bytes."""
    with socket.create_connection(("127.0.0.1", port), timeout=RAW_S) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16 << 10)  # what nobody reads is not sent
        connection.sendall(sent)
        found = b""
        while part := connection.recv(65536):
            found += part
        return found


def is_closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True


def test_the_holder_is_ready_and_others_are_told_what_they_are(port: int, world: World, cli: Cli) -> None:
    """200 for who holds with its state in; 503 with the state for who waits, and for who is swapped in and out."""
    world.serve("trainers")
    granted = world.acquire("trainers", "a", label="train")
    world.acquire("trainers", "b")
    assert (state(port, "a"), state(port, "b"), state(port, "c")) == ("ready", "waiting", "absent")
    (group,) = readiness(port, "a", "trainers")["groups"]
    assert (group["group"], group["phase"], group["residency"]) == ("trainers", "train", "resident")
    assert cli.json("ready", "a", "--group", "trainers") == readiness(port, "a", "trainers")
    world.driver.run(scripts.yield_(world.keys.group("trainers"), "w-a", granted.token))
    assert (state(port, "a"), state(port, "b")) == ("idle", "restoring")


def test_a_job_is_ready_in_all_groups_that_know_it_or_in_the_one_asked_about(port: int, world: World) -> None:
    """Who holds one group and waits for another is ready in one only."""
    world.hold_lock_only("samplers", "a")
    world.hold_lock_only("trainers", "b")
    assert state(port, "a") == "ready"
    world.acquire("trainers", "a", waiter="w2", lock_only=True)
    world.driver.client.sadd(world.keys.groups, "no name")  # somebody else's; it is no group that may know a job
    assert state(port, "c") == "absent"
    found = readiness(port, "a")
    assert (found["state"], found["reason"]) == ("waiting", "trainers: job b holds it")
    assert [(each["group"], each["ready"]) for each in found["groups"]] == [("samplers", True), ("trainers", False)]
    assert state(port, "a", "samplers") == "ready"
    unknown = readiness(port, "a", "sampler")
    assert (unknown["state"], [each["group"] for each in unknown["groups"]]) == ("unknown", ["sampler"])
    assert "no such group" in unknown["reason"]


@pytest.mark.parametrize(
    ("path", "status", "hint"),
    [
        ("/jobs/-a/ready", 400, "can't name a job"),
        ("/jobs/a%2Fb/ready", 400, "can't name a job"),
        ("/jobs//ready", 400, "can't name a job"),
        (f"/jobs/{'a' * 64}/ready", 400, "can't name a job"),
        ("/jobs/a/ready?group=-", 400, "can't name a group"),
        ("/jobs/a/ready?group=", 400, "can't name a group"),
        ("/jobs/a/ready?grop=g", 400, "group=GROUP"),
        ("/jobs/a/ready?group=g&group=h", 400, "group=GROUP"),
        ("/jobs/a/ready?group", 400, "group=GROUP"),
        ("/", 404, "no such path"),
        ("/jobs/a", 404, "no such path"),
        ("/jobs/a/ready/", 404, "no such path"),
        ("/healthz/..", 404, "no such path"),
    ],
)
def test_what_makes_no_sense_is_refused_with_a_hint(port: int, path: str, status: int, hint: str) -> None:
    """A misspelt probe must not look like a job that is not ready."""
    found, _, body = ask(port, path)
    document = json.loads(body)
    assert (found, document["schema"]) == (status, 1)
    assert hint in document["error"]
    assert "/jobs/JOB/ready" in document["paths"]


def test_head_is_answered_and_nothing_can_be_changed(port: int, world: World) -> None:
    """HEAD has the headers of GET and no body; every other method is refused."""
    world.hold_lock_only("samplers", "a")
    for path in ("/healthz", "/jobs/a/ready", "/jobs/b/ready", "/nothing"):
        status, headers, body = ask(port, path)
        assert (status, headers["Content-Length"]) == (status, str(len(body)))
        head = ask(port, path, "HEAD")
        assert (head[0], head[1]["Content-Length"], head[2]) == (status, headers["Content-Length"], b"")
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "TRACE"):
        status, headers, _ = ask(port, "/jobs/a/ready", method)
        assert (status, headers["Allow"]) == (405, "GET, HEAD")


def test_metrics_are_on_the_same_port(port: int) -> None:
    """As Prometheus reads them."""
    status, headers, body = ask(port, "/metrics")
    assert (status, headers["Content-Type"].split(";")[0]) == (200, "text/plain")
    assert b"# TYPE timeslice_swaps_total counter" in body


def test_a_server_that_hangs_or_is_gone_is_told_and_health_does_not_depend_on_it(server_factory: ServerFactory) -> None:
    """503 with the reason for both, while the daemon itself is well; and it goes on when the server does."""
    server = server_factory()
    port = Port(server.url, "ts")
    try:
        assert state(port.number, "a") == "absent"
        os.kill(server.pid, signal.SIGSTOP)
        hung = readiness(port.number, "a", "samplers")
        assert (hung["state"], hung["reason"]) == ("unknown", "server unreachable")
        os.kill(server.pid, signal.SIGCONT)
        eventually(lambda: state(port.number, "a") == "absent")
        server.kill()
        gone = readiness(port.number, "a")
        assert (gone["state"], gone["reason"]) == ("unknown", "server unreachable")
        assert ask(port.number, "/healthz")[0] == 200
    finally:
        port.close()


def test_slow_clients_keep_nobody_out(port: int) -> None:
    """More of them than there are places, each with half a request: a probe is answered all the same, and the oldest
    of them is gone."""
    with ExitStack() as stack:
        slow = []
        for _ in range(web.CONNECTIONS + 20):
            slow.append(stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=RAW_S)))
            slow[-1].sendall(b"GET /jobs/a")
        assert state(port, "a") == "absent"
        assert is_closed(slow[0])


def test_a_client_that_says_nothing_is_cut_off(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its place is free again after the time that a request may take."""
    monkeypatch.setattr(web, "CONNECTION_S", 0.2)
    with socket.create_connection(("127.0.0.1", port), timeout=RAW_S) as connection:
        connection.sendall(b"GET /jobs/a")
        assert is_closed(connection)


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GET /healthz HTTP/1.0\r\n\r\n", 200),
        (b"GET http://host/healthz HTTP/1.1\r\nHost: host\r\n\r\n", 200),
        (b"GET /healthz\r\n\r\n", 400),
        (b"GET http://[/healthz HTTP/1.1\r\n\r\n", 400),
        (b"\x16\x03\x01\x00\xff\r\n\r\n", 400),
        (b"GET /healthz HTTP/2.0\r\n\r\n", 400),
        (b"GET /healthz HTTP/1.1\r\nX: " + b"x" * 9000 + b"\r\n\r\n", 431),
        (b"GET /healthz HTTP/1.1\r\nX: " + b"x" * 900_000, 431),
        (b"POST /healthz HTTP/1.1\r\n\r\n" + b"x" * 900_000, 405),
    ],
)
def test_whatever_comes_is_answered_once_and_the_connection_closed(
    port: int, sent: bytes, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Old clients, proxies, garbage, giant headers and bodies: the answer is read to its end, and no reset."""
    monkeypatch.setattr(web, "CONNECTION_S", 2 * RAW_S)  # who waits for the end gets it before that
    answer = raw(port, sent)
    assert answer.startswith(f"HTTP/1.1 {status} ".encode())
    assert answer.count(b"HTTP/1.1 ") == 1


def test_who_sends_without_end_is_cut_off(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long before his time is over."""
    monkeypatch.setattr(web, "CONNECTION_S", 2 * RAW_S)
    with pytest.raises(ConnectionError):
        raw(port, b"POST /healthz HTTP/1.1\r\n\r\n" + bytes(8 << 20))


def test_many_probes_share_what_was_read_after_they_came(redis_url: str, prefix: str, world: World) -> None:
    """A hundred at once cost the server few questions, and a later one sees what happened since."""
    world.hold_lock_only("samplers", "a")
    made = Port(redis_url, prefix)
    reads: list[object] = []
    all_came = threading.Event()
    ask_server = made.driver.run

    async def counted(*args: object, **more: object) -> object:
        reads.append(args)
        await asyncio.to_thread(all_came.wait, DEADLINE_S)
        await asyncio.sleep(0.1)  # a slow server
        return await ask_server(*args, **more)  # type: ignore[arg-type]

    made.driver.run = counted  # type: ignore[method-assign,assignment]
    try:
        with ExitStack() as asked:
            probes = []
            for _ in range(100):
                probe = http.client.HTTPConnection("127.0.0.1", made.number, timeout=DEADLINE_S)
                asked.callback(probe.close)
                probe.request("GET", "/jobs/a/ready?group=samplers")
                probes.append(probe)
            all_came.set()
            assert {json.load(probe.getresponse())["state"] for probe in probes} == {"ready"}
        assert 1 <= len(reads) < 50
        world.driver.run(
            scripts.yield_(
                world.keys.group("samplers"), "w-a", world.driver.view(world.keys.group("samplers")).number("token")
            )
        )
        assert state(made.number, "a", "samplers") == "absent"
    finally:
        all_came.set()
        made.close()


def test_a_daemon_answers_for_the_groups_that_its_user_may_read(users: Users) -> None:
    """An agent's own user, as `timeslice acl` makes it: its group is told; another tenant's is named, not guessed."""
    admin = World(users.server.url, users.prefix)
    admin.hold_lock_only(GROUP, "a")
    admin.hold_lock_only(OTHER, "b")
    port = Port(users.url("agent"), users.prefix)
    try:
        assert readiness(port.number, "a")["state"] == "ready"
        assert readiness(port.number, "b")["unread"] == [OTHER]
        assert state(port.number, "b") == state(port.number, "b", OTHER) == "unknown"
    finally:
        port.close()
        admin.driver.close()


async def test_a_port_that_is_taken_is_refused(redis_url: str, prefix: str) -> None:
    """The error names it, and what to do."""
    driver, number = AsyncDriver(redis_url), free_port()
    first = await web.Web(driver, Keys(prefix)).start("127.0.0.1", number)
    with pytest.raises(RefusedError, match=rf"127\.0\.0\.1 port {number} .*--http-port"):
        await web.Web(driver, Keys(prefix)).start("127.0.0.1", number)
    await first.close()
    await driver.close()
