"""A process that holds again and again keeps no more than after its first holds."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

import timeslice
from tests.support.census import census, grown
from timeslice.client.aio import AsyncClient
from timeslice.client.sync import Client
from timeslice.errors import AcquireTimeoutError


def _threads_and_files() -> tuple[int, int]:
    return len(list(Path("/proc/self/task").iterdir())), len(os.listdir("/proc/self/fd"))  # noqa: PTH208


def test_one_client_holds_a_thousand_times(redis_url: str, prefix: str) -> None:
    """As a new job each time, with a second waiter that gives up, on groups of their own."""
    with Client(redis_url, prefix=prefix) as client, Client(redis_url, prefix=prefix) as rival:

        def hold(number: int) -> None:
            with client.hold("g", job=f"job-{number}", lock_only=True), pytest.raises(AcquireTimeoutError):
                rival.acquire("g", job=f"rival-{number}", lock_only=True, timeout=0)

        for number in range(20):
            hold(number)
        before, outside = census(), _threads_and_files()
        for number in range(20, 1020):
            hold(number)
        assert grown(before, census(), rounds=1000) == {}
        threads, files = _threads_and_files()
        assert threads <= outside[0] + 1
        assert files <= outside[1] + 3


def test_a_loop_for_each_hold(redis_url: str, prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`asyncio.run` again and again, with a client of its own and with the default one: what belongs to a loop goes
    with it."""
    monkeypatch.setenv("TIMESLICE_URL", redis_url)
    monkeypatch.setenv("TIMESLICE_PREFIX", prefix)

    async def hold() -> None:
        async with timeslice.hold("g", job="a", lock_only=True):
            pass
        async with AsyncClient(redis_url, prefix=prefix, job="b") as client, client.hold("h", lock_only=True):
            pass

    for _ in range(5):
        asyncio.run(hold())
    before, outside = census(), _threads_and_files()
    for _ in range(60):
        asyncio.run(hold())
    assert grown(before, census(), rounds=60) == {}
    threads, files = _threads_and_files()
    assert threads <= outside[0] + 1
    assert files <= outside[1] + 3
