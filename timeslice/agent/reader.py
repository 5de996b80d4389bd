"""Reads the node's orders and hands each to the executor of its group. It never carries one out itself."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from typing import Any

from timeslice.agent.executor import Executor
from timeslice.errors import RedisUnreachableError, ServerUnsuitableError
from timeslice.locks.commands import BLOCK_S
from timeslice.locks.drivers import AsyncDriver
from timeslice.locks.keys import Keys
from timeslice.locks.scripts import text
from timeslice.models import Command, read_wire

log = logging.getLogger("timeslice.agent")

CONSUMER_GROUP = "agent"
BATCH = 32
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0


class CommandReader:
    """The consumer's name is the node's: what a former agent had read and not answered is read again first."""

    def __init__(self, driver: AsyncDriver, keys: Keys, node: str, executors: Mapping[str, Executor]) -> None:
        self._driver, self._node, self._executors = driver, node, executors
        self._stream = keys.commands(node)
        self._in_hand: dict[str, str] = {}  # entry -> id of its order

    async def run(self) -> None:
        """Read for ever. After any fault what is pending is read again: a reply may have been lost."""
        pause = _FIRST_PAUSE_S
        while True:
            try:
                await self._create_group()
                async for _ in self._batches():
                    pause = _FIRST_PAUSE_S
            except (RedisUnreachableError, ServerUnsuitableError) as error:
                if not _passes(error):
                    log.error("orders of node %s can't be read, trying on: %s", self._node, error)
            await asyncio.sleep(pause)
            pause = min(pause * 2, _LONGEST_PAUSE_S)

    async def _create_group(self) -> None:
        try:
            # From 0, never $: what was ordered before the group was there counts.
            await self._block("XGROUP CREATE", self._stream, CONSUMER_GROUP, "0", "MKSTREAM")
        except ServerUnsuitableError as error:
            if "BUSYGROUP" not in str(error):
                raise

    async def _block(self, *command: str | int) -> Any:
        """One command, once: pauses and what is said of them are ours."""
        return await self._driver.retry(lambda: self._driver.block(self._stream, command), deadline_s=0)

    async def _batches(self) -> AsyncIterator[None]:
        """Hands out what is pending, then what is new; yields after each answer of the server."""
        after = "0"
        while True:
            block: list[str | int] = ["BLOCK", int(BLOCK_S * 1000)] if after == ">" else []
            read = ("XREADGROUP", "GROUP", CONSUMER_GROUP, self._node, "COUNT", BATCH, *block)
            reply = await self._block(*read, "STREAMS", self._stream, after)
            entries = reply[0][1] if reply else []
            for entry_id, fields in entries:
                await self._hand_out(text(entry_id), fields)
            if after != ">":
                after = text(entries[-1][0]) if entries else ">"
            yield

    async def _hand_out(self, entry_id: str, fields: Mapping[bytes | str, bytes | str]) -> None:
        if entry_id in self._in_hand:
            return
        if not fields:
            await self._finish(entry_id)  # trimmed while it was pending
            return
        told = {text(k): text(v) for k, v in fields.items()}
        if (group := told.get("look", "")) in self._executors:  # no order: an operator wants to know what is here
            self._executors[group].look_again()
            await self._finish(entry_id)
            return
        body = told.get("body", "")
        try:
            command = read_wire(Command, body)
        except ValueError as error:
            log.error("an order to node %s is invalid and dropped: %s", self._node, error)
            await self._finish(entry_id)
            return
        executor = self._executors.get(command.group)
        if executor is None or command.node != self._node:
            log.error("order %s is not for this agent (node %s) and is dropped", command.id, self._node)
            await self._finish(entry_id)
            return
        if command.id in self._in_hand.values():  # given again, because it was not answered yet
            await self._finish(entry_id)
            return
        self._in_hand[entry_id] = command.id

        async def done() -> None:
            try:
                await self._finish(entry_id)
            finally:
                self._in_hand.pop(entry_id, None)  # if that failed it comes again, and is answered from the journal

        executor.submit(command, done)

    async def _finish(self, entry_id: str) -> None:
        await self._driver.pipe([("XACK", self._stream, CONSUMER_GROUP, entry_id), ("XDEL", self._stream, entry_id)])


def _passes(error: Exception) -> bool:
    """Whether a fault is part of the server's life: an outage, or a stream that was deleted under us."""
    return isinstance(error, RedisUnreachableError) or "NOGROUP" in str(error)
