"""Killed while it looks for a circle: who waited for it gets in, and nothing of it stays in anybody's way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from timeslice.client.sync import Client
from timeslice.embedded import EmbeddedServer
from timeslice.locks.drivers import SyncDriver
from timeslice.locks.keys import Keys

pytestmark = [pytest.mark.timeout(60)]

IN_A_CIRCLE = ("waits", "nudge")
HOLDER = """
import sys
from pathlib import Path
from timeslice.locks import cycles
from timeslice.torture import killpoints
spec, gate, url, job, first, second = sys.argv[1:]
find = cycles.Watch._find
def find_late(self, mine):  # nothing before the file is there
    return (yield from find(self, mine)) if Path(gate).exists() else ()
if spec:
    killpoints.arm(spec)
else:
    cycles.Watch._find = find_late
from timeslice.client import core
from timeslice.client.sync import Client
from timeslice.errors import DeadlockError
core.WAITER_TTL_MS = 2000
with Client(url, job) as client, client.hold(first, lock_only=True, lease=3.0):
    print("holds", flush=True)
    sys.stdin.readline()
    try:
        with client.hold(second, lock_only=True, lease=3.0):
            print("holds both", flush=True)
    except DeadlockError:
        print("is in a circle", flush=True)
"""


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as running:
        yield running


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("point", IN_A_CIRCLE)
def test_killed_in_a_circle_the_others_go_on(
    stack: ExitStack,
    server: EmbeddedServer,
    prefix: str,
    tmp_path: Path,
    point: str,
    when: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two hold a group each and want the other's. The one that finds the circle is killed when it notes or tells it:
    the other one, which could find it, too, finds nothing before that."""
    monkeypatch.setenv("TIMESLICE_PREFIX", prefix)
    gate = tmp_path / "gate"

    def start(spec: str, job: str, first: str, second: str) -> subprocess.Popen[str]:
        line = [sys.executable, "-c", HOLDER, spec, str(gate), server.url, job, first, second]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        process: subprocess.Popen[str] = stack.enter_context(
            subprocess.Popen(line, text=True, env=dict(os.environ), **pipes)
        )
        stack.callback(process.kill)
        assert says(process) == "holds"
        return process

    doomed = start(f"client:{point}:{when}:1", "doomed", "a", "b")
    other = start("", "other", "b", "a")
    go_on(other)
    with Client(server.url, "witness") as client:
        while not queued(server, prefix, "a"):
            assert other.poll() is None
        go_on(doomed)
        assert doomed.wait(60) == -signal.SIGKILL
        gate.touch()
        assert says(other) in {"holds both", "is in a circle"}
        assert other.wait(60) == 0
        with client.hold("a", "b", lock_only=True, timeout=20.0):
            pass


def queued(server: EmbeddedServer, prefix: str, group: str) -> int:
    """How many wait for the group."""
    driver = SyncDriver(server.url)
    try:
        return len(driver.view(Keys(prefix).group(group)).queue)
    finally:
        driver.close()


def says(process: subprocess.Popen[str]) -> str:
    assert process.stdout
    return process.stdout.readline().strip()


def go_on(process: subprocess.Popen[str]) -> None:
    assert process.stdin
    process.stdin.write("\n")
    process.stdin.flush()
