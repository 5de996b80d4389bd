"""What a hold that waits says on the log meanwhile."""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import Future
from typing import Any

import pytest

from tests.client.faces import Face
from tests.client.world import World
from tests.support.jobs import DEADLINE_S, wait_until
from timeslice import AsyncClient
from timeslice.client import core, once


def got(future: Future[Any]) -> Any:
    return future.result(DEADLINE_S)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Waits are told of at each refresh, and refreshed often."""
    caplog.set_level(logging.INFO, "timeslice")
    monkeypatch.setattr(core, "WAITER_TTL_MS", 1500)
    monkeypatch.setattr(core, "_TELL_FIRST_S", 0)
    monkeypatch.setattr(core, "_TELL_NEXT_S", 0.1)


def lines(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    return [(record.levelname, record.getMessage()) for record in caplog.records if "waits for" in record.getMessage()]


def test_a_hold_that_waits_says_who_holds_and_its_place(
    face: Face, world: World, caplog: pytest.LogCaptureFixture, quick: None
) -> None:
    """In the words of `timeslice hold`, once and then again and again, until it is granted."""
    holder = got(face.acquire(face.client(job="a"), "g", lock_only=True, phase="train"))
    second = face.acquire(face.client(job="b"), "g", lock_only=True)
    world.until_queued("b")
    third = face.hold(face.client(job="c"), "g", lock_only=True, body=lambda _: None)
    start = "job c waits for g: job a holds it for "
    wait_until(lambda: sum(line.startswith(start) for _, line in lines(caplog)) > 1, "it is told twice")
    line = next(line for _, line in lines(caplog) if line.startswith(start))
    assert line.endswith(" now (train); 1 before it. More: timeslice queue g")
    face.give_up(holder)
    face.give_up(got(second))
    got(third)


def test_the_first_wait_for_a_group_is_a_warning_and_the_usual_turn_is_none(
    face: Face, world: World, caplog: pytest.LogCaptureFixture, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program without logging shows warnings: whoever wonders why it stands still reads it, but not for each turn."""
    monkeypatch.setattr(once, "_said", set())
    monkeypatch.setattr(core, "_TELL_NEXT_S", 60.0)
    client, other = face.client(job="b"), face.client(job="a")
    for number in range(1, 3):
        holder = got(face.acquire(other, "g", lock_only=True))
        waiting = face.hold(client, "g", lock_only=True, body=lambda _: None)
        wait_until(lambda count=number: len(lines(caplog)) == count, "it is told")  # type: ignore[misc]
        face.give_up(holder)
        got(waiting)
    assert [level for level, _ in lines(caplog)] == ["WARNING", "INFO"]


def test_a_gang_that_forms_says_who_is_missing(
    face: Face, world: World, caplog: pytest.LogCaptureFixture, quick: None
) -> None:
    """A rank that waits for the others has no place yet."""
    waiting = face.acquire(face.client(job="a"), "g", lock_only=True, rank=0, world_size=2)
    wait_until(lambda: bool(lines(caplog)), "it is told")
    assert lines(caplog)[0][1] == "job a waits for g: gang 1/2, rank 1 has not arrived. More: timeslice queue g"
    other = face.acquire(face.client(job="a"), "g", lock_only=True, rank=1, world_size=2)
    for lease in (got(waiting), got(other)):
        face.give_up(lease)


async def test_who_waits_for_its_own_starter_is_told(
    world: World, caplog: pytest.LogCaptureFixture, quick: None
) -> None:
    """A child task of code that has the group from `acquire` may wait rightly; if it is awaited, neither goes on."""
    async with AsyncClient(job="a") as client:
        lease = await client.acquire("g", lock_only=True)

        async def child() -> str:
            async with client.hold("g", lock_only=True):
                return world.holder()

        waiting = asyncio.create_task(child())
        words = f"has it from acquire (token {lease.fencing_token}): if it waits for this here, neither goes on"
        await asyncio.to_thread(wait_until, lambda: any(words in line for _, line in lines(caplog)), "it is told")
        await lease.yield_()
        assert await waiting == "a"
