"""What the tests of the agent share: a scripted coordinator, target processes, agents in this process or their own."""

from __future__ import annotations

import asyncio
import json
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from tests.agent.knobs import Fake, make
from tests.support.jobs import DEADLINE_S, shows
from timeslice.agent import procfs
from timeslice.agent.choice import MakeBackend
from timeslice.agent.service import AgentOptions, run_agent
from timeslice.locks import scripts
from timeslice.locks.drivers import AsyncDriver
from timeslice.locks.keys import GroupKeys, Keys
from timeslice.locks.scripts import Request, text
from timeslice.locks.view import GroupView
from timeslice.models import Command, Plan, Target

NODE = "n1"
SLEEPER = "import sys,time; print('up', flush=True); time.sleep(600)"


async def until(check: Callable[[], Any], what: str, deadline_s: float = DEADLINE_S) -> Any:
    """Poll ``check`` (a plain function or a coroutine function) until it is true, and return what it gave."""
    end = time.monotonic() + deadline_s
    while True:
        found = check()
        if isinstance(found, Awaitable):
            found = await found
        if found:
            return found
        if time.monotonic() > end:
            raise AssertionError(f"not within {deadline_s} s: {what}")
        await asyncio.sleep(0.01)


@dataclass
class Rig:
    """One group, one node, a coordinator by hand."""

    url: str
    prefix: str
    folder: Path
    name: str = "g"
    node: str = NODE
    driver: AsyncDriver = field(init=False)
    processes: list[subprocess.Popen[str]] = field(default_factory=list)
    epoch: int = 0
    attempts: int = 0
    serving: int = 0  # agents in this process

    def __post_init__(self) -> None:
        self.driver = AsyncDriver(self.url)
        self.keys = Keys(self.prefix)

    @property
    def group(self) -> GroupKeys:
        return self.keys.group(self.name)

    @property
    def fake(self) -> Fake:
        return Fake(self.folder / "fake" / self.name)

    def options(self, **changes: Any) -> dict[str, Any]:
        groups = changes.pop("groups", (self.name,))
        given = {
            "url": self.url,
            "prefix": self.prefix,
            "node": self.node,
            "groups": groups,
            "state_dir": str(self.folder / "state"),
            "backends": {name: [f"knobs:folder={self.folder / 'fake'}"] for name in groups},
            "ttl_s": 3.0,
        }
        return {**given, **changes}

    @asynccontextmanager
    async def agent(self, make_backend: MakeBackend = make, **changes: Any) -> Any:
        """An agent in this process."""
        given = self.options(**changes)
        options = AgentOptions(**{**given, "state_dir": Path(given["state_dir"])})
        stop, ready = asyncio.Event(), asyncio.Event()
        task = asyncio.create_task(run_agent(options, stop=stop, ready=ready.set, make_backend=make_backend))
        waiting = asyncio.create_task(ready.wait())
        await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if task.done():
            await task
        self.serving += 1
        try:
            yield task
        finally:
            self.serving -= 1
            stop.set()
            await task

    def spawn_agent(self, **changes: Any) -> subprocess.Popen[str]:
        """An agent as a process of its own; returns when it serves."""
        line = [sys.executable, "-m", "tests.agent.runner", json.dumps(self.options(**changes))]
        process = subprocess.Popen(line, stdout=subprocess.PIPE, text=True)
        self.processes.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    def spawn(self, code: str = SLEEPER, *arguments: str, job: str = "") -> subprocess.Popen[str]:
        """A process that takes part in ``job``, or in the jobs a to d; returns when it has printed its first line."""
        line = [sys.executable, "-c", code, *arguments]
        shown = shows(*([job] if job else "abcd"), group=self.name)
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "pass_fds": shown}
        process = subprocess.Popen(line, text=True, **pipes)
        self.processes.append(process)
        assert process.stdout is not None
        process.stdout.readline()
        return process

    def target(self, job: str, pid: int, **changes: Any) -> Target:
        found = procfs.look_at(pid)
        assert found is not None
        values = {
            "job": job,
            "host": self.node,
            "pid": pid,
            "start": found.start,
            "uid": found.uid,
            "pid_namespace": procfs.pid_namespace(),
        }
        return Target(**{**values, **changes})

    async def register(self, target: Target) -> None:
        call = scripts.register(self.group, target.job, target.host, target.pid, target.model_dump_json())
        assert await self.driver.run(call)

    async def job(self, name: str, size: int = 0) -> subprocess.Popen[str]:
        """A registered job with a process of its own, and ``size`` on the fake device."""
        process = self.spawn(job=name)
        await self.register(self.target(name, process.pid))
        if size:
            self.fake.load(name, size)
            self.fake.write(name, {**self.fake.read(name), "pid": process.pid})
        return process

    def request(self, job: str, pid: int = 1, start: int = 1, **more: Any) -> Request:
        return Request(f"{job}-{secrets.token_hex(4)}", job, self.node, pid, start, **more)

    async def acquire(self, job: str, **more: Any) -> Any:
        """Ask once, as a new waiter. Nobody is granted while a node is silent, as that of an agent in this process is
        when a test was busy for long, starting processes: it is waited for."""
        if self.serving:
            await until(self._beats, "the agent beats")
        return await self.driver.run(scripts.acquire(self.group, self.request(job, **more)))

    async def _beats(self) -> bool:
        node = (await self.view()).nodes.get(self.node)
        return node is None or node.alive

    async def holds(self, job: str) -> bool:
        return (await self.view()).state.get("job") == job

    async def yield_(self, job: str) -> None:
        """End the hold of ``job``, as soon as it has one."""
        await until(partial(self.holds, job), f"{job} holds")
        state = (await self.view()).state
        await self.driver.run(scripts.yield_(self.group, state["lease_id"], None))

    async def view(self) -> GroupView:
        return await self.driver.view(self.group)

    async def member(self, job: str) -> Any:
        view = await self.view()
        return next((m for m in view.members if (m.node, m.job) == (self.node, job)), None)

    async def member_state(self, job: str) -> str:
        found = await self.member(job)
        return found.state if found else ""

    async def events(self, kind: str) -> list[dict[str, str]]:
        """The group's events of one kind, oldest first."""
        found: Any = await self.driver.client.xrange(self.group.events)
        events = [{text(k): text(v) for k, v in fields.items()} for _, fields in found]
        return [event for event in events if event["type"] == kind]

    async def begin_swap(self, *out: str, into: str) -> int:
        """The first of ``out`` holds and yields while ``into`` waits: a swap, planned. Its number."""
        await self.acquire(out[0])
        await until(partial(self.holds, out[0]), f"{out[0]} holds")
        await self.acquire(into)
        await self.yield_(out[0])
        return await self.plan(*out, into=into)

    async def plan(self, *out: str, into: str | None) -> int:
        """Plan the swap that has begun, or begins when its node beats again. Its number."""

        async def begun() -> int:
            mine = await self.driver.run(scripts.own(self.group, "c1"))
            assert isinstance(mine, scripts.Mine)
            self.epoch = mine.epoch
            return (await self.view()).swap

        swap: int = await until(begun, "a swap has begun")
        plan = Plan(out=out, into=into, nodes=(self.node,)).model_dump_json()
        await self.driver.run(scripts.plan(self.group, swap, self.epoch, plan, 10_000))
        return swap

    async def step(self, before: str, after: str) -> None:
        view = await self.view()
        await self.driver.run(scripts.step(self.group, view.swap, self.epoch, before, after, 20_000))

    def command(
        self, swap: int, step: Literal["prepare", "commit", "rollback"], *out: str, into: str | None, **changes: Any
    ) -> Command:
        self.attempts += 1
        values = {
            "id": f"{swap}/{self.node}/{step}/{self.attempts}",
            "group": self.name,
            "node": self.node,
            "swap": swap,
            "epoch": self.epoch,
            "step": step,
            "out": out,
            "into": into,
            "suspend_timeout_ms": 10_000,
            "restore_timeout_ms": 10_000,
        }
        return Command(**{**values, **changes})

    async def send(self, command: Command) -> str:
        entry = await self.driver.client.xadd(self.keys.commands(self.node), {"body": command.model_dump_json()})
        return text(entry)

    async def outcome(self, command: Command, deadline_s: float = DEADLINE_S) -> dict[str, str]:
        """What the node's record says once it has answered this command."""

        async def look() -> dict[str, str] | None:
            names = ("command", "step", "kind", "error")
            at = [f"{self.node}/@/{name}" for name in names]
            values = [text(v or "") for v in await self.driver.client.hmget(self.group.members, at)]
            record = dict(zip(names, values, strict=True))
            return record if record["command"] == command.id and not record["step"].startswith("begun") else None

        found: dict[str, str] = await until(look, f"answer to {command.id}", deadline_s)
        return found

    async def order(self, command: Command) -> dict[str, str]:
        await self.send(command)
        return await self.outcome(command)

    async def idle(self) -> None:
        """Wait until every order was taken off the stream."""
        key = self.keys.commands(self.node)

        async def empty() -> bool:
            return int(await self.driver.client.xlen(key)) == 0

        await until(empty, "the command stream is empty")

    async def swap(self, *out: str, into: str) -> dict[str, str]:
        """A whole swap that is expected to go well: prepare, commit, promote."""
        swap = await self.begin_swap(*out, into=into)
        prepared = await self.order(self.command(swap, "prepare", *out, into=into))
        assert prepared["step"] == "prepared", prepared
        await self.step("prepare", "commit")
        done = await self.order(self.command(swap, "commit", *out, into=into))
        assert done["step"] == "done", done
        promoted = await self.promote(swap)
        assert isinstance(promoted, scripts.Promoted), promoted
        return done

    async def promote(self, swap: int, how: str = "restored") -> Any:
        call: scripts.Call[Any] = scripts.promote(self.group, swap, self.epoch, how)
        return await self.driver.run(call)

    async def settle(self, swap: int, reason: str = "test") -> None:
        assert await self.driver.run(scripts.settle(self.group, swap, self.epoch, reason, 1000)) is None

    async def close(self) -> None:
        for process in self.processes:
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGKILL)
            process.wait()
            for pipe in filter(None, (process.stdin, process.stdout, process.stderr)):
                pipe.close()
        await self.driver.close()
