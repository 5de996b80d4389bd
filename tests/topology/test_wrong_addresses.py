"""A URL of the wrong kind, or something else behind it: the error says what is there and which URL to use."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace

import pytest

from tests.locks.faces import AsyncFace, Face
from tests.locks.lab import Lab
from tests.topology.conftest import FleetFactory
from timeslice.addresses import Address, parse_url
from timeslice.cli.session import Session
from timeslice.errors import RedisUnreachableError, ServerUnsuitableError, UsageError
from timeslice.locks import faults, scripts
from timeslice.locks.drivers import AsyncDriver, SyncDriver
from timeslice.locks.suitable import verify, verify_async
from timeslice.torture.fleet_base import free_port

FACES = pytest.mark.parametrize("face", [SyncDriver, AsyncFace], ids=["sync", "asyncio"])
MakeFace = Callable[[str], Face]


def refusal(
    face: MakeFace, url: str, kind: type[Exception] = ServerUnsuitableError, *, deadline_s: float = 60.0
) -> str:
    """The words of the error that a call must end with."""
    driver, lab = face(url), Lab("redis://127.0.0.1:1")  # its server is never asked: it makes the calls
    # One of so many groups lives on another node than the one that is asked.
    calls = [scripts.acquire(replace(lab.group, name=f"g{number}"), lab.request("a1")) for number in range(8)]
    try:
        with pytest.raises(kind) as raised:
            _ = [driver.run(call, deadline_s=deadline_s) for call in calls]
    finally:
        driver.close()
        lab.redis.close()
    return str(raised.value)


@pytest.fixture
def stranger() -> Iterator[Callable[[bytes, bool], int]]:
    """Starts a server that sends some bytes, at once or when it was asked something; its port."""
    doors = []

    def start(words: bytes, at_once: bool) -> int:
        door = socket.create_server(("127.0.0.1", 0))
        doors.append(door)

        def serve() -> None:
            with suppress(OSError):  # the door is shut
                while True:
                    guest, _ = door.accept()
                    threading.Thread(target=speak, args=(guest,), daemon=True).start()

        def speak(guest: socket.socket) -> None:
            with guest, suppress(OSError):
                if at_once or guest.recv(1):
                    guest.sendall(words)
                    guest.shutdown(socket.SHUT_WR)
                guest.recv(1000)

        threading.Thread(target=serve, daemon=True).start()
        port: int = door.getsockname()[1]
        return port

    yield start
    for each in doors:
        each.shutdown(socket.SHUT_RDWR)
        each.close()


STRANGERS = {
    "gRPC": (b"\x00\x00\x12\x04\x00\x00\x00\x00\x00", True),  # the settings with which such a server begins
    "HTTP": (b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n", False),
    "ssh": (b"SSH-2.0-OpenSSH_9.2\r\n", True),
}


@FACES
@pytest.mark.parametrize("what", STRANGERS)
@pytest.mark.parametrize("form", ["redis://{}", "redis+cluster://{}", "redis+sentinel://{}/m"])
def test_what_is_no_redis_is_said_to_be_none(
    face: MakeFace,
    what: str,
    form: str,
    stranger: Callable[[bytes, bool], int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Behind each kind of URL, whether the client reads what it says or only sees that it hangs up."""
    monkeypatch.setattr(faults, "_PROBE_S", 1.5)  # a thread of this process answers, which may be busy
    url = form.format(f"127.0.0.1:{stranger(*STRANGERS[what])}")
    said = refusal(face, url, deadline_s=1.0)
    assert "speaks no Redis" in said
    assert url in said


@FACES
@pytest.mark.parametrize("form", ["redis://{}", "redis+cluster://{}", "redis+sentinel://{}/m"])
def test_nobody_there_is_an_outage(face: MakeFace, form: str) -> None:
    """It is waited for, and then named."""
    url = form.format(f"127.0.0.1:{free_port()}")
    said = refusal(face, url, RedisUnreachableError, deadline_s=1.0)
    assert f"Redis at {url} does not answer" in said
    assert "Connection" not in said.partition("(")[0]


@pytest.mark.slow
@FACES
def test_one_node_of_a_cluster_is_not_the_cluster(face: MakeFace, fleet_factory: FleetFactory) -> None:
    """And the other way round: the error gives the URL to use."""
    cluster = fleet_factory("cluster", aof=False)
    host = f"127.0.0.1:{cluster.ports['master1']}"
    assert "is a node of a cluster" in (said := refusal(face, f"redis://{host}"))
    assert re.search(r"\(it sends us to 127\.0\.0\.1:\d+ for slot \d+\)", said)
    assert f"Use redis+cluster://{host}" in said
    single = fleet_factory("standalone", aof=False)
    said = refusal(face, single.url.replace("redis:", "redis+cluster:"))
    assert "is no cluster" in said
    assert said.endswith(f"Use {single.url}")


