"""Servers under test: Valkey in the fast tier, the oldest Redis that is promised in the slow one."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from tests.conftest import NeedsTool
from tests.locks.lab import Lab
from timeslice.embedded import EmbeddedServer

BOTH = ["valkey", pytest.param("redis7", marks=pytest.mark.slow)]


@pytest.fixture(scope="session")
def redis7() -> Iterator[EmbeddedServer | None]:
    """Debian's redis-server, or None where it is not installed."""
    path = shutil.which("redis-server")
    if path is None:
        yield None
        return
    with EmbeddedServer(binary=path) as running:
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


@pytest.fixture(params=[False, True], ids=["once", "twice"])
def lab(request: pytest.FixtureRequest, either: EmbeddedServer, prefix: str) -> Iterator[Lab]:
    """A group of the test's own; every call sent once, and in a second run of the test sent twice."""
    made = Lab(either.url, prefix, twice=request.param)
    yield made
    made.redis.close()
