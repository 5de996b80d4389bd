from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.agent.rig import Rig


@pytest.fixture
async def rig(redis_url: str, prefix: str, tmp_path: Path) -> AsyncIterator[Rig]:
    """One group on one node, nothing running yet."""
    made = Rig(redis_url, prefix, tmp_path)
    yield made
    await made.close()
