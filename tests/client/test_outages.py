from __future__ import annotations

import os
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

import timeslice
from tests.client.faces import Face
from tests.client.world import World
from tests.conftest import ServerFactory
from tests.support.jobs import DEADLINE_S, wait_until
from timeslice.locks.loader import load
from timeslice.torture.proxy import Proxy


def got(future: Future[Any]) -> Any:
    return future.result(DEADLINE_S)


def lose(proxy: Proxy, verb: str) -> None:
    proxy.lose_reply_to(load(verb).sha)


def test_a_yield_into_an_outage_is_retried_until_answered(
    proxy: Proxy, face: Face, world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """L17: the exit waits for the answer as long as the lease stands, and the group is free when it came."""
    client = face.client(url=proxy.url, job="a")
    leases: list[Any] = []

    def body(lease: Any) -> None:
        proxy.cut()
        leases.append(lease)

    holding = face.hold(client, "g", lock_only=True, lease=10, body=body)
    wait_until(lambda: bool(leases) and leases[0].state == "yielding", "the yield is under way")
    assert world.holder() == "a"
    assert not holding.done()
    proxy.heal()
    got(holding)
    assert leases[0].state == "yielded"
    assert not world.holder()
    assert "lost" not in caplog.text


def test_a_yield_that_is_not_answered_in_time_goes_on_behind(
    proxy: Proxy, face: Face, world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """L17: when the lease is over without an answer the exit returns, the log says so, and the next hold succeeds."""
    client = face.client(url=proxy.url, job="a")

    def body(lease: Any) -> Any:
        proxy.cut()
        return lease

    lease = got(face.hold(client, "g", lock_only=True, lease=1, body=body))
    assert lease.state in {"yielding", "lost"}  # unknown or over, never "yielded"
    assert "yield of job a is not answered; it is tried on in the background" in caplog.text or lease.lost.is_set()
    proxy.heal()
    assert got(face.hold(client, "g", lock_only=True, body=lambda _: world.holder())) == "a"
    assert not world.holder()
    wait_until(lambda: lease.state in {"yielded", "lost"}, "what became of it is known")


def test_the_yield_behind_frees_a_lease_that_would_have_lasted(
    proxy: Proxy, face: Face, world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """L17: a yield that arrives late still frees the group, long before the server would have given up the holder."""
    world.serve("g")
    client = face.client(url=proxy.url, job="a")

    def body(_: Any) -> None:
        world.redis.hset(world.group().state, "deadline_ms", 2**52)
        proxy.cut()

    got(face.hold(client, "g", lease=3, body=body))
    assert "tried on in the background" in caplog.text
    assert world.holder() == "a"
    proxy.heal()
    wait_until(lambda: not world.holder(), "the group is free")


@pytest.mark.parametrize("verb", ["acquire", "yield"])
def test_a_lost_reply_grants_once(proxy: Proxy, face: Face, world: World, verb: str) -> None:
    """When the server acted and its reply is lost, the repeated call gets the same answer: one grant, one yield."""
    client = face.client(url=proxy.url, job="a")
    lose(proxy, verb)
    lease = got(face.acquire(client, "g", lock_only=True))
    assert lease.fencing_token == world.view().number("token")
    assert face.give_up(lease) is not None
    assert proxy.lost_replies == 1
    assert world.event_types() == ["LeaseGranted", "LeaseYielded"]


def test_a_lost_confirmation_grants_once(proxy: Proxy, face: Face, world: World) -> None:
    """When the reply to the confirmation is lost, the waiter still enters, with the token it was granted."""
    holder = got(face.acquire(face.client(job="b"), "g", lock_only=True))
    waiting = face.acquire(face.client(url=proxy.url, job="a"), "g", lock_only=True)
    world.until_queued("a")
    lose(proxy, "renew")
    face.give_up(holder)
    lease = got(waiting)
    assert proxy.lost_replies == 1
    assert lease.fencing_token == world.view().number("token")
    assert world.event_types().count("LeaseGranted") == 2


def test_a_waiter_rides_out_an_outage(proxy: Proxy, face: Face, world: World) -> None:
    """A wait that began goes on when the server comes back."""
    holder = got(face.acquire(face.client(job="b"), "g", lock_only=True))
    waiting = face.acquire(face.client(url=proxy.url, job="a"), "g", lock_only=True)
    world.until_queued("a")
    proxy.cut()
    face.give_up(holder)
    assert not waiting.done()
    proxy.heal()
    got(waiting).ensure_held()


def test_scripts_that_the_server_forgot_are_sent_again(face: Face, world: World) -> None:
    """SCRIPT FLUSH in the middle of a hold goes unnoticed."""
    client = face.client(job="a")
    lease = got(face.acquire(client, "g", lock_only=True))
    world.redis.script_flush()
    assert face.give_up(lease) is not None
    world.redis.script_flush()
    got(face.acquire(client, "g", lock_only=True)).ensure_held()


def test_a_server_restart_is_survived(server_factory: ServerFactory, face: Face, tmp_path: Path) -> None:
    """A holder holds on and a waiter waits on over a restart of a server that keeps its data."""
    server = server_factory(data=tmp_path)
    client = face.client(url=server.url, job="a")
    lease = got(face.acquire(client, "g", lock_only=True))
    waiting = face.acquire(face.client(url=server.url, job="b"), "g", lock_only=True)
    watcher = World(server.url, client.keys.prefix)
    watcher.until_queued("b")
    server.restart()
    wait_until(lambda: watcher.queue() == ["b"], "b waits on")
    lease.ensure_held()
    assert watcher.holder() == "a"
    face.give_up(lease)
    assert got(waiting).job == "b"
    watcher.close()


def test_a_server_that_forgot_everything_is_survived(server_factory: ServerFactory, face: Face) -> None:
    """A holder's renewal re-installs its lease on a server that came back empty; no second job is inside meanwhile."""
    server = server_factory()
    client = face.client(url=server.url, job="a")
    lease = got(face.acquire(client, "g", lock_only=True, lease=6))  # the restart may take a while
    watcher = World(server.url, client.keys.prefix)
    server.restart()
    wait_until(lambda: watcher.holder() == "a", "the lease is back")
    lease.ensure_held()
    with timeslice.Client(url=server.url, job="b") as other, pytest.raises(timeslice.AcquireTimeoutError):
        other.acquire("g", lock_only=True, timeout=0)
    watcher.close()


@pytest.mark.parametrize("holds", [True, False])
def test_a_process_is_known_again_after_data_loss(
    server_factory: ServerFactory, face: Face, monkeypatch: pytest.MonkeyPatch, holds: bool
) -> None:
    """A process may have state on the device, whether it holds or not: it registers again by itself."""
    monkeypatch.setattr("timeslice.client.renewal.REGISTER_S", 0.2)
    monkeypatch.setenv("TIMESLICE_NODE", "n1")
    server = server_factory()
    client = face.client(url=server.url, job="a")
    watcher = World(server.url, client.keys.prefix)
    watcher.serve("g")
    lease = got(face.acquire(client, "g"))
    if not holds:
        face.give_up(lease)
    watcher.redis.flushall()
    watcher.serve("g")
    wait_until(lambda: f"a/n1/{os.getpid()}" in watcher.view().targets, "the process is known again")
    watcher.close()


def test_a_cancel_into_an_outage_is_sent_later(proxy: Proxy, face: Face, world: World) -> None:
    """A request whose withdrawal was not answered leaves the queue when the server is back."""
    got(face.acquire(face.client(job="b"), "g", lock_only=True))
    waiting = face.acquire(face.client(url=proxy.url, job="a"), "g", lock_only=True, timeout=3.0)
    world.until_queued("a")
    proxy.cut()
    with pytest.raises((timeslice.RedisUnreachableError, timeslice.AcquireTimeoutError)) as caught:
        got(waiting)
    assert "withdrawal of job a is not confirmed" in "".join(caught.value.__notes__)
    assert world.queue() == ["a"]
    proxy.heal()
    wait_until(lambda: world.queue() == [], "the request is withdrawn")


def test_what_answers_no_redis_is_said(face: Face, world: World) -> None:
    """An address where something else listens gives an error that says so."""
    import socket
    import threading

    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            try:
                while True:
                    connection, _ = listener.accept()
                    connection.recv(4096)
                    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                    connection.close()
            except OSError:
                return

        threading.Thread(target=answer, daemon=True).start()
        client = face.client(url=f"127.0.0.1:{listener.getsockname()[1]}", job="a")
        with pytest.raises(timeslice.TimeSliceError, match="speaks no Redis"):
            got(face.acquire(client, "g", timeout=1))
        listener.shutdown(socket.SHUT_RDWR)
