"""One agent per node id: an instance lease in Redis, and the node's own record there."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
from collections.abc import Mapping
from typing import Any, TypeVar

import timeslice
from timeslice.agent.calling import Deadline
from timeslice.agent.group import Scope
from timeslice.agent.memory import HostMemory
from timeslice.agent.presence import MEASURE_S
from timeslice.errors import BackendError, RedisUnreachableError, RefusedError, TimeSliceError
from timeslice.locks import scripts
from timeslice.locks.drivers import AsyncDriver
from timeslice.locks.keys import Keys

log = logging.getLogger("timeslice.agent")

T = TypeVar("T")

KEEP_S = 24 * 3600  # how long the record of a silent node can still be read
_POLL_S = 0.5


class NodeRecord:
    """The node's hash: heartbeat, instance, capabilities, memory. Its instance fields are the instance lease."""

    def __init__(self, driver: AsyncDriver, keys: Keys, node: str, instance: str, ttl_s: float) -> None:
        self._driver, self._keys, self._node, self._instance = driver, keys, node, instance
        self._ttl_ms = int(ttl_s * 1000)
        self._key, self._commands = keys.node_state(node), keys.commands(node)
        self._beating: asyncio.Task[None] | None = None

    async def claim(self) -> None:
        """Take the node id. Another instance that is silent is waited for until its lease is over; one that beats
        meanwhile is left alone: RefusedError says who it is."""
        first: str | None = None
        while (other := await self._take({})) is not None:
            if first is not None and other.get("heartbeat_at_ms", "") != first:
                raise self._taken(other)
            if first is None:
                log.warning(
                    "node %s: process %s on host %s had this node a moment ago; waiting until it beats or its lease is "
                    "over",
                    *(self._node, other.get("pid"), other.get("host")),
                )
            first = other.get("heartbeat_at_ms", "")
            await asyncio.sleep(_POLL_S)

    async def run(self, scopes: Mapping[str, Scope], host: HostMemory, facts: Mapping[str, str]) -> None:
        """Beat for ever. RefusedError when another instance took over while Redis was out of our reach."""
        while True:
            # A beat that is cut off might still reach the server after the node id was let go.
            self._beating = asyncio.create_task(self.beat(scopes, host, facts))
            try:
                await asyncio.shield(self._beating)
            except RefusedError:
                raise
            except RedisUnreachableError as error:  # the driver says so
                log.debug("node %s: its record could not be written, trying on: %s", self._node, error)
            except (TimeSliceError, OSError) as error:  # such as no descriptor left to read the kernel's figures
                log.warning("node %s: its record could not be written, trying on: %s", self._node, error)
            await asyncio.sleep(self._ttl_ms / 3000)

    async def beat(self, scopes: Mapping[str, Scope], host: HostMemory, facts: Mapping[str, str]) -> None:
        """Write the record and repeat the indexes."""
        await self._driver.pipe([("SADD", self._keys.nodes, self._node), ("SADD", self._keys.groups, *scopes)])
        overdue = {name: scope.caller.overdue for name, scope in scopes.items() if scope.caller.overdue}
        memory = {
            **host.figures(),
            "devices": {name: await _devices(scope) for name, scope in scopes.items()},
        }
        complaints = {name: scope.complaints() for name, scope in scopes.items()}
        news = {"memory": memory, "overdue": overdue, "complaints": complaints}
        other = await self._take({**facts, **{name: json.dumps(value) for name, value in news.items()}})
        if other is not None:
            raise self._taken(other)

    async def release(self, *, left: bool = False) -> None:
        """Let the node id go, so that another agent may have it at once. ``left``: the node serves no group any more,
        so nothing of it is kept."""
        if self._beating:
            await asyncio.wait({self._beating})

        if await self._driver.run(scripts.leave_node(self._keys, self._node, self._instance, left=left)) and left:
            await self._driver.pipe([("SREM", self._keys.nodes, self._node)])

    async def _take(self, fields: Mapping[str, str]) -> dict[str, str] | None:
        """Take or renew the instance lease and write ``fields``; else the record of who has it."""
        facts = {"host": socket.gethostname(), "pid": str(os.getpid()), "version": timeslice.__version__}
        return await self._driver.run(
            scripts.take_node(self._keys, self._node, self._instance, self._ttl_ms, KEEP_S, {**facts, **fields})
        )

    def _taken(self, other: Mapping[str, str]) -> RefusedError:
        return RefusedError(
            f"node {self._node} is served by another agent: process {other.get('pid')} on host {other.get('host')}, "
            f"instance {other.get('instance')}. Stop that one, or give this one another --node.",
            node=self._node,
        )


async def _devices(scope: Scope) -> list[dict[str, Any]]:
    try:
        devices = await scope.caller.look("measuring devices", scope.backends.measure, Deadline(MEASURE_S))
    except BackendError as error:
        log.warning("group %s: its devices can't be measured: %s", scope.name, error)
        devices = ()
    return [
        {
            "device": device.device,
            "total_bytes": device.total_bytes,
            "free_bytes": device.free_bytes,
            "holders": [{"pid": pid, "bytes": size} for pid, size in device.holders],
        }
        for device in devices
    ]
