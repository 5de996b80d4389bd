"""The processes of a growth run: agent, coordinator, jobs, holder. Each ends when its standard input does.

``python -m timeslice.torture.growth_parts ROLE SPEC`` with the spec as JSON. ``jobs`` and ``holder`` answer each line
on standard input (how many more) with a line of JSON: what they have done so far.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from pydantic import BaseModel

from timeslice.agent.service import AgentOptions, run_agent
from timeslice.arena import Arena
from timeslice.client.sync import Client
from timeslice.coordinator.service import CoordinatorOptions, run_coordinator
from timeslice.errors import AcquireTimeoutError, TimeSliceError

WAIT_S = 60.0  # for one turn; a turn takes milliseconds
SIZE = 640 << 10  # of a job's state; a device of CAPACITY has room for one
CAPACITY = 1 << 20
LOCK = "lock"


class Spec(BaseModel):
    """What a part is told. ``homes``: node -> the runtime folder of its agent."""

    url: str
    prefix: str = "ts"
    name: str
    groups: tuple[str, ...] = ()
    folder: Path = Path()
    homes: dict[str, Path] = {}


class Done(BaseModel):
    """What a part that makes traffic has done so far."""

    swaps: int = 0
    jobs: int = 0
    holds: int = 0
    timeouts: int = 0


def agent(spec: Spec) -> None:
    """A node agent that serves the groups with emulated devices."""
    options = AgentOptions(
        url=spec.url,
        node=spec.name,
        groups=spec.groups,
        state_dir=spec.folder,
        emulate=dict.fromkeys(spec.groups, CAPACITY),
        backends=dict.fromkeys(spec.groups, ("arena",)),
    )
    _daemon(lambda ready, stop: run_agent(options, ready=ready, stop=stop))


def coordinator(spec: Spec) -> None:
    options = CoordinatorOptions(url=spec.url, name=spec.name)
    _daemon(lambda ready, stop: run_coordinator(options, ready=ready, stop=stop))


def _daemon(main: Any) -> None:
    async def body() -> None:
        stop, loop = asyncio.Event(), asyncio.get_running_loop()

        def watch() -> None:
            while os.read(0, 64):
                pass
            loop.call_soon_threadsafe(stop.set)

        threading.Thread(target=watch, daemon=True).start()
        running: Coroutine[Any, Any, None] = main(lambda: print("{}", flush=True), stop)  # noqa: T201 - the starter waits for it
        await running

    asyncio.run(body())


def holder(spec: Spec) -> None:
    """One process that holds a lock-only group again and again, each time as a new job, and each time has a second
    waiter give up."""
    done = Done()
    with Client(spec.url, job="rival") as rival, Client(spec.url, job="holder") as client:
        for line in sys.stdin:
            for _ in range(int(line)):
                with client.hold(LOCK, job=f"holder-{done.holds}", lock_only=True):
                    with suppress(AcquireTimeoutError):
                        rival.acquire(LOCK, job=f"rival-{done.holds}", lock_only=True, timeout=0)
                    done.timeouts += 1
                done.holds += 1
            print(done.model_dump_json(), flush=True)  # noqa: T201 - to who asked


class _Child:
    """A job in a process of its own, forked, for a new interpreter a job would be most of the run's time."""

    def __init__(self, spec: Spec, group: str, number: int) -> None:
        nodes = sorted(spec.homes)
        node = nodes[number % len(nodes)]
        self.job = f"{group}-{number}"
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._ours.settimeout(WAIT_S)
        self.pid = os.fork()
        if self.pid == 0:
            self._ours.close()
            _live(spec, group, self.job, node, theirs)
        theirs.close()

    def say(self, word: str) -> None:
        self._ours.sendall(word.encode())

    def hear(self, *words: str) -> str:
        said = self._ours.recv(1024).decode()
        if said not in words:
            raise TimeSliceError(f"job {self.job} said {said or 'nothing and ended'!r} instead of {' or '.join(words)}")
        return said

    def end(self) -> None:
        """Its process is over then. Closing alone would tell it nothing: jobs that were forked later have copies."""
        with suppress(OSError):
            self.say("end")
        self._ours.close()
        os.waitpid(self.pid, 0)


def _live(spec: Spec, group: str, job: str, node: str, line: socket.socket) -> NoReturn:
    """In the child. Words heard: ``yield``, ``exit`` and seconds; ``again``, ``end``. Said: ``asks``, ``in`` or
    ``swapped``, or what went wrong."""
    os.environ["TIMESLICE_NODE"] = node
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        client = Client(spec.url, job=job, prefix=spec.prefix)
        arena = Arena(spec.homes[node] / "devices" / group, label=job)
        state: memoryview | None = None
        while True:
            line.sendall(b"asks")
            lease = client.acquire(group, timeout=WAIT_S)
            if state is None:
                state = arena.allocate(SIZE)
                state[: len(job)] = job.encode()
            found = bytes(state[: len(job)])
            entered = b"swapped" if lease.grant.swap_s else b"in"
            line.sendall(entered if found == job.encode() else b"that other state is in its memory: " + found)
            word = line.recv(64)
            client.yield_(lease)
            if word.startswith(b"exit "):
                time.sleep(float(word.split()[1]))
                os._exit(0)
            if line.recv(64) != b"again":
                os._exit(0)
    except BaseException as error:
        with suppress(OSError):
            line.sendall(f"{type(error).__name__}: {error}".encode()[:1000])
        os._exit(1)


class Chain:
    """Jobs of one group, each new one taking the device from the one before."""

    def __init__(self, spec: Spec, group: str) -> None:
        self._spec, self._group = spec, group
        self.done = Done()
        self._inside = self._new()
        self._enter(self._inside)

    def turn(self, *, comes_back: bool = False, exits_after_s: float | None = None) -> None:
        """The next job takes over from the one inside. That one may come back once before. Then it exits so many
        seconds after its yield; by default it ends when the next one is in, suspended."""
        before, after = self._inside, self._new()
        if comes_back:
            self._hand_over(before, after, "yield")
            before.say("again")
            before.hear("asks")
            self._hand_over(after, before, "yield")
            after.say("again")
            after.hear("asks")
        self._hand_over(before, after, "yield" if exits_after_s is None else f"exit {exits_after_s}")
        before.end()
        self._inside = after

    def end(self) -> None:
        self._inside.end()

    def _new(self) -> _Child:
        child = _Child(self._spec, self._group, self.done.jobs)
        self.done.jobs += 1
        child.hear("asks")
        return child

    def _hand_over(self, before: _Child, after: _Child, word: str) -> None:
        before.say(word)
        self._enter(after)

    def _enter(self, child: _Child) -> None:
        if child.hear("in", "swapped") == "swapped":
            self.done.swaps += 1


def jobs(spec: Spec) -> None:
    """Chains of jobs, one a group, each advanced by a process of its own: see ``growth.run``. One group a part."""
    chain = Chain(spec, *spec.groups)
    due = 0
    for line in sys.stdin:
        due += int(line)  # a turn does up to three swaps; what is too much now is less to do next time
        while chain.done.swaps < due:
            number = chain.done.jobs
            chain.turn(comes_back=number % 10 == 0, exits_after_s=0.0 if number % 2 else None)
        print(chain.done.model_dump_json(), flush=True)  # noqa: T201 - to who asked
    chain.end()


ROLES = {"agent": agent, "coordinator": coordinator, "holder": holder, "jobs": jobs}


if __name__ == "__main__":
    ROLES[sys.argv[1]](Spec(**json.loads(sys.argv[2])))
