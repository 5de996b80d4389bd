"""Jobs that sample from servers, under a real coordinator and agent with one emulated device."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import pytest

from tests.cli.conftest import cli
from tests.client.conftest import world
from tests.client.world import Job, World
from tests.faults.stack import Background
from tests.servers.processes import ServerProcess
from timeslice.agent.service import AgentOptions, run_agent
from timeslice.arena import Device
from timeslice.coordinator.service import CoordinatorOptions, run_coordinator

__all__ = ["cli", "world"]

MIB = 1 << 20
CAPACITY, WEIGHTS, KV_CACHE = 8 * MIB, 4 * MIB, 2 * MIB  # one server fits, two do not
PROMPT = "why"
Kind = Literal["vllm", "sglang"]
FLAGS: dict[Kind, tuple[str, ...]] = {
    "vllm": ("--enable-sleep-mode",),
    "sglang": ("--enable-memory-saver", "--enable-weights-cpu-backup"),
}
DRIVER = """
    from tests.servers.processes import ServerProcess
    {begin}
    say("up")
    while words := hear().split():
        if words[0] == "close":
            registered.close()
            break
        with timeslice.hold("g", phase=words[0], timeout=60) as lease:
            for seed in words[1:]:
                server.ask("/collective_rpc", {{"method": "push", "args": [seed]}})
            say(lease.needs_weights, "/", lease.grant.how, "/", server.sample("why"))
"""
OWN = """
    with timeslice.hold("g", timeout=60):
        server = ServerProcess({kind!r}, *{arguments}, TIMESLICE_GROUPS="g")
        registered = timeslice.register_server("g", server.url, dialect={kind!r}, {how})
"""
OTHERS = """
    server = ServerProcess.__new__(ServerProcess)
    server.url = {url!r}
    registered = timeslice.register_server("g", {url!r}, dialect="vllm")
"""


def device() -> Path:
    """Folder of the group's emulated device."""
    return Path(os.environ["TIMESLICE_RUNTIME_DIR"]) / "devices" / "g"


def arguments(seed: int, kind: Kind = "vllm") -> list[str]:
    sizes = ["--weights", str(WEIGHTS), "--kv-cache", str(KV_CACHE), "--seed", str(seed)]
    return ["--device", str(device()), *FLAGS[kind], *sizes]


def driver(world: World, job: str, seed: int, how: str = "pid=server.pid", kind: Kind = "vllm") -> Job:
    """A job that starts a server of its own inside of its first hold."""
    own = OWN.format(kind=kind, arguments=arguments(seed, kind), how=how)
    made = world.job(DRIVER.format(begin=own), job=job)
    assert made.line() == "up"
    return made


def stand_in(world: World, job: str, server: ServerProcess) -> Job:
    """A job that registers a server which somebody else started."""
    made = world.job(DRIVER.format(begin=OTHERS.format(url=server.url)), job=job)
    assert made.line() == "up"
    return made


def sample(job: Job, phase: str = "generate") -> list[str]:
    """Let it hold and sample: whether it needs weights, how it was granted, what the server said."""
    job.tell(phase)
    return [word.strip() for word in job.line().split("/")]


Daemons = Callable[..., None]


@pytest.fixture
def daemons(world: World, prefix: str, tmp_path: Path) -> Iterator[Daemons]:
    """Start a coordinator and the agent of node n1, which serves g and may ask any server of this machine."""
    running: list[Background] = []

    def start(allow: str = "http://127.0.0.1:*") -> None:
        coordinator = CoordinatorOptions(url=world.url, prefix=prefix, name="c1")
        agent = AgentOptions(
            url=world.url,
            prefix=prefix,
            node="n1",
            groups=("g",),
            state_dir=tmp_path / "agent",
            emulate={"g": CAPACITY},
            backends={"g": [f"http:allow={allow},state={tmp_path / 'marks'}"]},
            ttl_s=3.0,
            leave=True,
        )
        running.append(Background("c1", lambda stop, ready: run_coordinator(coordinator, stop=stop, ready=ready)))
        running.append(Background("n1", lambda stop, ready: run_agent(agent, stop=stop, ready=ready)))

    yield start
    for each in reversed(running):
        each.stop()
    if device().exists():
        Device.open(device()).destroy(force=True)


@pytest.fixture
def alone() -> Callable[[int], str]:
    """What a server with these weights says, with no other job and no agent near it."""

    def say(seed: int) -> str:
        server = ServerProcess("vllm", "--weights", str(WEIGHTS), "--seed", str(seed))
        try:
            return server.sample(PROMPT)
        finally:
            server.end()

    return say
