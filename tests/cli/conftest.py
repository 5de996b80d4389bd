"""The command line, in process by click's runner and as real processes, and groups driven by hand."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from timeslice.cli.main import main
from timeslice.embedded import EmbeddedServer
from timeslice.locks import scripts
from timeslice.locks.drivers import SyncDriver
from timeslice.locks.keys import GroupKeys, Keys
from timeslice.locks.scripts import Granted, Mine, Observed, Request
from timeslice.models import Plan

NODE = "node-1"
TIMESLICE = str(Path(sys.executable).with_name("timeslice"))


def eventually(look: Callable[[], Any], *, within: float = 20.0) -> Any:
    """What ``look`` returns once it is true; fails when it never is."""
    until = time.monotonic() + within
    while not (found := look()):
        if time.monotonic() > until:
            pytest.fail(f"did not become true within {within:g} s; last seen: {found!r}")
        time.sleep(0.02)
    return found


def end_session(process: subprocess.Popen[str]) -> None:
    """Kill a process that leads a session, with what it started, and close its pipes."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass  # all ended by themselves
    process.wait(60)
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()


class Cli:
    """Runs commands against the session's server under the test's own prefix."""

    def __init__(self, url: str, prefix: str) -> None:
        self.url = url
        self.prefix = prefix
        self.started: list[subprocess.Popen[str]] = []

    def __call__(self, *args: str) -> Result:
        return CliRunner().invoke(main, ["--url", self.url, "--prefix", self.prefix, *args])

    def json(self, *args: str) -> Any:
        """What the command prints with ``--json``; it must succeed and print nothing else."""
        result = self(*args, "--json")
        assert result.exit_code == 0, result.stderr
        return json.loads(result.stdout)

    def start(self, *args: str, **options: Any) -> subprocess.Popen[str]:
        """The command as a process of its own, with pipes; it and its children end with the test at the latest."""
        command = [TIMESLICE, "--url", self.url, "--prefix", self.prefix, *args]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL}
        process = subprocess.Popen(command, text=True, start_new_session=True, **{**pipes, **options})
        self.started.append(process)
        return process

    def close(self) -> None:
        for process in self.started:
            end_session(process)


class World:
    """Groups of the test's own, driven by the protocol's own calls."""

    def __init__(self, url: str, prefix: str) -> None:
        self.driver = SyncDriver(url)
        self.keys = Keys(prefix)

    def entries(self, key: str) -> list[tuple[str, dict[str, str]]]:
        """A stream, decoded."""
        found: Any = self.driver.client.xrange(key)
        return [(at.decode(), {k.decode(): v.decode() for k, v in fields.items()}) for at, fields in found]

    def now_ms(self) -> int:
        """The server's clock."""
        seconds, micros = self.driver.client.time()
        return int(seconds) * 1000 + int(micros) // 1000

    def index(self, group: str) -> GroupKeys:
        self.driver.client.sadd(self.keys.groups, group)
        return self.keys.group(group)

    def request(self, job: str, *, waiter: str | None = None, **more: Any) -> Request:
        return Request(waiter or f"w-{job}", job, NODE, os.getpid(), 1, **more)

    def acquire(self, group: str, job: str, **more: Any) -> Any:
        """One attempt: Granted, or Queued and the waiter stays."""
        return self.driver.run(scripts.acquire(self.index(group), self.request(job, **more)))

    def hold_lock_only(self, group: str, job: str, **more: Any) -> Granted:
        granted = self.acquire(group, job, lock_only=True, **more)
        assert isinstance(granted, Granted)
        return granted

    def serve(self, group: str, node: str = NODE, *, ttl_ms: int = 60_000) -> None:
        pulse = self.driver.run(scripts.heartbeat(self.index(group), node, ttl_ms))
        self.driver.run(scripts.report(self.index(group), node, pulse.counter, []))  # its devices are empty
        self.driver.client.sadd(self.keys.nodes, node)

    def swap(self, group: str, out: str, into: str) -> int:
        """Bring a served group to the commit of a swap: ``out`` has yielded, ``into`` waits. Returns its number."""
        keys = self.keys.group(group)
        granted = self.acquire(group, out)
        assert isinstance(granted, Granted)
        self.acquire(group, into)
        self.driver.run(scripts.yield_(keys, f"w-{out}", granted.token))
        mine = self.driver.run(scripts.own(keys, "coordinator-1"))
        assert isinstance(mine, Mine)
        swap = self.driver.view(keys).swap
        plan = Plan(out=(out,), into=into, nodes=(NODE,)).model_dump_json()
        self.driver.run(scripts.plan(keys, swap, mine.epoch, plan, 10_000))
        self.driver.run(scripts.accepted(keys, NODE, swap, mine.epoch, "prepare", "c1"))
        self.driver.run(scripts.ack(keys, NODE, swap, "c1", [], outcome="prepared"))
        self.driver.run(scripts.step(keys, swap, mine.epoch, "prepare", "commit", 10_000))
        self.driver.run(scripts.accepted(keys, NODE, swap, mine.epoch, "commit", "c2"))
        return swap

    def unheld(self, group: str, job: str) -> None:
        """An agent sees a job on the device that does not hold."""
        keys = self.keys.group(group)
        seen = [Observed(job, "resident", device_bytes=5 << 20, backend="arena", unheld=True)]
        self.driver.run(scripts.report(keys, NODE, self.driver.view(keys).counter, seen))


@pytest.fixture
def cli(server: EmbeddedServer, prefix: str) -> Iterator[Cli]:
    """The command line, pointed at the test's own prefix."""
    made = Cli(server.url, prefix)
    yield made
    made.close()


@pytest.fixture
def world(server: EmbeddedServer, prefix: str) -> Iterator[World]:
    """The same prefix, driven by hand."""
    made = World(server.url, prefix)
    yield made
    made.driver.close()


@pytest.fixture
def folder(clean_environment: Path) -> Path:
    """The runtime folder, which the processes started here share with the test."""
    return clean_environment


@pytest.fixture
def up(folder: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start `timeslice up`; it and what it started end with the test, its devices too."""
    started: list[subprocess.Popen[str]] = []

    def start(*args: str, **environment: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [TIMESLICE, "up", "--device-size", "8M", *args],
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            env={**os.environ, **environment},
        )
        started.append(process)
        return process

    yield start
    for process in started:
        end_session(process)
    for device in [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines() if str(folder) in line]:
        subprocess.run(["umount", "-l", device], check=False)


@pytest.fixture
def job(folder: Path) -> Iterator[Callable[..., Any]]:
    """Start job processes that obey a test (`tests.cli.operated`), beside a running `up`."""
    from tests.cli.operated import Operated

    started: list[Operated] = []

    def start(name: str, *more: str, lease_s: float = 3.0) -> Operated:
        started.append(Operated(name, folder, *more, lease_s=lease_s))
        started[-1].until("up")
        return started[-1]

    yield start
    for each in started:
        each.end()
