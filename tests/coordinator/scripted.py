"""A group with scripted agents: they speak the protocol as real agents do, and misbehave when told to."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, Literal

from timeslice.coordinator.service import CoordinatorOptions, run_coordinator
from timeslice.errors import StaleCommandError
from timeslice.locks import flows, scripts
from timeslice.locks.drivers import AsyncDriver
from timeslice.locks.keys import Keys
from timeslice.locks.view import GroupView
from timeslice.models import Command

DEADLINE_S = 40.0
OUTCOME: dict[str, Literal["prepared", "done", "rolled back"]] = {
    "prepare": "prepared",
    "commit": "done",
    "rollback": "rolled back",
}


async def eventually(check: Callable[[], Awaitable[Any]], what: str) -> Any:
    """The first true answer of ``check``; fails the test when there is none in time."""
    until = time.monotonic() + DEADLINE_S
    while time.monotonic() < until:
        if found := await check():
            return found
        await asyncio.sleep(0.01)
    raise AssertionError(f"never happened: {what}")


class ScriptedAgent:
    """The agent of one node. ``states`` is what is really on its device, by job."""

    def __init__(self, world: World, node: str) -> None:
        self.world, self.node = world, node
        self.states: dict[str, str] = {}
        self.orders: list[Command] = []  # accepted
        self._answered: set[str] = set()  # ids: one that is given again is not carried out again
        self.refused: list[StaleCommandError] = []
        self.faults: dict[str, str] = {}  # step -> error; once
        self.gates: dict[str, asyncio.Event] = {}  # step -> not done before this
        self.deaf: set[str] = set()  # steps whose orders are not even looked at
        self.die_on: set[str] = set()  # steps at which it dies between accepted and ack; once
        self.repeats = 1  # each ack is sent so often
        self._before: dict[int, dict[str, str]] = {}
        self._after = "0-0"
        self._task: asyncio.Task[None] | None = None

    async def join(self, ttl_ms: int = 60_000) -> ScriptedAgent:
        pulse = await self.world.run(scripts.heartbeat(self.world.group, self.node, ttl_ms))
        await self.world.run(scripts.report(self.world.group, self.node, pulse.counter, []))  # its devices are empty
        self.start()
        return self

    def start(self) -> None:
        self._task = asyncio.create_task(self._serve(), name=f"agent-{self.node}")

    @property
    def dead(self) -> bool:
        return self._task is None or self._task.done()

    async def stop(self) -> None:
        if self._task:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _serve(self) -> None:
        stream = self.world.keys.commands(self.node)
        while True:
            for entry, fields in await self.world.driver.wait(flows.Wait(stream, self._after, 5000)):
                command = Command.model_validate_json(fields["body"])
                if command.step not in self.deaf and not await self._obey(command):
                    return
                self._after = entry  # one that it died over is read again

    async def _obey(self, command: Command) -> bool:
        if command.id in self._answered:
            return True
        world, group, step = self.world, self.world.group, command.step
        call = scripts.accepted(group, self.node, command.swap, command.epoch, step, command.id)
        try:
            await world.run(call)
        except StaleCommandError as error:
            self.refused.append(error)
            return True
        self.orders.append(command)
        if step in self.die_on:
            self.die_on.discard(step)
            return False
        if gate := self.gates.get(step):
            await gate.wait()
        fault = self.faults.pop(step, "")
        if step == "prepare":
            self._before.setdefault(command.swap, dict(self.states))
        elif step == "commit" and not fault:
            for job in command.out:
                if self.states.get(job) == "resident":
                    self.states[job] = "suspended"
            if command.into and self.states.get(command.into) == "suspended":
                self.states[command.into] = "resident"
        elif step == "rollback":
            self.states |= self._before.get(command.swap, {})
        jobs = [*command.out, *([command.into] if command.into else [])]
        seen = [scripts.Observed(job, self.states.get(job, "absent"), 10) for job in jobs]
        outcome: Any = "failed" if fault else OUTCOME[step]
        kind = "transient" if fault else ""
        for _ in range(self.repeats):
            await world.run(
                scripts.ack(group, self.node, command.swap, command.id, seen, outcome=outcome, kind=kind, error=fault)
            )
        self._answered.add(command.id)
        return True

    async def report(self, **states: str) -> None:
        """Tell of a change that nobody ordered."""
        self.states |= states
        seen = [scripts.Observed(job, state, 10) for job, state in states.items()]
        view = await self.world.view()
        await self.world.run(scripts.report(self.world.group, self.node, view.counter, seen))


class World:
    """One group on a server, its scripted agents, its clients, and coordinators in this process."""

    def __init__(self, url: str, prefix: str, group: str = "trainers") -> None:
        self.url, self.keys = url, Keys(prefix)
        self.driver = AsyncDriver(url)
        self.group = self.keys.group(group)
        self.agents: dict[str, ScriptedAgent] = {}
        self.run = self.driver.run
        self._tasks: list[tuple[asyncio.Task[Any], asyncio.Event | None]] = []

    async def open(self, *nodes: str, **config: int) -> World:
        """Make the group, served by agents of these nodes."""
        await self.driver.client.sadd(self.keys.groups, self.group.name)
        settings = {name: str(value) for name, value in config.items()}
        await self.run(scripts.configure(self.group, settings, mode="served"))
        for node in nodes:
            self.agents[node] = await ScriptedAgent(self, node).join()
        return self

    async def coordinate(self, name: str = "c1", lease_ms: int = 10_000) -> asyncio.Event:
        """Start a coordinator and return when it has looked for groups once. Setting the event stops it."""
        stop, ready = asyncio.Event(), asyncio.Event()
        options = CoordinatorOptions(url=self.url, prefix=self.keys.prefix, name=name, lease_ms=lease_ms)
        task = asyncio.create_task(run_coordinator(options, ready=ready.set, stop=stop), name=name)
        self._tasks.append((task, stop))
        waiting = asyncio.create_task(ready.wait())
        await asyncio.wait([waiting, task], return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if task.done():
            task.result()
        return stop

    def request(self, job: str, waiter: str) -> scripts.Request:
        return scripts.Request(waiter, job, "n1", 1, 1)

    def ask(self, job: str, waiter: str | None = None, timeout_s: float = DEADLINE_S) -> asyncio.Task[flows.Grant]:
        """A client that waits for the group; its waiter id is the job's name unless given."""
        request = self.request(job, waiter or job)
        flow = flows.acquire(self.group, request, timeout_s=timeout_s)
        task = asyncio.create_task(self.driver.drive(flow), name=f"client-{request.waiter}")
        self._tasks.append((task, None))
        return task

    async def load(self, job: str, *, yields: bool = True) -> flows.Grant:
        """Let a job in, put its state on all devices, and out again: what stays is a resident job."""
        grant = await self.ask(job)
        for agent in self.agents.values():
            agent.states[job] = "resident"
            await agent.report(**{job: "resident"})
        if yields:
            await self.give_up(job, grant)
        return grant

    async def give_up(self, waiter: str, grant: flows.Grant) -> None:
        await self.run(scripts.yield_(self.group, waiter, grant.token))

    async def view(self) -> GroupView:
        return await self.driver.view(self.group)

    async def until(self, check: Callable[[GroupView], Any], what: str) -> GroupView:
        """The first view of which ``check`` is true."""

        async def look() -> GroupView | None:
            view = await self.view()
            return view if check(view) else None

        found: GroupView = await eventually(look, what)
        return found

    async def events(self, kind: str) -> list[dict[str, str]]:
        entries = await self.driver.client.xrange(self.group.events)
        found = [{scripts.text(k): scripts.text(v) for k, v in (fields or {}).items()} for _, fields in entries or []]
        return [fields for fields in found if fields["type"] == kind]

    async def close(self) -> None:
        for task, stop in reversed(self._tasks):
            if stop and not task.done():
                stop.set()
            else:
                task.cancel()
            await asyncio.wait([task])
        for agent in self.agents.values():
            await agent.stop()
        await self.driver.close()
