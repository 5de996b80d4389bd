"""Gangs on the session's server; in a second run of a test every call is sent twice."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.client.conftest import face, proxy, world  # noqa: F401 - fixtures
from tests.gang.lab import GangLab
from timeslice.embedded import EmbeddedServer


@pytest.fixture(params=[False, True], ids=["once", "twice"])
def lab(request: pytest.FixtureRequest, server: EmbeddedServer, prefix: str) -> Iterator[GangLab]:
    """A group of the test's own; in its second run, each call is answered twice."""
    made = GangLab(server.url, prefix, twice=request.param)
    yield made
    made.redis.close()
