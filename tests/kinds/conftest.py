from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.conftest import ServerFactory
from tests.kinds.devices import Devices
from tests.kinds.world import World


@pytest.fixture
async def world(redis_url: str, prefix: str, tmp_path: Path) -> AsyncIterator[World]:
    """A group without nodes yet."""
    made = World(redis_url, prefix, tmp_path)
    yield made
    await made.close()


@pytest.fixture
def devices(
    server_factory: ServerFactory,
    prefix: str,
    tmp_path: Path,
    clean_environment: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Devices]:
    """Groups on emulated devices, not started yet, with a server of their own."""
    url = server_factory().url
    for name, value in {"URL": url, "PREFIX": prefix, "NODE": "n1"}.items():
        monkeypatch.setenv(f"TIMESLICE_{name}", value)
    monkeypatch.setenv("TEST_DEVICES", str(clean_environment / "devices"))
    made = Devices(url, prefix, tmp_path, clean_environment)
    yield made
    made.close()
