"""The fault proxy: each fault does what it says, and heals."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from timeslice.embedded import EmbeddedServer
from timeslice.torture.proxy import Proxy
from timeslice.torture.resp import end_of_message, messages_in

SOON_S = 0.2
LATE_S = 30.0


@pytest.fixture
def proxy(server: EmbeddedServer) -> Iterator[Proxy]:
    made = Proxy(server.socket)
    yield made
    made.close()


Dial = Callable[..., "redis.Redis"]


@pytest.fixture
def dial(proxy: Proxy) -> Iterator[Dial]:
    """Clients through the proxy; they never send again by themselves."""
    made: list[Any] = []

    def new(timeout_s: float = LATE_S, protocol: int = 2) -> Any:
        client: Any = redis.Redis.from_url(
            proxy.url, socket_timeout=timeout_s, retry=Retry(NoBackoff(), 0), protocol=protocol
        )
        made.append(client)
        return client

    yield new
    for client in made:
        client.close()


def reach(client: redis.Redis) -> None:
    """Connect a client that is in a hurry, on a machine that may not be."""
    until = time.monotonic() + LATE_S
    while True:
        try:
            client.ping()
            return
        except redis.TimeoutError:
            assert time.monotonic() < until, "the server does not answer"


def test_traffic_passes(dial: Dial, prefix: str) -> None:
    """Without a fault a client sees its server, large replies included."""
    client = dial()
    client.set(prefix, b"x" * 300_000)
    assert client.get(prefix) == b"x" * 300_000
    client.delete(prefix)


def test_a_cut_ends_connections_and_refuses_new_ones(proxy: Proxy, dial: Dial) -> None:
    """After a cut neither an old nor a new connection gets through; after the healing both do."""
    old, new = dial(), dial()
    old.ping()
    proxy.cut()
    for client in (old, new):
        with pytest.raises(redis.ConnectionError):
            client.ping()
    proxy.heal()
    assert old.ping()
    assert new.ping()


def test_a_stall_delivers_later(proxy: Proxy, dial: Dial, prefix: str, server: EmbeddedServer) -> None:
    """What was sent into a stall arrives when it ends, on the same connection."""
    client = dial()
    client.ping()
    proxy.stall()
    answers: list[object] = []
    asking = threading.Thread(target=lambda: answers.append(client.incr(prefix)))
    asking.start()
    asking.join(SOON_S)
    assert asking.is_alive()
    proxy.heal()
    asking.join(LATE_S)
    assert answers == [1]


def test_half_open_connections_stay_dead(proxy: Proxy, dial: Dial, prefix: str) -> None:
    """A half-open connection swallows requests for good, new ones are accepted, and only those after it work."""
    old, during = dial(SOON_S), dial(SOON_S)
    reach(old)
    proxy.half_open()
    for client in (old, during):
        with pytest.raises(redis.TimeoutError):
            client.incr(prefix)
    proxy.heal()
    assert dial().incr(prefix) == 1


def test_a_delay_passes_everything_late(proxy: Proxy, dial: Dial) -> None:
    """A client that waits less than the delay times out; one that waits longer gets its reply."""
    hasty, patient = dial(SOON_S), dial()
    reach(hasty)
    proxy.delay(2 * SOON_S)
    with pytest.raises(redis.TimeoutError):
        hasty.ping()
    assert patient.ping()


def test_a_lost_reply_is_of_a_request_that_was_done(proxy: Proxy, dial: Dial, prefix: str) -> None:
    """The server acts, the client sees its connection close."""
    client = dial()
    proxy.lose_reply_to(prefix)
    with pytest.raises(redis.ConnectionError):
        client.incr(prefix)
    assert proxy.lost_replies == 1
    assert client.incr(prefix) == 2


@pytest.mark.parametrize("protocol", [2, 3])
def test_a_repeated_request_is_done_twice_and_answered_once(
    proxy: Proxy, dial: Dial, prefix: str, protocol: int
) -> None:
    """The client gets the second reply, and the next request gets its own, also after a large one."""
    client = dial(protocol=protocol)
    proxy.repeat_request_to(prefix)
    assert client.incr(prefix) == 2
    assert client.echo(b"mine") == b"mine"
    client.hset(prefix + ":h", mapping={f"f{n}": "v" * 2_000 for n in range(100)})
    proxy.repeat_request_to(prefix + ":h")
    assert len(client.hgetall(prefix + ":h")) == 100
    assert client.echo(b"mine") == b"mine"
    assert proxy.repeated_requests == 2
    client.delete(prefix, prefix + ":h")


def test_a_doubled_reply_is_of_a_request_that_was_done_once(proxy: Proxy, prefix: str) -> None:
    """The client is told twice of one deed of the server; the next request is answered once again."""
    with socket.create_connection(("127.0.0.1", proxy.port), LATE_S) as client:
        proxy.double_reply_to(prefix)
        ask = f"INCR {prefix}\r\n".encode()
        client.sendall(ask)
        replies = client.makefile("rb")
        assert [replies.readline(), replies.readline()] == [b":1\r\n"] * 2
        client.sendall(ask + b"PING\r\n")
        assert [replies.readline(), replies.readline()] == [b":2\r\n", b"+PONG\r\n"]
        client.sendall(f"DEL {prefix}\r\n".encode())
        replies.readline()


@pytest.mark.parametrize(
    "message",
    [
        b"+OK\r\n",
        b"-ERR no\r\n",
        b":12\r\n",
        b"$-1\r\n",
        b"*-1\r\n",
        b"$0\r\n\r\n",
        b"$4\r\na\r\nb\r\n",
        b"*2\r\n$1\r\na\r\n*1\r\n:1\r\n",
        b"%1\r\n+k\r\n*0\r\n",
        b"|1\r\n+k\r\n+v\r\n:5\r\n",
        b"_\r\n",
    ],
)
def test_the_end_of_a_message_is_found(message: bytes) -> None:
    """Of each kind of message, whole or in part, alone or before another."""
    assert end_of_message(message) == len(message)
    assert end_of_message(message + b"+next\r\n") == len(message)
    assert messages_in(message + b"+next\r\n") == 2
    assert [end_of_message(message[:cut]) for cut in range(len(message))] == [None] * len(message)
