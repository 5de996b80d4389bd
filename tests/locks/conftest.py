"""Servers under test: Valkey in the fast tier; in the slow one the oldest Redis that is promised, and as a cluster and
behind sentinels too."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.conftest import NeedsTool
from tests.locks.faces import AsyncFace, Face
from tests.locks.lab import Lab
from tests.locks.proxy import Impostor
from timeslice.embedded import EmbeddedServer
from timeslice.locks.drivers import SyncDriver
from timeslice.torture.fleet import ClusterFleet, Fleet, FleetOptions, SentinelFleet

BOTH = ["valkey", pytest.param("redis7", marks=pytest.mark.slow)]
FLEETS = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("cluster", "sentinel")]


@pytest.fixture(scope="session")
def redis7() -> Iterator[EmbeddedServer | None]:
    """Debian's redis-server, or None where it is not installed."""
    path = shutil.which("redis-server")
    if path is None:
        yield None
        return
    with EmbeddedServer(binary=path) as running:
        yield running


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Three shards. Nothing fails over here: see tests/topology."""
    with ClusterFleet(FleetOptions(tmp_path_factory.mktemp("cluster"), aof=False), replicas=False) as running:
        yield running


@pytest.fixture(scope="session")
def sentinel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """One master that clients find by asking."""
    options = FleetOptions(tmp_path_factory.mktemp("sentinel"), aof=False)
    with SentinelFleet(options, replicas=0, sentinels=1) as running:
        yield running


@pytest.fixture(params=BOTH)
def either(request: pytest.FixtureRequest, server: EmbeddedServer, needs_tool: NeedsTool) -> EmbeddedServer:
    """Each server in turn."""
    if request.param == "valkey":
        return server
    needs_tool("redis-server")
    running: Any = request.getfixturevalue("redis7")
    assert isinstance(running, EmbeddedServer)
    return running


@pytest.fixture(params=[*BOTH, *FLEETS])
def anywhere(request: pytest.FixtureRequest, server: EmbeddedServer, needs_tool: NeedsTool) -> str:
    """URL of each server and each topology in turn."""
    if request.param == "valkey":
        return server.url
    needs_tool("redis-server")
    running: Any = request.getfixturevalue(request.param)
    url: str = running.url
    return url


@pytest.fixture(params=[False, True], ids=["once", "twice"])
def lab(request: pytest.FixtureRequest, anywhere: str, prefix: str) -> Iterator[Lab]:
    """A group of the test's own; every call sent once, and in a second run of the test sent twice."""
    made = Lab(anywhere, prefix, twice=request.param)
    yield made
    made.redis.close()


@pytest.fixture
def site(anywhere: str, prefix: str) -> Iterator[Lab]:
    """A group in each topology, to look at what the drivers did."""
    made = Lab(anywhere, prefix)
    yield made
    made.redis.close()


@pytest.fixture(params=[SyncDriver, AsyncFace], ids=["sync", "asyncio"])
def face(request: pytest.FixtureRequest) -> Iterator[Callable[[str], Face]]:
    """Makes drivers of one kind."""
    made: list[Face] = []

    def make(url: str) -> Face:
        made.append(request.param(url))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def plain(server: EmbeddedServer, prefix: str) -> Iterator[Lab]:
    """A group on the session's server, to look at what the drivers did."""
    lab = Lab(server.url, prefix)
    yield lab
    lab.redis.close()


@pytest.fixture
def proxy(server: EmbeddedServer) -> Iterator[Impostor]:
    running = Impostor(server.socket)
    yield running
    running.close()
