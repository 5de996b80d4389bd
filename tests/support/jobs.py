"""A job's process as a test holds it."""

from __future__ import annotations

import functools
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from timeslice.arena.process import start_time_of
from timeslice.models import Target

DEADLINE_S = 40.0  # nobody waits so long, but where processes start beside those of other tests


@functools.cache
def shows(*jobs: str, group: str = "g") -> tuple[int, ...]:
    """Descriptors to pass to a process that takes part in these jobs of the group: agents see in them that it does."""
    return tuple(os.memfd_create(f"timeslice:{group}/{job}") for job in jobs)


class JobProcess:
    """A process that runs a module of the tests, one JSON line a call and one an answer."""

    def __init__(self, module: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            cwd=Path(__file__).parent.parent.parent,
        )
        self.pid = self.process.pid

    def ask(self, name: str, *arguments: Any) -> None:
        """Send a call; `answer` waits for its result."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([name, arguments]) + "\n")

    def answer(self) -> Any:
        assert self.process.stdout is not None
        assert select.select([self.process.stdout], [], [], DEADLINE_S)[0], f"process {self.pid} does not answer"
        line = self.process.stdout.readline()
        assert line, f"the job ended with {self.process.wait()}"
        return json.loads(line)

    def call(self, name: str, *arguments: Any) -> Any:
        self.ask(name, *arguments)
        return self.answer()

    def target(self, job: str, **fields: Any) -> Target:
        start = start_time_of(self.pid)
        assert start is not None
        return Target(
            job=job,
            host="n1",
            pid=self.pid,
            start=start,
            uid=os.getuid(),
            pid_namespace=str(Path("/proc/self/ns/pid").readlink()),
            **fields,
        )

    def end(self) -> None:
        """Kill it and wait until its memory is gone."""
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            try:
                stream.close()
            except BrokenPipeError:
                continue  # unsent words to a job that died


def process_state(pid: int) -> str:
    """The kernel's letter: R, S, T, Z ..."""
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Poll real state until it holds."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {DEADLINE_S} s: {what}"
        time.sleep(0.005)
