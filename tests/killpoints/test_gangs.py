"""Killed at what ranks of a gang, yield points and phases write: who is left gets in again, and nothing stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.client.faces import in_thread
from tests.client.world import World
from tests.support.jobs import DEADLINE_S, wait_until
from timeslice.client.sync import Client
from timeslice.embedded import EmbeddedServer

pytestmark = [pytest.mark.timeout(90)]

IN_A_GANG = ("join", "point")
TOLD = "phase"
# Hears `point` and `leave`. Whoever loses its lease, or waits for a gang that is none any more, asks again.
RANK = """
import select, sys
from timeslice.torture import killpoints
spec, url, rank = sys.argv[1:]
if spec:
    killpoints.arm(spec)
from timeslice.client import core
from timeslice.client.sync import Client
from timeslice.errors import GangEndedError, LeaseError
core.WAITER_TTL_MS = 2000
with Client(url, "ranks") as client:
    while True:
        try:
            with client.hold("g", lock_only=True, lease=3.0, rank=int(rank), world_size=2, timeout=60.0) as lease:
                while True:
                    print("inside", lease.fencing_token, flush=True)
                    while not select.select([sys.stdin], [], [], 0.05)[0]:
                        lease.ensure_held()
                    if sys.stdin.readline().strip() == "leave":
                        break
                    lease.yield_point(min_slice=0)
            break
        except (GangEndedError, LeaseError) as error:
            print(type(error).__name__, flush=True)
print("done", flush=True)
"""
ALONE = """
import sys
from timeslice.torture import killpoints
spec, url = sys.argv[1:]
killpoints.arm(spec)
from timeslice.client import core
from timeslice.client.sync import Client
core.WAITER_TTL_MS = 2000
with Client(url, "alone") as client, client.hold("g", lock_only=True, lease=3.0) as lease:
    print("inside", flush=True)
    sys.stdin.readline()
    lease.yield_point(min_slice=0)
"""
TELLS = """
import sys
from timeslice.torture import killpoints
spec, url = sys.argv[1:]
killpoints.arm(spec)
import timeslice
with timeslice.phase("verify", job="a", groups=["g"], url=url):
    sys.stdin.readline()
"""
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def world(server: EmbeddedServer, prefix: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setenv("TIMESLICE_PREFIX", prefix)
    made = World(server.url, prefix)
    yield made
    made.close()


@pytest.fixture
def start(server: EmbeddedServer, world: World) -> Iterator[Start]:  # in its prefix
    """Runs code with a kill point, or ''."""
    with ExitStack() as stack:

        def run(code: str, spec: str, *arguments: str) -> subprocess.Popen[str]:
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            line = [sys.executable, "-c", code, spec, server.url, *arguments]
            process: subprocess.Popen[str] = stack.enter_context(subprocess.Popen(line, env=dict(os.environ), **pipes))
            stack.callback(process.kill)
            return process

        yield run


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("first", ["the dead", "the other"])
def test_a_rank_killed_when_it_asks(start: Start, world: World, first: str, when: str) -> None:
    """As the first of its gang or as the one that completes it: with the process that is started in its place the
    gang gets in, and the group is free after it."""
    spec = f"client:join:{when}:1"
    if first == "the other":
        other = start(RANK, "", "1")
        wait_until(lambda: [len(gang.parties) for gang in world.view().forming] == [1], "it has asked")
        doomed = start(RANK, spec, "0")
    else:
        doomed = start(RANK, spec, "0")
        assert doomed.wait(DEADLINE_S) == -signal.SIGKILL
        other = start(RANK, "", "1")
    assert doomed.wait(DEADLINE_S) == -signal.SIGKILL
    both_inside(world, start(RANK, "", "0"), other)
    is_free(world)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_rank_killed_at_a_yield_point(start: Start, world: World, when: str) -> None:
    """Who waits gets in whether the other rank was told to yield or not; then the gang does, with a new process."""
    doomed, other = start(RANK, f"client:point:{when}:1", "0"), start(RANK, "", "1")
    assert said(doomed) == said(other)
    with Client(world.url, "rival") as client:
        rival = in_thread(lambda: client.acquire("g", lock_only=True, timeout=60.0))
        world.until_queued("rival")
        tell(doomed, "point")
        assert doomed.wait(DEADLINE_S) == -signal.SIGKILL
        tell(other, "point")
        rival.result(DEADLINE_S).yield_()
    both_inside(world, start(RANK, "", "0"), other)
    is_free(world)


@pytest.mark.parametrize(("verb", "number"), [("yield", 1), ("acquire", 2)])
@pytest.mark.parametrize("when", ["before", "after"])
def test_killed_at_a_yield_point(start: Start, world: World, verb: str, number: int, when: str) -> None:
    """Where it gives the group up and where it asks for it again: who waits gets in, and so does whoever comes next."""
    doomed = start(ALONE, f"client:{verb}:{when}:{number}")
    assert said(doomed) == "inside"
    with Client(world.url, "rival") as client:
        rival = in_thread(lambda: client.acquire("g", lock_only=True, timeout=60.0))
        world.until_queued("rival")
        tell(doomed, "point")
        assert doomed.wait(DEADLINE_S) == -signal.SIGKILL
        rival.result(DEADLINE_S).yield_()
    is_free(world)


@pytest.mark.parametrize("when", ["before", "after"])
def test_killed_while_it_tells_of_a_phase(start: Start, world: World, when: str) -> None:
    """What was sent is told once, and nobody is held up by it."""
    is_free(world)  # so that the group is there
    doomed = start(TELLS, f"client:phase:{when}:1")
    assert doomed.wait(DEADLINE_S) == -signal.SIGKILL
    is_free(world)
    wait_until(lambda: world.event_types().count("PhaseBegan") == (when == "after"), "what was sent is told")


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout
    return process.stdout.readline().strip()


def tell(process: subprocess.Popen[str], word: str) -> None:
    assert process.stdin
    process.stdin.write(f"{word}\n")
    process.stdin.flush()


def both_inside(world: World, *ranks: subprocess.Popen[str]) -> None:
    """These processes get in together, and leave."""
    pids = {str(rank.pid) for rank in ranks}
    wait_until(
        lambda: {str(party.pid) for party in world.view().parties if party.state == "inside"} == pids, "both are in"
    )
    for rank in ranks:
        tell(rank, "leave")
    assert [rank.wait(DEADLINE_S) for rank in ranks] == [0, 0]


def is_free(world: World) -> None:
    """Somebody else gets the group, and it is empty then."""
    with Client(world.url, "witness") as client, client.hold("g", lock_only=True, timeout=60.0):
        pass
    assert (world.holder(), world.queue(), world.view().forming) == ("", [], ())
