"""Devices to test on, jobs that use them, and the checkpoint tool as its users run it."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from timeslice.arena import Device

MIB = 1 << 20
CAPACITY = 16 * MIB
DEADLINE = 20.0

DeviceMaker = Callable[..., Device]


class JobError(Exception):
    """The job answered with an error; ``kind`` is its class name."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind


class JobProcess:
    """A job in a process of its own. Every method of `tests.arena.job.Job` can be called on it."""

    def __init__(self, environment: dict[str, str] | None = None) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.arena.job"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parent.parent.parent,
            env={**os.environ, **(environment or {})},
        )
        self.pid = self.process.pid

    def ask(self, name: str, *arguments: Any) -> None:
        """Send a call; `answer` waits for its result."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([name, arguments]) + "\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the job ended with {self.process.wait()}"
        reply = json.loads(line)
        if "error" in reply:
            raise JobError(reply["error"], reply["message"])
        return reply["ok"]

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            self.ask(name, *arguments)
            return self.answer()

        return call

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            try:
                stream.close()
            except BrokenPipeError:
                continue  # unsent words to a job that died


class Tool:
    """``timeslice-arena-checkpoint`` in a process of its own."""

    def __call__(self, *words: str | int, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self._command(words),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            env={**os.environ, **environment},
        )

    def start(self, *words: str | int, **environment: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self._command(words),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
        )

    def done(self, *words: str | int, **environment: str) -> str:
        """Run it, insist that it worked; what it printed."""
        result = self(*words, **environment)
        assert result.returncode == 0, result.stderr
        return result.stdout.strip()

    def act(self, pid: int, *actions: str, **environment: str) -> None:
        for action in actions:
            self.done("--action", action, "--pid", pid, **environment)

    def state(self, pid: int, **environment: str) -> str:
        return self.done("--get-state", "--pid", pid, **environment)

    @staticmethod
    def _command(words: tuple[str | int, ...]) -> list[str]:
        return [sys.executable, "-m", "timeslice.arena.tool", *map(str, words)]


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Poll real state until it holds."""
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline, f"not within {DEADLINE} s: {what}"
        time.sleep(0.005)


def process_state(pid: int) -> str:
    """The kernel's letter: R, S, T, Z ..."""
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]


@pytest.fixture
def make_device(tmp_path: Path) -> Iterator[DeviceMaker]:
    """Make emulated devices that are gone after the test; skips where mounting is asked for and forbidden."""
    made: list[Device] = []

    def make(capacity: int = CAPACITY, *, advisory: bool = False) -> Device:
        try:
            device = Device.create(tmp_path / f"device-{len(made)}", capacity, advisory=advisory)
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.EACCES) or os.environ.get("CI"):
                raise
            pytest.skip("no right to mount a tmpfs here")
        made.append(device)
        return device

    yield make
    for device in made:
        device.destroy(force=True)


@pytest.fixture(params=["mounted", "advisory"])
def device(request: pytest.FixtureRequest, make_device: DeviceMaker) -> Device:
    """A device of 16 MiB, of either kind."""
    return make_device(advisory=request.param == "advisory")


@pytest.fixture
def start_job() -> Iterator[Callable[..., JobProcess]]:
    """Start jobs; each gets an arena on the devices named. They are ended after the test."""
    started: list[JobProcess] = []

    def start(*devices: Device, **environment: str) -> JobProcess:
        job = JobProcess(environment)
        started.append(job)
        for device in devices:
            job.arena(device.path)
        return job

    yield start
    for job in started:
        job.end()


@pytest.fixture
def tool() -> Tool:
    return Tool()
