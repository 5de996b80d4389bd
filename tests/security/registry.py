"""A registry to be fed with registrations, and real processes to register."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.jobs import wait_until
from timeslice.agent import procfs
from timeslice.agent.targets import TargetRegistry

SLEEP = ["/bin/sh", "-c", "echo up; exec sleep 600"]


class Known:
    """A registry of group g on node n1, fed as a heartbeat feeds it."""

    def __init__(self, folder: Path) -> None:
        self.registry = TargetRegistry("g", "n1", folder / "targets.json", lambda: None)

    async def claim(self, pid: int, job: str = "a", **changes: Any) -> str:
        """Register a process for a job; why it was refused, or ''."""
        found = procfs.look_at(pid)
        fields = {
            "job": job,
            "host": "n1",
            "pid": pid,
            "start": found.start if found else 1,
            "uid": found.uid if found else 0,
            "pid_namespace": procfs.pid_namespace(),
        } | changes
        name = f"{job}/n1/{pid}"
        await self.registry.refresh({name: json.dumps(fields)})
        return self.registry.refused.get(name, "")


@pytest.fixture
async def known(tmp_path: Path) -> AsyncIterator[Known]:
    made = Known(tmp_path)
    yield made
    made.registry.close()


Start = Callable[..., int]


def _sleeps(proc: Path) -> bool:
    """In the middle of its exec it shows no environment."""
    return (proc / "comm").read_text() == "sleep\n" and (proc / "environ").read_bytes() != b""


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts processes; they end with the test."""
    running: list[subprocess.Popen[bytes]] = []

    def begin(line: list[str] = SLEEP, **options: Any) -> int:
        bare = {name: value for name, value in os.environ.items() if not name.startswith("TIMESLICE_")}
        options["env"] = bare | options.get("env", {})
        process = subprocess.Popen(line, stdout=subprocess.PIPE, **options)
        running.append(process)
        assert process.stdout is not None
        process.stdout.readline()
        if line is SLEEP:
            wait_until(lambda: _sleeps(Path("/proc", str(process.pid))), "it sleeps")
        return process.pid

    yield begin
    for process in running:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
