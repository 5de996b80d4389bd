"""Puts an agent together and runs it until it is told to stop."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import resource
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

from timeslice.agent.accelerators import assign, default_backends
from timeslice.agent.channels import StreamChannel
from timeslice.agent.choice import BackendSet, MakeBackend
from timeslice.agent.discovery import Finder, Scanner
from timeslice.agent.executor import Executor
from timeslice.agent.folder import claim_folder, instance_of
from timeslice.agent.group import Scope
from timeslice.agent.heartbeat import Heartbeat
from timeslice.agent.idle import AFTER_S
from timeslice.agent.memory import HostMemory
from timeslice.agent.node import NodeRecord
from timeslice.agent.reader import CommandReader
from timeslice.arena.device import Device
from timeslice.backends.base import Context
from timeslice.backends.registry import get_backend
from timeslice.errors import TimeSliceError, UsageError
from timeslice.locks import scripts
from timeslice.locks.drivers import AsyncDriver
from timeslice.locks.keys import Keys
from timeslice.locks.outages import unless_stopped
from timeslice.locks.scripts import CALL_DEADLINE_S
from timeslice.locks.suitable import verify_async
from timeslice.names import check_name
from timeslice.settings import runtime_dir
from timeslice.web import EVERYWHERE, Web

log = logging.getLogger("timeslice.agent")

FILES = 1 << 16  # descriptors; often only 1024 may be had unless one asks
_LEAVE_TRIES = 3
_GOOD_BYE_S = 1.5  # for each word of an agent that ends: a server that is gone keeps nobody
STOP_GRACE_S = 30.0  # an order in progress may end; a checkpoint that is cut off loses the process


@dataclass(frozen=True, kw_only=True)
class AgentOptions:
    """What an agent is run with. ``emulate``: group -> bytes of its emulated device. ``backends``: group -> ordered
    list of ``name`` or ``name:key=value,...``. ``devices``: group -> its real devices, as `accelerators.assign` takes
    them. ``leave``: take the node out of its groups when stopped, which a stopped agent otherwise does not do."""

    url: str
    node: str
    groups: tuple[str, ...]
    state_dir: Path
    prefix: str = "ts"
    emulate: Mapping[str, int] = field(default_factory=dict)
    backends: Mapping[str, Sequence[str]] = field(default_factory=dict)
    devices: Mapping[str, Sequence[str]] = field(default_factory=dict)
    host_budget_bytes: int | None = None
    ttl_s: float = 15.0  # a node that is silent for this long counts as unreachable
    http_host: str = EVERYWHERE
    http_port: int | None = None  # readiness of jobs, metrics, health
    leave: bool = False
    idle_after_s: float = AFTER_S  # a holder that was on no device for so long is complained of; 0: never


async def run_agent(
    options: AgentOptions,
    *,
    stop: asyncio.Event,
    ready: Callable[[], None] | None = None,
    make_backend: MakeBackend = get_backend,
) -> None:
    """Serve until ``stop`` is set; ``ready`` is called when every group was joined and orders are read.

    A server that is away is waited for, also at the start. Raises UsageError, RefusedError (another agent has this node
    or folder, or somebody the port), ServerUnsuitableError, GroupModeError, BackendError (it can't run here).
    """
    agent = _Agent(options, make_backend)
    async with AsyncExitStack() as stack:
        if not await unless_stopped(agent.start(stack), stop):
            await agent.depart()
            return
        tasks = agent.tasks()
        stopping = asyncio.create_task(stop.wait(), name="stop")
        if ready:
            ready()
        try:
            await asyncio.wait({*tasks, stopping}, return_when=asyncio.FIRST_COMPLETED)
            await agent.drain()
        finally:
            for task in (*tasks, stopping):
                task.cancel()
            results = await asyncio.gather(*tasks, stopping, return_exceptions=True)
        for result in results:
            if isinstance(result, Exception):
                raise result
        await agent.depart()


class _Agent:
    def __init__(self, options: AgentOptions, make_backend: MakeBackend) -> None:
        check_name("node", options.node)
        if not options.groups:
            raise UsageError("an agent serves at least one group; give it --group NAME", node=options.node)
        named = options.emulate.keys() | options.backends.keys() | options.devices.keys()
        if unknown := named - set(options.groups):
            raise UsageError(f"groups {', '.join(sorted(unknown))} are not served; add --group for each")
        self._options, self._make_backend = options, make_backend
        self._keys = Keys(options.prefix)
        self._driver = AsyncDriver(options.url)
        self._host = HostMemory(options.host_budget_bytes)
        self._scanner = Scanner()
        self._scopes: dict[str, Scope] = {}
        self._executors: dict[str, Executor] = {}
        self._hearts: list[Heartbeat] = []
        self._record: NodeRecord | None = None  # once the node id is ours

    async def start(self, stack: AsyncExitStack) -> None:
        """Everything up to the point where orders can be taken: locks, devices, probes, the first heartbeats."""
        options = self._options
        _allow_files()
        self._assigned = await assign(options.devices, options.groups, options.emulate)
        stack.push_async_callback(self._driver.close)
        stack.callback(os.close, claim_folder(options.state_dir))
        self._driver.patience_s = math.inf
        await verify_async(self._driver)
        if options.http_port:
            web = await Web(self._driver, self._keys).start(options.http_host, options.http_port)
            stack.push_async_callback(web.close)
        instance = instance_of(options.state_dir)
        record = NodeRecord(self._driver, self._keys, options.node, instance, options.ttl_s)
        await record.claim()
        self._record = record
        for name in dict.fromkeys(options.groups):
            scope = await self._equip(name)
            scope.faults = await scope.backends.health()
            stack.callback(scope.registry.close)
            self._scopes[name] = scope
            self._executors[name] = Executor(scope)
            self._hearts.append(Heartbeat(scope, self._executors[name], options.ttl_s, options.idle_after_s))
        self._facts = {
            "groups": json.dumps(list(self._scopes)),
            "capabilities": json.dumps({name: _capabilities(scope) for name, scope in self._scopes.items()}),
            "emulated": json.dumps(dict(options.emulate)),
            "accelerators": json.dumps(self._assigned),
        }
        await record.beat(self._scopes, self._host, self._facts)  # the indexes come before first use
        self._driver.patience_s = CALL_DEADLINE_S
        for heart in self._hearts:
            await heart.join()

    def tasks(self) -> list[asyncio.Task[None]]:
        """What runs until the agent stops; each has a name."""
        assert self._record
        reader = CommandReader(self._driver, self._keys, self._options.node, self._executors)
        self._reader = asyncio.create_task(reader.run(), name="orders")
        return [
            self._reader,
            asyncio.create_task(self._record.run(self._scopes, self._host, self._facts), name="node record"),
            *(asyncio.create_task(e.run(), name=f"executor {name}") for name, e in self._executors.items()),
            *(asyncio.create_task(heart.run(), name="heartbeat") for heart in self._hearts),
        ]

    async def drain(self) -> None:
        """Take no more orders, and let what is being moved arrive. Nobody else has the turn from then on."""
        self._reader.cancel()
        for executor in self._executors.values():
            executor.leaving = True
        waits = [asyncio.create_task(executor.turn.acquire()) for executor in self._executors.values()]
        _, late = await asyncio.wait(waits, timeout=STOP_GRACE_S)
        for wait in late:
            wait.cancel()
        if late:
            log.error("%d operations did not end within %g s; their state will be probed at the next start",
                      len(late), STOP_GRACE_S)  # fmt: skip

    async def depart(self) -> None:
        """Let the node id go, and with ``leave`` the groups, as far as the start came."""
        self._driver.patience_s = _GOOD_BYE_S
        left = [self._options.leave, *(heart.joined for heart in self._hearts)]
        left.append(len(self._hearts) == len(set(self._options.groups)))
        if self._options.leave:
            joined = [each for each in zip(self._hearts, self._scopes.values(), strict=True) if each[0].joined]
            left += await asyncio.gather(*(self._leave(heart, scope) for heart, scope in joined))
        try:
            if self._record:
                await self._record.release(left=all(left))
        except TimeSliceError as error:
            log.warning("node %s: could not let its id go: %s", self._options.node, error)

    async def _leave(self, heart: Heartbeat, scope: Scope) -> bool:
        """Whether the group was left. One that can't be keeps the node in no other."""
        left, absent = False, None
        try:
            for _ in range(_LEAVE_TRIES):
                before, absent = absent, await heart.absent()
                call = scripts.leave(scope.keys, scope.node, absent, floor=scope.floor)
                left = await self._driver.run(call, deadline_s=2.0)
                if left or absent == before:  # else somebody may have been let in since the look
                    break
        except (TimeSliceError, OSError) as error:  # such as no descriptor left to look into /proc
            log.warning("group %s: node %s could not take its leave: %s", scope.name, scope.node, error)
            return False
        if not left:
            log.warning(
                "group %s: node %s has state or processes of jobs and stays, unreachable: nobody is let in until its "
                "agent is back, or for a machine that is gone for good: timeslice node forget %s",
                *(scope.name, scope.node, scope.node),
            )
        return left

    async def _equip(self, name: str) -> Scope:
        options = self._options
        folder = options.state_dir / "groups" / name
        scope = Scope(self._keys.group(name), options.node, self._driver, folder, self._host)
        devices = []
        if capacity := options.emulate.get(name):
            path = runtime_dir() / "devices" / name
            await asyncio.to_thread(Device.create, path, capacity)
            devices.append(path)
        context = Context(
            group=name,
            node=options.node,
            devices=tuple(devices),
            accelerators=self._assigned.get(name, ()),
            channel=StreamChannel(self._driver, self._keys, scope.registry.exit_event),
        )
        specs = options.backends.get(name, ())
        if context.accelerators and not specs:
            specs = await default_backends(context, self._make_backend)
        scope.equip(BackendSet.make(context, specs, self._make_backend))
        scope.finder = Finder(context, options.prefix, self._scanner, scope.registry, scope.backends)
        scope.presences.doubts.finder = scope.finder
        log.info(
            "group %s: devices: %s; state is moved by: %s", name, _listed(context), ", ".join(scope.backends.names())
        )
        scope.registry.load()
        return scope


def _allow_files() -> None:
    """A descriptor for each process that may be watched, as far as this user may have them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES if hard == resource.RLIM_INFINITY else min(FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _listed(context: Context) -> str:
    real, emulated = context.accelerators, (f"{path} (emulated)" for path in context.devices)
    return ", ".join((*real, *emulated)) or "none known"


def _capabilities(scope: Scope) -> dict[str, object]:
    found = {name: scope.backends[name].capabilities() for name in scope.backends.names()}
    return {
        name: {"modes": sorted(each.modes), "forced": each.forced, "freed_share": each.freed_share}
        for name, each in found.items()
    }
