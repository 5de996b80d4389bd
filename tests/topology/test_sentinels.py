"""Sentinels come and go; as long as one of them answers, the master is found."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.topology.conftest import FleetFactory
from timeslice.addresses import parse_url
from timeslice.locks.sentinels import AsyncSentinels, Sentinels

pytestmark = pytest.mark.slow
MANY = 32


def test_none_is_forgotten_when_many_ask_at_once(fleet_factory: FleetFactory) -> None:
    """The first is away, so that all who ask find their answer further down the list; then only another one is left."""
    fleet = fleet_factory("sentinel", aof=False)
    hosts = parse_url(fleet.url).hosts
    sentinels = Sentinels(hosts)  # type: ignore[no-untyped-call]
    master = ("127.0.0.1", fleet.ports["redis1"])

    async def ask_by_tasks() -> None:
        asked = AsyncSentinels(hosts)  # type: ignore[no-untyped-call]
        found = await asyncio.gather(*(asked.discover_master("timeslice") for _ in range(MANY)))
        assert set(found) == {master}
        assert len({id(each) for each in asked.sentinels}) == len(hosts)
        await asked.aclose()

    fleet.kill("sentinel1")
    with ThreadPoolExecutor(MANY) as pool:
        assert set(pool.map(lambda _: sentinels.discover_master("timeslice"), range(MANY))) == {master}
    assert len({id(each) for each in sentinels.sentinels}) == len(hosts)
    asyncio.run(ask_by_tasks())
    fleet.start_one("sentinel1")
    fleet.kill("sentinel2")
    fleet.kill("sentinel3")
    assert sentinels.discover_master("timeslice") == master
    sentinels.close()
