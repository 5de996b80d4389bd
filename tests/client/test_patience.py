"""How long a client waits for a server that does not answer, and what it says meanwhile."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import redis

import timeslice
from tests.client.faces import Face
from tests.client.world import World
from tests.conftest import ServerFactory
from tests.support.jobs import DEADLINE_S, wait_until
from tests.support.ports import free_port
from timeslice.errors import RedisUnreachableError, ServerUnsuitableError, UsageError
from timeslice.locks import outages
from timeslice.settings import publish_url, withdraw_url
from timeslice.torture.proxy import Proxy

PATIENCE_S = 0.3


def told(caplog: pytest.LogCaptureFixture, what: str, url: str = "") -> int:
    """``url``: of that server; the renewal threads of tests before may still miss theirs."""
    return sum(what in line and url in line for line in map(logging.LogRecord.getMessage, caplog.records))


def impatient(face: Face, url: str, **options: Any) -> Any:
    return face.client(url=url, job="a", patience=PATIENCE_S, **options)


def has_no_patience(client: Any) -> None:
    """Ask something that is no wait, which ends after the client's patience."""
    with timeslice.Client(client.url, "a", patience=PATIENCE_S) as other, pytest.raises(RedisUnreachableError):
        other.status("g")


@pytest.mark.parametrize("groups", [("g",), ("samplers", "trainers")], ids=["one", "two"])
def test_who_enters_in_an_outage_waits_for_its_end(
    proxy: Proxy, face: Face, world: World, groups: tuple[str, ...]
) -> None:
    """The first call of a hold is a wait like the others: it is not over when the patience for mere questions is."""
    client = impatient(face, proxy.url)
    proxy.cut()
    entering = face.hold(client, *groups, lock_only=True, body=lambda _: [world.holder(group) for group in groups])
    has_no_patience(client)
    assert not entering.done()
    proxy.heal()
    assert entering.result(DEADLINE_S) == ["a"] * len(groups)


def test_a_limit_ends_the_wait_for_the_server_too(proxy: Proxy, face: Face) -> None:
    """With a timeout the hold ends then, and the error says that the server does not answer."""
    proxy.cut()
    entering = face.acquire(impatient(face, proxy.url), "g", lock_only=True, timeout=0.5)
    with pytest.raises(RedisUnreachableError, match="does not answer"):
        entering.result(DEADLINE_S)