@pytest.mark.slow
@FACES
def test_sentinels_say_what_they_do_not_know(face: MakeFace, fleet_factory: FleetFactory) -> None:
    """A master that they don't watch, servers that are no sentinels, sentinels that are taken for servers."""
    fleet = fleet_factory("sentinel", aof=False)
    said = refusal(face, fleet.url.replace("/timeslice", "/another"))
    assert "the sentinels know no master named 'another'; they watch: timeslice" in said
    assert "is none" in refusal(face, f"redis+sentinel://127.0.0.1:{fleet.ports['redis1']}/timeslice")
    host = f"127.0.0.1:{fleet.ports['sentinel1']}"
    assert "is a sentinel, by the look of it (" in (said := refusal(face, f"redis://{host}"))
    assert f"Use redis+sentinel://{host}/NAME" in said
    with pytest.raises(ServerUnsuitableError, match="is a sentinel, by the look of it"):  # what commands ask first
        Session(f"redis://{host}").driver  # noqa: B018 - it connects
    for name in ("sentinel1", "sentinel2", "sentinel3"):
        fleet.kill(name)
    said = refusal(face, fleet.url, RedisUnreachableError, deadline_s=1.0)
    assert f"Redis at {fleet.url} does not answer (no sentinel answers: " in said


@pytest.mark.slow
@FACES
def test_sentinels_have_credentials_of_their_own(face: MakeFace, fleet_factory: FleetFactory) -> None:
    """Those of the servers are not tried on them; the error names the options."""
    fleet = fleet_factory("sentinel", aof=False, password="secret")
    assert "sentinel_password=" in refusal(face, fleet.url.partition("?")[0])


@pytest.mark.slow
async def test_every_master_must_be_suitable(fleet_factory: FleetFactory) -> None:
    """One that may evict a lease spoils the cluster; the error names it."""
    fleet = fleet_factory("cluster", aof=False)
    sync, aio = SyncDriver(fleet.url), AsyncDriver(fleet.url)
    verify(sync)
    await verify_async(aio)
    with fleet.client("master3") as bad:
        bad.config_set("maxmemory-policy", "allkeys-lru")
    where = f"127.0.0.1:{fleet.ports['master3']}"
    with pytest.raises(ServerUnsuitableError, match=rf"{where} may evict"):
        verify(sync)
    with pytest.raises(ServerUnsuitableError, match=rf"{where} may evict"):
        await verify_async(aio)
    sync.close()
    await aio.close()


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis+sentinel://h,[::1]:2/m", Address("sentinel", hosts=(("h", 26379), ("::1", 2)), master="m")),
        ("REDISS+cluster://h,i:2", Address("cluster", tls=True, hosts=(("h", 6379), ("i", 2)))),
        ("redis+sentinel://u:p@h/m?db=3", Address("sentinel", False, (("h", 26379),), "", "m", 3, "u", "p")),
    ],
)
def test_lists_of_hosts_are_read(url: str, expected: Address) -> None:
    """Each with a port of its own, or the usual one; and the address can be written out again."""
    assert parse_url(url) == expected
    assert parse_url(expected.url) == expected


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("redis+sentinel://h:1", "must name one master"),
        ("redis+sentinel://h:1/a/b", "must name one master"),
        ("redis+cluster://h:1/3", "only database 0"),
        ("redis+cluster://h:1,,i:2", "no host"),
        ("redis://h:1,i:2", "several hosts need"),
        ("redis+tcp://h:1", "no Redis URL"),
        ("redis://h:1/x", "must be a number"),
        ("redis://h:1/2?db=3", "leave one of them out"),
        ("redis://h:1?max_connections=x", "must be a number"),
        ("redis://h:1?ssl_ca_certs=x", "use rediss://"),
        ("redis://h:1?sentinel_password=x", "names no sentinels"),
        ("redis://h:1?unheard_of=x", "option that is unknown"),
    ],
)
def test_what_makes_no_sense_is_refused(url: str, message: str) -> None:
    """Before anything is sent, with the right form."""
    with pytest.raises(UsageError, match=message):
        parse_url(url)
