"""Processes that no client registers: they are started as a launcher starts workers, and put bytes on a device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.agent.rig import Rig, until
from timeslice.arena import Device
from timeslice.backends.registry import get_backend

SIZE = 4 << 20
DEVICE = 10 << 20  # room for two of them

# Each line of input is a word: open (an arena with nothing in it), load, child (start a process, which loads), titled
# (the same, and it has given itself a title before), fork (it loads), show GROUP/JOB (as a client does before it
# registers), close (what it had shown so), title (overwrite its environment), exec (go on as another program, in an
# empty environment). Answers with the number of who did it.
CODE = f"""
import os, subprocess, sys, time
if os.environ.get("LATE_JOB"):
    os.environ["TIMESLICE_JOB"] = os.environ.pop("LATE_JOB")
if os.environ.get("SHOWS"):
    from timeslice.client.identity import show_membership
    show_membership(*os.environ.pop("SHOWS").split("/"))
def title():
    import ctypes
    start, end = map(int, open("/proc/self/stat").read().rsplit(")", 1)[1].split()[47:49])
    ctypes.memset(start, 0, end - start)
if os.environ.get("TITLE"):
    title()
arena = None
def load():
    global arena, state
    from timeslice.arena import Arena, Device
    arena = arena or Arena(Device.open(sys.argv[1]))
    state = arena.allocate({SIZE})
    state[:4] = b"mine"
print("up", flush=True)
for word in map(str.strip, sys.stdin):
    told = os.getpid()
    if word == "open":
        from timeslice.arena import Arena, Device
        arena = Arena(Device.open(sys.argv[1]))
    elif word == "load":
        load()
    elif word == "title":
        title()
    elif word == "close":
        for fd in os.listdir("/proc/self/fd"):
            if os.path.islink("/proc/self/fd/" + fd) and "memfd:timeslice:" in os.readlink("/proc/self/fd/" + fd):
                os.close(int(fd))
    elif word in ("child", "titled"):
        line = [sys.executable, "-c", sys.argv[2], *sys.argv[1:]]
        more = dict(TITLE="1") if word == "titled" else dict()
        child = subprocess.Popen(line, stdin=-1, stdout=-1, text=True, env=os.environ | more)
        child.stdout.readline()
        print("load", file=child.stdin, flush=True)
        told = int(child.stdout.readline())
    elif word == "fork":
        reading, writing = os.pipe()
        told = os.fork()
        if told == 0:
            load()
            os.write(writing, b"x")
            time.sleep(600)
        os.read(reading, 1)
    elif word.startswith("show "):
        from timeslice.client.identity import show_membership
        show_membership(*word.removeprefix("show ").split("/"))
    elif word == "exec":
        print(told, flush=True)
        os.execve("/bin/sleep", ["sleep", "600"], {{}})
    print(told, flush=True)
if os.environ.get("TITLE"):  # a core goes on without its launcher
    time.sleep(600)
"""

_PLAIN = {"LATE_JOB", "SHOWS", "TITLE"}


class Worker:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.pid = process.pid

    def do(self, word: str) -> int:
        """The number of the process that did it."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())


def device_path(folder: Path, group: str) -> Path:
    return folder / "devices" / group


def start_worker(rig: Rig, folder: Path, *, on: str = "", **environment: str) -> Worker:
    """``environment``: without ``TIMESLICE_`` before each name. ``on``: the group whose device it uses."""
    given = {f"TIMESLICE_{name}": value for name, value in environment.items() if name not in _PLAIN}
    given |= {name: value for name, value in environment.items() if name in _PLAIN}
    process = subprocess.Popen(
        [sys.executable, "-c", CODE, str(device_path(folder, on or rig.name)), CODE],
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "TIMESLICE_PREFIX": rig.prefix, **given},
        start_new_session=True,
    )
    rig.processes.append(process)
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    return Worker(process)


@contextmanager
def devices_end(folder: Path, *groups: str) -> Iterator[None]:
    """Take the emulated devices away afterwards."""
    try:
        yield
    finally:
        for group in groups:
            if device_path(folder, group).exists():
                Device.open(device_path(folder, group)).destroy(force=True)


def emulated(*groups: str, **more: Any) -> dict[str, Any]:
    """Options of an agent whose groups have an emulated device each."""
    given: dict[str, Any] = {"groups": groups, "emulate": dict.fromkeys(groups, DEVICE), "ttl_s": 0.9}
    return {**given, "backends": {group: ["arena"] for group in groups}, **more}


Starts = Callable[..., Worker]


@pytest.fixture
def starts(rig: Rig, clean_environment: Path) -> Starts:
    """Start a worker of this rig's installation."""

    def start(**options: str) -> Worker:
        return start_worker(rig, clean_environment, **options)

    return start


@asynccontextmanager
async def agent_on(rig: Rig, folder: Path, *groups: str, **more: Any) -> AsyncIterator[None]:
    """An agent of these groups, with the backends that are installed."""
    with devices_end(folder, *groups):
        async with rig.agent(get_backend, **emulated(*groups, **more)):
            yield


def stored(rig: Rig, group: str = "g") -> list[dict[str, Any]]:
    """All that the agent watches, as it has written down."""
    path = rig.folder / "state" / "groups" / group / "targets.json"
    found: list[dict[str, Any]] = json.loads(path.read_text()) if path.exists() else []
    return found


def watched(rig: Rig, group: str = "g") -> dict[int, str]:
    """Number and job of each."""
    return {each["pid"]: each["job"] for each in stored(rig, group)}


async def found(rig: Rig, pid: int, group: str = "g", job: str = "a") -> None:
    """Wait until the agent watches this process as the job's."""
    await until(lambda: watched(rig, group).get(pid) == job, f"process {pid} is found")
