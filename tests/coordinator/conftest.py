from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.coordinator.scripted import World


@pytest.fixture
async def world(redis_url: str, prefix: str) -> AsyncIterator[World]:
    """A group named ``trainers`` under a prefix of its own; ``open`` it with nodes."""
    made = World(redis_url, prefix)
    yield made
    await made.close()
