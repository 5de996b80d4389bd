from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.kinds.world import World


@pytest.fixture
async def world(redis_url: str, prefix: str, tmp_path: Path) -> AsyncIterator[World]:
    """A group without nodes yet."""
    made = World(redis_url, prefix, tmp_path)
    yield made
    await made.close()
