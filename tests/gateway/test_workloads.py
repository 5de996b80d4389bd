"""Workloads behind a WorkloadChannel are moved by a real agent, for real."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.gateway.snapshot_rig import Place, placed


@pytest.fixture
async def place(redis_url: str, prefix: str, tmp_path: Path) -> AsyncIterator[Place]:
    async with placed(redis_url, prefix, tmp_path) as made:
        yield made


async def test_two_workloads_alternate(place: Place) -> None:
    """Each is told to save its state before the other runs, and to bring it back before it runs again."""
    a, b = await place.workload("a"), await place.workload("b")
    await place.turn("a")
    assert a.kinds() == b.kinds() == []
    await place.turn("b")
    assert (a.kinds(), b.kinds()) == (["snapshot"], [])
    await place.turn("a")
    assert (a.kinds(), b.kinds()) == (["snapshot", "restore"], ["snapshot"])
    assert (await place.residency("a"), await place.residency("b")) == ("resident", "suspended")
