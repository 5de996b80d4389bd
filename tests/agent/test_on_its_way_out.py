"""A process that exits has let go of its files before the kernel has freed its device memory: it is not out yet."""

from __future__ import annotations

import asyncio

import pytest

from tests.agent.rig import Rig, until
from timeslice.agent import procfs
from timeslice.models import Target


async def test_it_is_not_told_as_out(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """F02: nothing of it is seen any more, and the group goes on counting it as resident until it has ended."""
    async with rig.agent(ttl_s=0.9):
        process = await rig.job("a", 600)
        await until(lambda: rig.member("a"), "the agent has looked")
        looks = 0

        def exits(target: Target) -> bool:
            nonlocal looks
            looks += 1
            return target.pid == process.pid

        monkeypatch.setattr(procfs, "exits", exits)
        rig.fake.write("a", {})

        async def looked_again() -> bool:
            return looks >= 3

        await until(looked_again, "the agent has looked some more times")
        assert await rig.member_state("a") == "resident"
        process.kill()

        async def is_out() -> bool:
            return await rig.member_state("a") == ""

        await until(is_out, "it is out when it has ended")


async def test_a_step_waits_for_its_end(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """F02: an order to move it out is answered when the process has ended, with the word that it is gone."""
    async with rig.agent():
        process = await rig.job("a", 600)
        await until(lambda: rig.member("a"), "the agent has looked")
        asked = asyncio.Event()

        def exits(target: Target) -> bool:
            asked.set()
            return True

        swap = await rig.begin_swap("a", into="b")
        monkeypatch.setattr(procfs, "exits", exits)
        rig.fake.write("a", {})
        order = asyncio.create_task(rig.order(rig.command(swap, "prepare", "a", into="b")))
        await asyncio.wait_for(asked.wait(), 20)
        assert not order.done()
        process.kill()
        assert (await asyncio.wait_for(order, 20))["step"] == "prepared"
        assert "prepare a" not in rig.fake.calls()
