"""A coordinator, an agent and jobs on a node with a stand-in for GPUs, for tests of devices and memory."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.cli.conftest import NODE, Cli, eventually
from tests.gpu.node import Node, uuid

GROUP = "trainers"

# As tests.gpu.job, with real bytes on an emulated device.
EMULATED_JOB = """
import sys, numpy, timeslice
from timeslice.arena import Arena, Device
arena, memory = Arena(Device.open(sys.argv[2])), None
print("up", flush=True)
while sys.stdin.readline():
    with timeslice.hold("trainers", job=sys.argv[1], timeout=120) as lease:
        if memory is None:
            memory = numpy.frombuffer(arena.allocate(int(sys.argv[3])), dtype="uint8")
            memory[:] = 7
        print(lease.grant.how, bool((memory == 7).all()), flush=True)
        if not sys.stdin.readline():
            break
    print("yielded", flush=True)
"""


class Served:
    """The system of one test: daemons and jobs as processes, which end with the test."""

    def __init__(self, cli: Cli, folder: Path, node: Node) -> None:
        self.cli, self.folder, self.node = cli, folder, node
        self.agents: list[subprocess.Popen[str]] = []
        self.environment = {**os.environ, **node.environment, "TIMESLICE_NODE": NODE}

    def coordinator(self) -> None:
        self.cli.start("coordinator", "--name", "c1", stderr=subprocess.DEVNULL, env=self.environment)

    def agent(self, *args: str) -> subprocess.Popen[str]:
        """An agent, which may still be starting."""
        state = str(self.folder / "state")
        started = self.cli.start("agent", "--node", NODE, "--state-dir", state, *args, env=self.environment)
        self.agents.append(started)
        return started

    def stop(self) -> None:
        """Stop the agent, as an operator does."""
        self.agents[-1].terminate()
        assert self.agents[-1].wait(60) == 0

    def ready(self, *args: str) -> list[str]:
        """An agent that serves; what it has logged by then."""
        process, lines = self.agent(*args), list[str]()
        assert process.stderr is not None
        for line in process.stderr:
            lines.append(line)
            if line.rstrip().endswith(": ready"):
                return lines
        raise AssertionError("the agent ended:\n" + "".join(lines))

    def refused(self, *args: str) -> str:
        """An agent that must not start: its message. Exit code 2."""
        _, said = (process := self.agent(*args)).communicate(timeout=60)
        assert process.returncode == 2, said
        return said

    def job(self, name: str, nbytes: int, context: int = 0, *, kind: str = "honest") -> Job:
        words = [name, GROUP, uuid(0), str(nbytes), str(context), kind]
        return Job(self, [sys.executable, "-m", "tests.gpu.job", *words])

    def emulated_job(self, name: str, device: Path, nbytes: int) -> Job:
        return Job(self, [sys.executable, "-c", EMULATED_JOB, name, str(device), str(nbytes)])

    def shown(self) -> Any:
        """The node as `nodes --json` has it, once its record is there."""
        return eventually(lambda: next((n for n in self.cli.json("nodes")["nodes"] if n["memory"]), None))

    def why(self, job: str) -> str:
        """Why a job waits, as `queue` has it; empty when it does not."""
        waiters = self.cli.json("queue", GROUP)["waiters"]
        return next((each["why"] for each in waiters if each["job"] == job), "")


class Job:
    """A process of tests.gpu.job."""

    def __init__(self, served: Served, command: list[str]) -> None:
        pipe, cli = subprocess.PIPE, served.cli
        where = {"TIMESLICE_URL": cli.url, "TIMESLICE_PREFIX": cli.prefix}
        self.process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, text=True, start_new_session=True, env={**served.environment, **where}
        )
        cli.started.append(self.process)
        assert self.says() == "up"

    def go(self) -> None:
        """Ask for a hold, or yield it."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def says(self, within: float = 30.0) -> str:
        assert self.process.stdout is not None
        assert select.select([self.process.stdout], [], [], within)[0], "the job says nothing"
        return self.process.stdout.readline().strip()

    def turn(self) -> str:
        """A whole hold; how it was granted and whether the state was there."""
        self.go()
        found = self.says()
        self.go()
        assert self.says() == "yielded"
        return found

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
