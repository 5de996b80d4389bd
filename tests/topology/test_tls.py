"""TLS with an authority of one's own, in every topology; and each way in which it can fail to be set up."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.locks.faces import AsyncFace, Face
from tests.locks.lab import Lab
from tests.topology.conftest import FleetFactory
from timeslice.addresses import parse_url
from timeslice.errors import RedisUnreachableError, ServerUnsuitableError, UsageError
from timeslice.locks import faults, flows, scripts
from timeslice.locks.drivers import SyncDriver
from timeslice.locks.flows import Wait
from timeslice.locks.scripts import Granted
from timeslice.torture.fleet import Tls

pytestmark = pytest.mark.slow
FACES: list[Callable[[str], Face]] = [SyncDriver, AsyncFace]


@pytest.mark.parametrize("kind", ["standalone", "cluster", "sentinel"])
def test_every_connection_is_encrypted(kind: str, fleet_factory: FleetFactory, tls: Tls) -> None:
    """Calls, waits and the questions to sentinels: no server has a port without TLS."""
    fleet = fleet_factory(kind, tls=tls, aof=False)
    assert parse_url(fleet.url).tls
    lab = Lab(fleet.url)
    for number, face in enumerate(FACES):
        driver, waiter = face(fleet.url), f"a{number}"
        grant = driver.drive(flows.acquire(lab.group, lab.request(waiter)))
        assert driver.wait(Wait(lab.group.grant("nobody"), "0-0", 10)) == []
        driver.run(scripts.yield_(lab.group, waiter, grant.token))
        driver.close()
    assert len(lab.events("LeaseGranted")) == 2
    lab.redis.close()


@pytest.fixture
def encrypted(fleet_factory: FleetFactory, tls: Tls) -> str:
    """URL of one server, without the authority's certificate."""
    return fleet_factory("standalone", tls=tls, aof=False).url.partition("?")[0]


def ask(face: Callable[[str], Face], url: str, *, deadline_s: float = 60.0) -> None:
    lab = Lab("redis://127.0.0.1:1")  # never asked: it makes the call
    driver = face(url)
    try:
        assert isinstance(driver.run(scripts.acquire(lab.group, lab.request("a1")), deadline_s=deadline_s), Granted)
    finally:
        driver.close()
        lab.redis.close()


@pytest.mark.parametrize("face", FACES)
def test_an_unknown_authority_is_an_error_that_names_the_option(face: Callable[[str], Face], encrypted: str) -> None:
    """At once, not after the time for an outage; and the check can be turned off by those who want that."""
    with pytest.raises(ServerUnsuitableError, match=r"no TLS connection.*(?s:.*)ssl_ca_certs="):
        ask(face, encrypted)
    ask(face, encrypted + "?ssl_cert_reqs=none&ssl_check_hostname=false")


@pytest.mark.parametrize("face", FACES)
def test_a_missing_file_is_named(face: Callable[[str], Face], encrypted: str, tmp_path: Path) -> None:
    """By its path and by the option that names it."""
    for option in ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile"):
        with pytest.raises(UsageError, match=rf"{option} names {tmp_path}/none.pem, which can't be read"):
            ask(face, f"{encrypted}?{option}={tmp_path}/none.pem")


@pytest.mark.parametrize("face", FACES)
def test_tls_to_a_port_without_it_and_the_other_way_round(
    face: Callable[[str], Face],
    encrypted: str,
    fleet_factory: FleetFactory,
    tls: Tls,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first is found out, though it hangs; of the second a client sees only that the server hangs up."""
    monkeypatch.setattr(faults, "_PROBE_S", 1.5)  # a server may be slow to answer
    plain = fleet_factory("standalone", aof=False).url
    with pytest.raises(ServerUnsuitableError, match="speaks no TLS"):
        ask(face, f"{plain.replace('redis:', 'rediss:')}?ssl_ca_certs={tls.ca}", deadline_s=3.0)
    with pytest.raises(RedisUnreachableError, match="A port with TLS needs rediss://"):
        ask(face, encrypted.replace("rediss:", "redis:"), deadline_s=3.0)
