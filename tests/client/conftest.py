from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import redis

from tests.client.faces import AsyncFace, Face, SyncFace
from tests.client.world import World
from timeslice.embedded import EmbeddedServer
from timeslice.torture.proxy import Proxy


@pytest.fixture(params=[SyncFace, AsyncFace], ids=["sync", "async"])
def face(request: pytest.FixtureRequest) -> Iterator[Face]:
    """Both clients in turn."""
    made = request.param()
    yield made
    made.end()


@pytest.fixture
def world(redis_url: str, prefix: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """A look at the session's server under this test's prefix, which the environment names too."""
    monkeypatch.setenv("TIMESLICE_URL", redis_url)
    monkeypatch.setenv("TIMESLICE_PREFIX", prefix)
    monkeypatch.setenv("TIMESLICE_NODE", "n1")
    made = World(redis_url, prefix)
    yield made
    made.close()


@pytest.fixture
def proxy(server: EmbeddedServer) -> Iterator[Proxy]:
    made = Proxy(server.socket)
    yield made
    made.close()


@pytest.fixture
def observer(redis_url: str) -> Iterator[redis.Redis]:
    client: Any = redis.Redis.from_url(redis_url)
    yield client
    client.close()
