"""Orders that are lost with the node's stream while its agent is down: a real agent and a real coordinator."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import pytest

from tests.agent.rig import Rig, until
from timeslice.coordinator.service import CoordinatorOptions, run_coordinator
from timeslice.locks import scripts

LONG_MS = 600_000  # no step is over by its time
DIES_IN = {"prepare": "prepare", "commit": "suspend", "rollback": "restore"}  # step -> operation


@asynccontextmanager
async def coordinator(rig: Rig, name: str = "heir") -> AsyncIterator[None]:
    stop = asyncio.Event()
    await rig.driver.client.sadd(rig.keys.groups, rig.name)
    task = asyncio.create_task(
        run_coordinator(CoordinatorOptions(url=rig.url, prefix=rig.prefix, name=name), stop=stop)
    )
    try:
        yield
    finally:
        stop.set()
        await task


async def begun(rig: Rig, step: str) -> None:
    """Job a is on the device, b waits, and the agent has died in the middle of this step of the swap."""
    agent = rig.spawn_agent()
    await rig.job("a", 600)
    await rig.driver.run(
        scripts.configure(rig.group, {f"{name}_timeout_ms": str(LONG_MS) for name in ("suspend", "restore", "prepare")})
    )
    swap = await rig.begin_swap("a", into="b")
    order = rig.command(swap, "prepare", "a", into=None)
    if step != "prepare":
        await rig.order(order)
        await move(rig, "prepare", "commit")
        order = rig.command(swap, "commit", "a", into=None)
    if step == "rollback":
        await rig.order(order)
        await move(rig, "commit", "rollback")
        order = rig.command(swap, "rollback", "a", into=None)
    rig.fake.knob(DIES_IN[step], die="before")
    await rig.send(order)
    assert await asyncio.to_thread(agent.wait, 60) == -9
    rig.fake.write("knobs", {})
    assert (await rig.view()).nodes[rig.node].step == f"begun {step}"


async def move(rig: Rig, before: str, after: str) -> None:
    view = await rig.view()
    await rig.driver.run(scripts.step(rig.group, view.swap, rig.epoch, before, after, LONG_MS))


@pytest.mark.parametrize(
    ("step", "lost"),
    [("prepare", "trimmed"), ("commit", "deleted"), ("rollback", "trimmed"), ("commit", "deleted, and the folder")],
)
async def test_a_swap_goes_on_though_the_order_of_a_step_was_lost(rig: Rig, step: str, lost: str) -> None:
    """The agent dies in a step, and its stream loses the order before it is back; it may have lost its journal as well.
    The order is given again, by a new owner, too, and the same swap is finished, or undone, by itself."""
    await begun(rig, step)
    stream = rig.keys.commands(rig.node)
    await (rig.driver.client.xtrim(stream, maxlen=0) if lost == "trimmed" else rig.driver.client.delete(stream))
    if lost.endswith("folder"):
        shutil.rmtree(rig.folder / "state")
    await rig.driver.run(scripts.disown(rig.group, "c1"))
    async with coordinator(rig), rig.agent():
        await over(rig, step)


async def over(rig: Rig, step: str) -> None:
    if step == "rollback":
        await until(partial(rig.events, "SwapDeferred"), "the swap is undone")
        assert rig.fake.state("a") in {"resident", "suspended"}  # b may have been tried again already
    else:
        await until(partial(rig.holds, "b"), "b is granted")
        assert await rig.events("SwapDeferred") == []
        assert rig.fake.state("a") == "suspended"
        assert rig.fake.calls().count("suspend a") == (2 if step == "commit" else 1)  # the first one died before it
