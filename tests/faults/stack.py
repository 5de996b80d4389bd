"""The whole system in one test: a server, a proxy for each party, coordinator, agents, and jobs as processes.

Each group is brought into a situation of its own, so that one fault meets all of them at once.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from tests.agent.knobs import Fake, make
from tests.faults.jobs import Hold, JobProcess
from tests.support.jobs import wait_until
from timeslice.agent.service import AgentOptions, run_agent
from timeslice.coordinator.service import CoordinatorOptions, run_coordinator
from timeslice.embedded import EmbeddedServer
from timeslice.locks.drivers import SyncDriver
from timeslice.locks.keys import Keys
from timeslice.locks.view import GroupView
from timeslice.torture.proxy import Proxy

START_S = 30.0
# More than twice as long as the longest quiet time after data loss, for a machine that is busy.
CONVERGE_S = 90.0


@dataclass
class Background:
    """A daemon in a thread with an event loop."""

    name: str
    start_it: Callable[[asyncio.Event, Callable[[], None]], Coroutine[Any, Any, None]]

    def __post_init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._ready = threading.Event()
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)
        self._thread.start()
        while not self._ready.wait(0.05):
            if self.error:
                raise self.error

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self.start_it(self._stop, self._ready.set))
        except BaseException as error:
            self.error = error
        finally:
            self._loop.close()

    def stop(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(START_S)
        assert not self._thread.is_alive(), f"{self.name} does not stop"
        if self.error:
            raise self.error


class Stack:
    """``serve`` groups, ``hold`` them, do harm, let go, then ``judge``."""

    def __init__(self, server: EmbeddedServer, folder: Path) -> None:
        self.server, self.folder = server, folder
        self.keys = Keys("ts")
        self.driver = SyncDriver(server.url)
        self.proxies: dict[str, Proxy] = {}
        self.jobs: dict[str, JobProcess] = {}
        self.holds: list[Hold] = []
        self._daemons: list[Background] = []
        self._agents: list[subprocess.Popen[str]] = []
        self._nodes: dict[str, str] = {}  # group -> node that serves it

    def proxy(self, party: str) -> Proxy:
        """Every party reaches the server by a way of its own, so that a test can cut just that. Jobs go by the way of
        their group."""
        if party not in self.proxies:
            self.proxies[party] = Proxy(self.server.socket)
        return self.proxies[party]

    # daemons

    def coordinate(self, name: str = "coordinator", **changes: Any) -> None:
        options = CoordinatorOptions(url=self.proxy(name).url, name=name, **changes)
        self._daemons.append(Background(name, lambda stop, ready: run_coordinator(options, stop=stop, ready=ready)))

    def serve(self, node: str, *groups: str, **changes: Any) -> None:
        options = AgentOptions(**{**self._agent(node, groups), **changes})
        self._daemons.append(
            Background(node, lambda stop, ready: run_agent(options, stop=stop, ready=ready, make_backend=make))
        )

    def spawn(self, node: str, *groups: str) -> subprocess.Popen[str]:
        """An agent as a process of its own, to be killed; returns when it serves."""
        options = self._agent(node, groups)
        line = [sys.executable, "-m", "tests.agent.runner", json.dumps(options, default=str)]
        process = subprocess.Popen(line, stdout=subprocess.PIPE, text=True)
        self._agents.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    def _agent(self, node: str, groups: tuple[str, ...]) -> dict[str, Any]:
        self._nodes |= dict.fromkeys(groups, node)
        return {
            "url": self.proxy(node).url,
            "node": node,
            "groups": groups,
            "state_dir": self.folder / node,
            "backends": {name: [f"knobs:folder={self.folder / 'fake'}"] for name in groups},
            "ttl_s": 3.0,
        }

    def fake(self, group: str) -> Fake:
        return Fake(self.folder / "fake" / group)

    # jobs

    def job(self, name: str) -> JobProcess:
        if name not in self.jobs:
            self.jobs[name] = JobProcess(name, self._way, self.folder / "fake")
        return self.jobs[name]

    def _way(self, group: str) -> tuple[str, str]:
        return self.proxy(group).url, self._nodes.get(group, "n1")

    def hold(self, group: str, job: str, **options: Any) -> Hold:
        """Start a hold; the job loads its state when it is inside for the first time, and leaves when told to."""
        made = self.job(job).hold(group, **options)
        self.holds.append(made)
        return made

    def enter(self, group: str, job: str, **options: Any) -> Hold:
        """A hold that is inside."""
        made = self.hold(group, job, **options)
        self.await_inside(made)
        return made

    def queue(self, group: str, job: str, **options: Any) -> Hold:
        """A hold that waits."""
        made = self.hold(group, job, **options)
        wait_until(lambda: job in self.waiting(group), f"{job} waits for {group}")
        return made

    def let_go(self, hold: Hold) -> None:
        self.job(hold.job).let_go(hold)

    def leave(self, *holds: Hold) -> None:
        """The holds are over when this returns."""
        for hold in holds:
            self.let_go(hold)
        for hold in holds:
            self._await(hold, hold.over)

    def await_inside(self, hold: Hold) -> None:
        self._await(hold, hold.inside)

    def await_any(self, *holds: Hold) -> None:
        """One of them is inside."""
        end = time.monotonic() + CONVERGE_S
        while not any(hold.inside.is_set() for hold in holds):
            assert time.monotonic() < end, f"{holds}: {self.picture(holds[0].group)}"
            time.sleep(0.02)

    def _await(self, hold: Hold, news: threading.Event) -> None:
        end = time.monotonic() + CONVERGE_S
        while not news.wait(0.02):
            assert not hold.error, hold
            assert time.monotonic() < end, f"{hold}: {self.picture(hold.group)}"
        assert not hold.error, hold

    # looking

    def view(self, group: str) -> GroupView:
        return self.driver.view(self.keys.group(group))

    def waiting(self, group: str) -> list[str]:
        return [waiter.job for waiter in self.view(group).queue]

    def events(self, group: str, kind: str) -> list[dict[str, str]]:
        entries: Any = self.driver.client.xrange(self.keys.group(group).events)
        found = [{k.decode(): v.decode() for k, v in fields.items()} for _, fields in entries]
        return [event for event in found if event["type"] == kind]

    def picture(self, group: str) -> str:
        view = self.view(group)
        return f"{view.state}, queue {view.queue}, nodes {view.nodes}, jobs {view.jobs}"

    # the verdict

    def judge(self) -> None:
        """One holder at a time, tokens rise, no lease was lost."""
        for group in {hold.group for hold in self.holds}:
            entered = sorted((h for h in self.holds if h.group == group and h.token), key=lambda h: h.entered)
            for before, after in pairwise(entered):
                assert before.left, f"{after} beside {before}"
                assert before.left <= after.entered, f"{before} overlaps {after}"
                assert before.token < after.token
            assert [str(hold) for hold in entered if hold.lost] == []

    def close(self) -> None:
        for proxy in self.proxies.values():
            proxy.heal()
        for job in self.jobs.values():
            job.end()
        for daemon in self._daemons:
            daemon.stop()
        for agent in self._agents:
            agent.kill()
            agent.communicate()
        for proxy in self.proxies.values():
            proxy.close()
        self.driver.close()
