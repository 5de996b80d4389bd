"""Fleets of a test's own, to be killed and stopped, and the whole system on one."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import NeedsTool
from tests.topology.system import System
from timeslice.torture.fleet import Fleet, Tls, make_fleet

FleetFactory = Callable[..., Fleet]
SystemFactory = Callable[..., System]


@pytest.fixture
def fleet_factory(needs_tool: NeedsTool, tmp_path: Path) -> Iterator[FleetFactory]:
    """Start fleets; takes make_fleet's arguments, but for the folder."""
    started: list[Fleet] = []

    def start(kind: str, **arguments: Any) -> Fleet:
        binary = needs_tool("redis-server")
        started.append(make_fleet(kind, tmp_path / f"fleet{len(started)}", **{"binary": binary, **arguments}))
        return started[-1].start()

    yield start
    for each in started:
        each.stop()


@pytest.fixture
def system_factory(tmp_path: Path) -> Iterator[SystemFactory]:
    """The whole system on a fleet."""
    made: list[System] = []

    def make(fleet: Fleet) -> System:
        made.append(System(fleet, tmp_path))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture(scope="session")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Tls:
    """A certificate for 127.0.0.1, signed by an authority that nobody else knows."""
    folder = tmp_path_factory.mktemp("tls")

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True, timeout=60)

    new_key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-noenc")
    openssl(
        *("req", "-x509", *new_key, "-keyout", "ca.key", "-out", "ca.pem", "-days", "2", "-subj", "/CN=Test CA"),
        *("-addext", "keyUsage=critical,keyCertSign,cRLSign"),  # Python 3.13 refuses an authority that does not say so
    )
    openssl("req", *new_key, "-keyout", "server.key", "-out", "server.csr", "-subj", "/CN=test server")
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1")
    openssl(
        *("x509", "-req", "-in", "server.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial"),
        *("-days", "2", "-extfile", "names", "-out", "server.pem"),
    )
    return Tls(folder / "ca.pem", folder / "server.pem", folder / "server.key")
