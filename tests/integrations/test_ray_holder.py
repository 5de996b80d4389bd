"""The holder of Ray's calls, without Ray: what is called is a stand-in that answers at once."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from typing import Any

import pytest

from tests.integrations.conftest import Pools
from timeslice import AsyncClient
from timeslice.integrations.ray_holder import Holder, Place, Request


class Call(Request):
    """Of a remote function that tells who holds the group where it runs."""

    def submit(self) -> Any:
        answer: Future[str] = Future()
        answer.set_result(self.target.holder("trainers"))
        made = Future[str]()
        made.future = lambda: answer  # type: ignore[attr-defined]
        return made


async def test_a_call_does_not_go_out_on_a_lease_that_was_lost_while_it_stood_in_line(
    pools: Pools, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stands behind one that has not come yet; what it was granted is lost meanwhile, so it waits for a new turn."""
    monkeypatch.setattr(AsyncClient.hold, "__kwdefaults__", {**(AsyncClient.hold.__kwdefaults__ or {}), "lease": 1.0})
    monkeypatch.setattr("timeslice.integrations.ray_holder.LOST_S", 60)
    holder = Holder()
    call = Call(Place("mine", ("trainers",), None), pools, "", {}, (), {})
    second = asyncio.create_task(holder.call(call, "line", 1))
    await asyncio.to_thread(pools.until_held, "mine", "trainers")
    (turn,) = holder._turns.values()
    (lease,) = await turn.granted
    async with AsyncClient(job="rival") as rival:
        pools.take_away("trainers")
        taken = await rival.acquire("trainers", lease=60)
        await lease.wait_lost()
        first = asyncio.create_task(holder.call(call, "line", 0))
        await asyncio.to_thread(pools.until_queued, "mine", group="trainers")
        await taken.yield_()
        assert [await first, await second] == ["mine", "mine"]
    await holder._client.close()  # in an actor of Ray it lives as long as the process