def test_the_environment_sets_the_patience(proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    """TIMESLICE_PATIENCE is for clients that were given none; what is no number of seconds is refused."""
    monkeypatch.setenv("TIMESLICE_PATIENCE", "0.2")
    proxy.cut()
    with timeslice.Client(proxy.url) as client, pytest.raises(RedisUnreachableError):
        client.status("g")
    assert (client.patience, timeslice.Client(proxy.url, patience=7).patience) == (0.2, 7)
    monkeypatch.setenv("TIMESLICE_PATIENCE", "-1")
    with pytest.raises(UsageError, match="TIMESLICE_PATIENCE"):
        timeslice.Client(proxy.url)
    with pytest.raises(UsageError, match="patience"):
        timeslice.Client(proxy.url, patience=float("nan"))


def test_an_outage_is_told_when_it_begins_each_minute_and_when_it_ends(
    proxy: Proxy, face: Face, world: World, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once for the whole process, however many of its threads and leases meet it."""
    monkeypatch.setattr(outages, "AGAIN_S", 2.0)  # a minute
    client = impatient(face, proxy.url)
    lease = face.acquire(client, "g", lock_only=True).result(DEADLINE_S)
    waiting = [face.acquire(client, "g", lock_only=True) for _ in range(3)]
    world.until_queued("a", "a", "a")
    assert told(caplog, "waiting for Redis", proxy.url) == 0
    proxy.cut()
    wait_until(lambda: told(caplog, "still waiting for Redis, for ", proxy.url) == 2, "it is told again and again")
    assert told(caplog, "waiting for Redis: Redis at ", proxy.url) == 1
    proxy.heal()
    wait_until(lambda: told(caplog, "answers again, after ", proxy.url) == 1, "its end is told")
    assert {record.levelname for record in caplog.records if "waiting for" in record.getMessage()} == {"WARNING"}
    for each in [lease, *[None] * len(waiting)]:
        face.give_up(each or next(done for done in waiting if done.done() and done.result().state == "held").result())
        wait_until(lambda: any(done.done() and done.result().state == "held" for done in waiting) or not world.holder(),
                   "the next one is in")  # fmt: skip


def test_a_process_that_never_reached_the_server_says_at_once_what_it_waits_for(
    proxy: Proxy, face: Face, caplog: pytest.LogCaptureFixture
) -> None:
    """The address may be wrong: a person who just started the program should not have to wait for the hint."""
    proxy.cut()
    entering = face.acquire(impatient(face, proxy.url), "g", lock_only=True)
    wait_until(lambda: told(caplog, f"waiting for Redis: Redis at {proxy.url} does not answer") == 1, "it says so")
    proxy.heal()
    entering.result(DEADLINE_S).ensure_held()


def test_a_password_that_is_changed_is_an_outage(
    server_factory: ServerFactory, prefix: str, face: Face, caplog: pytest.LogCaptureFixture
) -> None:
    """While the server refuses the credentials of a process that it knew, waiters wait and leases are kept."""
    port = free_port()
    server = server_factory(port=port)
    admin: Any = redis.Redis.from_url(server.url)
    admin.config_set("requirepass", "old")
    client = impatient(face, f"redis://:old@127.0.0.1:{port}", prefix=prefix)
    lease = face.acquire(client, "g", lock_only=True).result(DEADLINE_S)
    waiting = face.acquire(client, "g", lock_only=True)
    watcher = World(f"redis://:old@127.0.0.1:{port}", prefix)
    watcher.until_queued("a")
    watcher.close()
    admin.config_set("requirepass", "new")
    admin.client_kill_filter(_type="normal", skipme=True)
    has_no_patience(client)
    wait_until(lambda: told(caplog, "refuses these credentials") == 1, "it is told")
    assert not waiting.done()
    assert lease.state == "held"
    admin.config_set("requirepass", "old")
    wait_until(lambda: told(caplog, "answers again") == 1, "its end is told")
    face.give_up(lease)
    waiting.result(DEADLINE_S).ensure_held()
    assert told(caplog, "refuses these credentials") == 1
    assert [record for record in caplog.records if record.exc_info] == []
    admin.close()


def test_a_wrong_password_is_an_error_for_who_never_had_the_right_one(
    server_factory: ServerFactory, face: Face
) -> None:
    """A process that starts with it does not wait for ever."""
    server = server_factory(port=free_port(), args=["--requirepass", "right"])
    assert server.tcp_url is not None
    client = face.client(url=server.tcp_url.replace("redis://", "redis://:wrong@"), job="a")
    with pytest.raises(ServerUnsuitableError, match="refuses these credentials"):
        face.acquire(client, "g", lock_only=True).result(DEADLINE_S)


def test_a_job_that_found_its_server_finds_it_again(server_factory: ServerFactory, face: Face, tmp_path: Path) -> None:
    """While `timeslice up` starts again the URL file is gone, and then it may name another address: new holds wait
    instead of ending, and so do those that wait already."""
    first = server_factory(data=tmp_path)
    publish_url(first.url)
    client = face.client(job="a")
    held = face.acquire(client, "g", lock_only=True).result(DEADLINE_S)
    waiting = face.acquire(client, "g", lock_only=True)
    watcher = World(first.url, "ts")
    watcher.until_queued("a")
    watcher.close()
    withdraw_url(first.url)
    first.stop()
    late = face.acquire(face.client(job="c"), "other", lock_only=True)
    second = server_factory(data=tmp_path)
    publish_url(second.url)
    late.result(DEADLINE_S).ensure_held()
    face.give_up(held)
    waiting.result(DEADLINE_S).ensure_held()
