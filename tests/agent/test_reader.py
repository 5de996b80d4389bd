"""How orders come off the node's stream."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from tests.agent.rig import Rig, until
from timeslice.agent.reader import CommandReader
from timeslice.locks.scripts import text


class Collector:
    """Takes orders like an executor, and never finishes one."""

    def __init__(self) -> None:
        self.orders: list[str] = []

    def submit(self, command: Any, _done: Any) -> None:
        self.orders.append(command.id)


async def test_an_order_in_hand_is_not_handed_out_again(rig: Rig) -> None:
    """After a fault the reader reads again what is pending; what an executor has already is not given to it twice."""
    taken = Collector()
    reader = CommandReader(rig.driver, rig.keys, rig.node, {rig.name: taken})  # type: ignore[dict-item]
    sent = [rig.command(number, "prepare", "a", into="b", epoch=1) for number in (7, 8)]
    for command in sent:
        await rig.send(command)
        reading = asyncio.create_task(reader.run())
        await until(partial(taken.orders.__contains__, command.id), "it is handed out")
        reading.cancel()
        await asyncio.wait({reading})
    assert taken.orders == [command.id for command in sent]


async def test_an_order_that_is_given_again_while_it_is_in_hand_is_taken_off(rig: Rig) -> None:
    """The coordinator repeats an order that was not answered yet: the repeat leaves the stream at once, and the
    executor has the order once. The one in hand stays in the stream, for the next agent."""
    taken = Collector()
    reader = CommandReader(rig.driver, rig.keys, rig.node, {rig.name: taken})  # type: ignore[dict-item]
    command = rig.command(7, "prepare", "a", into="b", epoch=1)
    first = await rig.send(command)
    for _ in range(2):
        await rig.send(command)
    reading = asyncio.create_task(reader.run())

    async def left() -> bool:
        entries: Any = await rig.driver.client.xrange(rig.keys.commands(rig.node))
        return [text(entry) for entry, _ in entries] == [first]

    await until(left, "only the one in hand is left")
    reading.cancel()
    await asyncio.wait({reading})
    assert taken.orders == [command.id]
