"""A group on several nodes: a real coordinator, a real agent each (backend ``knobs``), jobs with a process each."""

from __future__ import annotations

import asyncio
import itertools
import signal
import subprocess
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.agent.rig import Rig, until
from timeslice.agent import procfs
from timeslice.coordinator.service import CoordinatorOptions, run_coordinator
from timeslice.locks import flows, scripts
from timeslice.locks.flows import Grant
from timeslice.locks.scripts import Request
from timeslice.locks.view import GroupView

DEADLINE_S = 40.0
TTL_S = 1.5  # after which a node counts as unreachable


@dataclass
class Turn:
    """A request and what it got."""

    waiter: str
    task: asyncio.Task[Grant]


class World:
    """``rigs`` are the nodes. A job has a process on each node unless told otherwise."""

    def __init__(self, url: str, prefix: str, folder: Path) -> None:
        self.url, self.prefix, self.folder = url, prefix, folder
        self.rigs: dict[str, Rig] = {}
        self.agents: dict[str, subprocess.Popen[str]] = {}
        self.stack = AsyncExitStack()
        self._turns: list[asyncio.Task[Grant]] = []
        self._processes: dict[str, tuple[str, int, int]] = {}
        self._held: dict[str, tuple[str, int]] = {}
        self._numbers = itertools.count()

    def rig(self, node: str) -> Rig:
        """The node's side of things, with a state folder and a fake device of its own."""
        if node not in self.rigs:
            made = Rig(self.url, self.prefix, self.folder / node, node=node)
            made.folder.mkdir()
            self.rigs[node] = made
            self.stack.push_async_callback(made.close)
        return self.rigs[node]

    @property
    def first(self) -> Rig:
        return next(iter(self.rigs.values()))

    async def agent(self, node: str, **changes: Any) -> None:
        """An agent in this process."""
        await self.stack.enter_async_context(self.rig(node).agent(**{"ttl_s": TTL_S, **changes}))

    async def spawn_agent(self, node: str, **changes: Any) -> subprocess.Popen[str]:
        """An agent as a process of its own."""
        rig = self.rig(node)
        self.agents[node] = await asyncio.to_thread(rig.spawn_agent, **{"ttl_s": TTL_S, **changes})
        return self.agents[node]

    async def start(self, *nodes: str, **config: int) -> None:
        """Agents in this process on these nodes, and a coordinator."""
        for node in nodes:
            await self.agent(node)
        await self.coordinate(**config)

    async def coordinate(self, **config: int) -> None:
        settings = {"prepare_timeout_ms": 3000, "suspend_timeout_ms": 3000, "restore_timeout_ms": 3000, **config}
        rig = self.first
        await rig.driver.run(scripts.configure(rig.group, {name: str(value) for name, value in settings.items()}))
        stop, ready = asyncio.Event(), asyncio.Event()
        options = CoordinatorOptions(url=self.url, prefix=self.prefix, lease_ms=3000)
        task = asyncio.create_task(run_coordinator(options, ready=ready.set, stop=stop))
        await ready.wait()

        async def end() -> None:
            stop.set()
            await task

        self.stack.push_async_callback(end)

    async def job(self, name: str, *nodes: str) -> None:
        """Register a process of the job on each of its nodes, with nothing on the device."""
        for node in nodes or tuple(self.rigs):
            process = await self.rigs[node].job(name)
            found = procfs.look_at(process.pid)
            assert found
            self._processes.setdefault(name, (node, process.pid, found.start))

    def ask(self, job: str, timeout_s: float = DEADLINE_S) -> Turn:
        """A waiter of the job; it is in the queue, or more, when somebody else gets a word in."""
        host, pid, start = self._processes[job]
        waiter = f"{job}-{next(self._numbers)}"
        request = Request(waiter, job, host, pid, start)
        flow = flows.acquire(self.first.group, request, timeout_s=timeout_s)
        task = asyncio.create_task(self.first.driver.drive(flow), name=f"client {waiter}")
        self._turns.append(task)
        return Turn(waiter, task)

    async def queued(self, turn: Turn) -> None:
        await self.until(lambda view: turn.waiter in {entry.waiter for entry in view.queue}, f"{turn.waiter} is queued")

    async def inside(self, turn: Turn, deadline_s: float = DEADLINE_S) -> Grant:
        """Wait until it is in."""
        grant = await asyncio.wait_for(asyncio.shield(turn.task), deadline_s)
        self._held[turn.waiter.rpartition("-")[0]] = (turn.waiter, grant.token)
        return grant

    async def enter(self, job: str) -> Grant:
        return await self.inside(self.ask(job))

    async def leave(self, job: str) -> None:
        waiter, token = self._held.pop(job)
        reply = await self.first.driver.run(scripts.yield_(self.first.group, waiter, token))
        assert isinstance(reply, scripts.Yielded), reply

    async def load(self, job: str, *nodes: str, size: int = 600) -> None:
        """Its first turn: it puts state on the device of each of its nodes and yields."""
        await self.job(job, *nodes)
        await self.enter(job)
        for node in nodes or tuple(self.rigs):
            self.rigs[node].fake.load(job, size)
        await self.leave(job)

    async def view(self) -> GroupView:
        return await self.first.view()

    async def until(self, check: Any, what: str, deadline_s: float = DEADLINE_S) -> GroupView:
        """The first view of which ``check`` is true."""

        async def look() -> GroupView | None:
            view = await self.view()
            return view if check(view) else None

        found: GroupView = await until(look, what, deadline_s)
        return found

    def states(self, job: str) -> dict[str, tuple[str, bool]]:
        """node -> where the job's state really is, and whether it is locked."""
        return {
            node: (rig.fake.state(job), rig.fake.locked(job)) for node, rig in self.rigs.items() if rig.fake.read(job)
        }

    async def close(self) -> None:
        """End it all; what hangs is let go, for an agent waits for it."""
        for rig in self.rigs.values():
            rig.fake.folder.mkdir(parents=True, exist_ok=True)
            (rig.fake.folder / "release").touch()
        for process in self.agents.values():
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
        for task in self._turns:
            task.cancel()
        await asyncio.gather(*self._turns, return_exceptions=True)
        await self.stack.aclose()
