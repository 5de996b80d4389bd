"""Workloads in processes of their own that are busy, cut off, hang or abort, with a real coordinator and agent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.client.world import World
from tests.faults.stack import Background
from tests.support.jobs import DEADLINE_S, wait_until
from timeslice.coordinator.service import CoordinatorOptions, run_coordinator
from timeslice.locks import scripts
from timeslice.torture.proxy import Proxy

WORDS = "in the middle of a step"


class Job:
    """What a test tells it, and what it answers."""

    def __init__(self, name: str, folder: Path, url: str, **files: str) -> None:
        self.folder = folder / name
        self.folder.mkdir(exist_ok=True)
        self.set(**files)
        self._log = (folder / f"{name}.log").open("ab")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.client.workload_job", str(self.folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            cwd=Path(__file__).parents[2],
            env={**os.environ, "TIMESLICE_JOB": name, "TIMESLICE_URL": url},
        )
        assert self.hear() == "up"

    def set(self, **files: str) -> None:
        for name, text in files.items():
            (self.folder / name).write_text(text)

    def unset(self, name: str) -> None:
        (self.folder / name).unlink()

    def tell(self, word: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{word}\n")
        self.process.stdin.flush()

    def hear(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def do(self, word: str) -> str:
        self.tell(word)
        return self.hear()

    def calls(self) -> list[str]:
        calls = self.folder / "calls"
        return calls.read_text().split() if calls.exists() else []

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()
        self._log.close()


class Agent:
    """The real one, as a process."""

    def __init__(self, world: World, folder: Path) -> None:
        self._world, self._folder = world, folder
        self.start()

    def start(self) -> None:
        options = ["--group", "g", "--node", "n1", "--state-dir", str(self._folder / "agent"), "--backend", "channel"]
        self._log = (self._folder / "agent.log").open("ab")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "timeslice", "--url", self._world.url, "agent", *options], stderr=self._log
        )

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(DEADLINE_S)
        self._log.close()


@pytest.fixture
def agent(world: World, tmp_path: Path) -> Iterator[Agent]:
    """Group ``g`` served for real."""
    options = CoordinatorOptions(url=world.url, prefix=world.keys.prefix, name="c1")
    coordinator = Background("c1", lambda stop, ready: run_coordinator(options, stop=stop, ready=ready))
    made = Agent(world, tmp_path)
    try:
        wait_until(lambda: list(world.view().nodes) == ["n1"], "the agent serves")
        yield made
    finally:
        made.kill()
        coordinator.stop()


Start = Callable[..., Job]


@pytest.fixture
def start(agent: Agent, world: World, tmp_path: Path) -> Iterator[Start]:
    """Start a job; files of its folder by name."""
    made: list[Job] = []

    def one(name: str, *, url: str = world.url, **files: str) -> Job:
        made.append(Job(name, tmp_path, url, **files))
        return made[-1]

    yield one
    for job in made:
        job.end()


def test_a_workload_that_is_busy_twice_moves_at_the_third_time(start: Start) -> None:
    """G19: asked again until its work is done; nobody is told of a fault."""
    a, b = start("a", busy="2"), start("b")
    a.do("hold")
    a.do("yield")
    assert b.do("hold").endswith("True")
    assert a.calls() == ["suspend", "suspend", "suspend", "suspended"]
    b.do("yield")
    assert a.do("hold") == "restored True"


def test_a_workload_that_stays_busy_keeps_its_place(start: Start, world: World) -> None:
    """G19: the waiter is told why, the busy job may go on with its state in place, and moves when its work is done."""
    world.run(scripts.configure(world.group(), {"suspend_timeout_ms": "1000"}))
    a, b = start("a", busy="always"), start("b")
    a.do("hold")
    a.do("yield")
    b.tell("hold")
    wait_until(lambda: any(WORDS in waiter.deferred for waiter in world.view().queue), "the reason is in the queue")
    assert a.do("hold") == "no-op True"
    a.unset("busy")
    a.do("yield")
    assert b.hear().endswith("True")


def test_a_workload_that_is_cut_off_in_a_command_settles(start: Start, world: World, proxy: Proxy) -> None:
    """Its connection goes while it moves its state, and its answer with it: asked again it repeats the answer, and
    nothing is done twice."""
    a, b = start("a", url=proxy.url, hang=""), start("b")
    a.do("hold")
    a.do("yield")
    b.tell("hold")
    wait_until(lambda: "suspend" in a.calls(), "it is asked")
    proxy.cut()
    a.unset("hang")
    wait_until(lambda: "suspended" in a.calls(), "it has done it")
    assert world.holder() == ""
    proxy.heal()
    assert b.hear().endswith("True")
    assert a.calls() == ["suspend", "suspended"]


def test_an_agent_that_is_killed_in_a_command_asks_again(start: Start, agent: Agent) -> None:
    """The next agent finds what the first one had asked for, done or under way; the callback ran once."""
    a, b = start("a", hang=""), start("b")
    a.do("hold")
    a.do("yield")
    b.tell("hold")
    wait_until(lambda: "suspend" in a.calls(), "it is asked")
    agent.kill()
    agent.start()
    a.unset("hang")
    assert b.hear().endswith("True")
    assert a.calls() == ["suspend", "suspended"]


@pytest.mark.slow
def test_a_callback_that_hangs_is_told_of(start: Start, world: World) -> None:
    """Bounded by the deadline: nobody is let in on a guess, and everybody reads what hangs. When it ends, the workload
    finds the order to come back next in its stream, and `timeslice repair` has it asked how it stands."""
    world.run(scripts.configure(world.group(), {"suspend_timeout_ms": "1000", "restore_timeout_ms": "1000"}))
    a, b = start("a", hang=""), start("b")
    a.do("hold")
    a.do("yield")
    b.tell("hold")

    def told() -> bool:
        view = world.view()
        return any("has not answered suspend" in text for text in (view.reason, *(w.deferred for w in view.queue)))

    wait_until(told, "what hangs is told")
    assert world.holder() == ""
    a.unset("hang")
    wait_until(lambda: a.calls() == ["suspend", "suspended", "restore"], "it has taken it back")
    command = [sys.executable, "-m", "timeslice", "--url", world.url, "repair", "g"]
    subprocess.run(command, check=False, capture_output=True, timeout=60)
    assert b.hear().endswith("True")


def test_a_job_whose_watchdog_aborts_it_while_it_is_suspended_is_gone(start: Start, world: World) -> None:
    """G30: suspended longer than its watchdog's limit. That is a process that ended while it was out: whoever is
    inside goes on, the next one gets in, and the same job starts anew."""
    a, b = start("a", watchdog="1"), start("b")
    a.do("hold")
    a.do("yield")
    assert b.do("hold").endswith("True")
    assert a.process.wait(DEADLINE_S) == -signal.SIGABRT
    assert a.calls() == ["suspend", "suspended", "watchdog"]

    def gone() -> bool:
        return {member.state for member in world.view().members if member.job == "a"} <= {"gone", "absent"}

    wait_until(gone, "a is gone")
    assert b.do("yield") == "yielded"
    again = start("a")
    assert again.do("hold").endswith("True")
    assert world.view().reason == ""
