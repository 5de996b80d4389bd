"""`timeslice up` after kill -9: what is left, and what the next one makes of it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.cli.stack import Up, cli, family, mounts, ready, stop

PYTHON = sys.executable


def test_after_a_kill_the_next_start_cleans_up(up: Up, folder: Path) -> None:
    """kill -9 leaves mounts and files; the next `up` removes them, takes over and grants at once."""
    process = up()
    ready(process)
    children = family(process)
    process.kill()
    process.wait(60)
    assert psutil.wait_procs(children, timeout=20)[1] == []  # the server does not outlive it
    again = up()
    ready(again)
    assert cli("hold", "trainers", "--job", "a", "--timeout", "10", "--", "true").returncode == 0
    stop(again)
    assert mounts(folder) == []
    assert list(folder.rglob("*")) == []


JOB = """
import sys, timeslice
from timeslice.arena import Arena, Device
from timeslice.settings import runtime_dir
memory = None
for line in sys.stdin:
    if memory is None:
        arena = Arena(Device.open(runtime_dir() / "devices" / "trainers"), label="a")
    with timeslice.hold("trainers", job="a", lease=2) as lease:
        memory = memory or arena.allocate(6 << 20)
        before, memory[:5] = bytes(memory[:5]), line[:5].encode()
    print(lease.grant.how, before, flush=True)
"""


@pytest.fixture
def job(folder: Path) -> Iterator[Callable[[str], str]]:
    """Let job a in once: it writes a word into its device memory. Returns how it was granted and the word before."""
    with subprocess.Popen(
        [PYTHON, "-c", JOB], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=dict(os.environ)
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        stdin, stdout = process.stdin, process.stdout

        def turn(word: str) -> str:
            stdin.write(f"{word}\n")
            stdin.flush()
            return stdout.readline().strip()

        yield turn
        process.kill()


def kill(process: subprocess.Popen[str]) -> None:
    children = family(process)
    process.kill()
    process.wait(60)
    assert psutil.wait_procs(children, timeout=20)[1] == []


@pytest.mark.slow
@pytest.mark.parametrize("data", [True, False], ids=["data", "no data"])
def test_living_jobs_outlive_a_kill(up: Up, job: Callable[[str], str], tmp_path: Path, data: bool) -> None:
    """kill -9 while a job is on the device, and again while it is suspended: the next `up` takes over its device, and
    what it knows of the job; another job gets in by suspending it, and its memory comes back."""
    args = ("--data", str(tmp_path / "data")) if data else ()
    process = up(*args)
    ready(process)
    assert job("first").startswith("first load")
    kill(process)
    process = up(*args)
    ready(process)
    assert cli("hold", "trainers", "--job", "b", "--timeout", "60", "--", "true").returncode == 0
    kill(process)
    process = up(*args)
    ready(process)
    assert job("later") == "restored b'first'"
    stop(process)


@pytest.mark.slow
def test_a_device_in_use_keeps_its_size(up: Up, folder: Path, job: Callable[[str], str]) -> None:
    """Another size after kill -9, while a process has memory there: exit code 6 names it; nothing was touched."""
    process = up()
    ready(process)
    job("first")
    kill(process)
    before = mounts(folder)
    refused = cli("up", "--device-size", "16M")
    assert refused.returncode == 6
    assert "device of group trainers has 8388608 bytes and not 16777216" in refused.stderr
    assert re.search(r"processes \d+ still have memory on it", refused.stderr)
    assert mounts(folder) == before
    ready(up())
    assert job("later").endswith("b'first'")
