"""The server as a test sees it, a group served by scripted parts, and jobs in processes of their own."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

from tests.support.jobs import DEADLINE_S, wait_until
from timeslice.locks import scripts
from timeslice.locks.drivers import SyncDriver
from timeslice.locks.keys import GroupKeys, Keys
from timeslice.locks.view import GroupView

ROOT = Path(__file__).parent.parent.parent


class World:
    def __init__(self, url: str, prefix: str) -> None:
        self.url, self.keys = url, Keys(prefix)
        self.driver = SyncDriver(url)
        self.redis: Any = self.driver.client
        self.run = self.driver.run
        self._jobs: list[Job] = []

    def group(self, name: str = "g") -> GroupKeys:
        return self.keys.group(name)

    def view(self, group: str = "g") -> GroupView:
        return self.driver.view(self.group(group))

    def holder(self, group: str = "g") -> str:
        return self.view(group).holder

    def queue(self, group: str = "g") -> list[str]:
        """Jobs in service order."""
        return [waiter.job for waiter in self.view(group).queue]

    def until_queued(self, *jobs: str, group: str = "g") -> None:
        wait_until(lambda: self.queue(group) == list(jobs), f"{jobs} wait for {group}")

    def until_held(self, job: str, group: str = "g") -> None:
        wait_until(lambda: self.holder(group) == job, f"{job} holds {group}")

    def events(self, group: str = "g") -> list[dict[str, str]]:
        entries = self.redis.xrange(self.group(group).events)
        return [{scripts.text(k): scripts.text(v) for k, v in fields.items()} for _, fields in entries]

    def event_types(self, group: str = "g") -> list[str]:
        return [event["type"] for event in self.events(group)]

    def serve(self, *groups: str, node: str = "n1", ttl_ms: int = 600_000) -> None:
        """Let a scripted agent join the groups and report an empty device."""
        for group in groups:
            self.redis.sadd(self.keys.groups, group)
            pulse = self.run(scripts.heartbeat(self.group(group), node, ttl_ms))
            self.run(scripts.report(self.group(group), node, pulse.counter, []))

    def swap(self, out: str, how: str, group: str = "g", node: str = "n1", *, discarded: bool = False) -> None:
        """Drive the swap that is due, as coordinator and agent would."""
        keys = self.group(group)
        wait_until(lambda: self.view(group).swap > 0, "a swap is due")
        mine = self.run(scripts.own(keys, "c1"))
        assert isinstance(mine, scripts.Mine)
        swap, epoch = self.view(group).swap, mine.epoch
        self.run(scripts.plan(keys, swap, epoch, "{}", 10_000))
        self.run(scripts.accepted(keys, node, swap, epoch, "prepare", "p"))
        self.run(scripts.ack(keys, node, swap, "p", [], outcome="prepared"))
        self.run(scripts.step(keys, swap, epoch, "prepare", "commit", 10_000))
        self.run(scripts.accepted(keys, node, swap, epoch, "commit", "c"))
        observed = [scripts.Observed(out, "suspended", 100, discarded=discarded)]
        self.run(scripts.ack(keys, node, swap, "c", observed, outcome="done"))
        assert isinstance(self.run(scripts.promote(keys, swap, epoch, how)), scripts.Promoted)

    def job(self, code: str, *, job: str = "a", ttl_ms: int | None = None) -> Job:
        """Start a process that runs ``code`` with ``timeslice`` and ``say`` at hand."""
        made = Job(code, {"TIMESLICE_JOB": job, "TEST_TTL_MS": str(ttl_ms or "")})
        self._jobs.append(made)
        return made

    def close(self) -> None:
        for job in self._jobs:
            job.end()
        self.driver.close()


_PRELUDE = """\
import asyncio, os, signal, sys, threading, time
import timeslice
import timeslice.client.core
if os.environ["TEST_TTL_MS"]:
    timeslice.client.core.WAITER_TTL_MS = int(os.environ["TEST_TTL_MS"])
signal.signal(signal.SIGINT, signal.default_int_handler)  # it may be started with the signal ignored
def say(*words):
    print(*words, flush=True)
def hear():
    return sys.stdin.readline()
"""


class Job:
    """A process of a job: it says lines and hears lines."""

    def __init__(self, code: str, environment: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", _PRELUDE + textwrap.dedent(code)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            cwd=ROOT,
            env={**os.environ, **environment},
        )
        self.pid = self.process.pid
        self._heard = b""  # lines may come together: what is read ahead is kept here, not where select does not look

    def line(self) -> str:
        """The next line that it says."""
        assert self.process.stdout is not None
        pipe = self.process.stdout.fileno()
        while b"\n" not in self._heard:
            assert select.select([pipe], [], [], DEADLINE_S)[0], f"process {self.pid} says nothing"
            piece = os.read(pipe, 65_536)
            assert piece, f"the process ended with {self.process.wait()}"
            self._heard += piece
        line, _, self._heard = self._heard.partition(b"\n")
        return line.decode().strip()

    def tell(self, words: str = "") -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{words}\n")

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdout.close()
        try:
            self.process.stdin.close()
        except BrokenPipeError:
            pass  # unsent words to a process that ended
