"""One rig a backend: a server, devices and processes, so that the conformance suite need not know which it tests."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.gpu.build import build
from tests.gpu.inprocess import nvml_of
from tests.gpu.node import Node, uuid
from tests.support.jobs import JobProcess
from timeslice.agent.channels import StreamChannel
from timeslice.arena import Device
from timeslice.backends.arena import ArenaBackend
from timeslice.backends.base import Backend, Context, Job, Selection
from timeslice.backends.checkpoint_tool import CheckpointBackend
from timeslice.backends.registry import get_backend
from timeslice.locks.drivers import AsyncDriver
from timeslice.locks.keys import Keys
from timeslice.models import Target

MIB = 1 << 20
CAPACITY = 16 * MIB
SIZE = 10 * MIB  # of one job: two do not fit
DEADLINE_S = 20.0
ALL = Selection()
OPTIONS: dict[str, Callable[[Path], dict[str, str]]] = {
    "process": lambda folder: {"state": str(folder / "marks")},
    "composite": lambda _: {"stages": "channel+arena"},
    "cuda by tool": lambda folder: {"state": str(folder / "marks")},
    "cuda by driver": lambda folder: {"state": str(folder / "marks"), "driver": "api"},
    "cuda by toggle": lambda folder: {"state": str(folder / "marks")},
    "http": lambda folder: {"allow": "http://127.0.0.1:*", "state": str(folder / "marks")},
}


class ToolObservedArena(ArenaBackend):
    """Asks the tool for the state before each step, as backends of real devices must."""

    state_of = CheckpointBackend.state_of


@dataclass(kw_only=True)
class Worker:
    """A process of a job, and how the backend knows it."""

    process: JobProcess
    target: Target
    digest: str = ""

    def content_is_intact(self) -> bool:
        return not self.digest or self.process.call("digest") == self.digest

    def answers(self) -> bool:
        return bool(self.process.call("ping") == self.process.pid)


@dataclass(kw_only=True)
class Rig:
    """Makes a backend and workers for it."""

    kind: str
    context: Context
    url: str
    prefix: str
    node: Node | None = None  # of stand-ins for GPUs
    backend: Backend = field(init=False)
    workers: list[Worker] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.restart()

    @property
    def moves(self) -> bool:
        """True if it moves device memory, so that content and space can be looked at."""
        return self.kind not in ("noop", "process")

    @property
    def device(self) -> Device:
        return Device.open(self.context.devices[0])

    def used_bytes(self) -> int:
        """What is taken on the device, by its own word."""
        return self.node.used() if self.node else self.device.used_bytes()

    def restart(self) -> None:
        """A new instance, as in an agent that was killed and started again."""
        if self.kind == "arena by tool":
            self.backend = ToolObservedArena(self.context)
        else:
            self.backend = get_backend("cuda" if self.node else self.kind, self.context)

    def start(self, job: str = "a", nbytes: int = SIZE, seed: int = 1) -> Worker:
        process = JobProcess("tests.gpu.worker" if self.node else "tests.backends.worker")
        worker = Worker(process=process, target=process.target(job))
        self.workers.append(worker)
        if self.kind == "http":
            url = process.call("server", self.device.path, nbytes, seed)
            fields = {"backend": "http", "endpoints": (url,), "dialect": "vllm", "tags": ("weights", "kv_cache")}
            worker.target = worker.target.model_copy(update=fields)
            worker.digest = process.call("digest")
        elif self.node:
            worker.digest = process.call("allocate", nbytes, seed) if nbytes else process.call("context") or ""
        elif self.moves:
            process.call("arena", self.device.path)
            if self.kind in {"channel", "composite"}:
                part = "workload" if self.kind == "channel" else "application"
                record = process.call(part, self.url, self.prefix, self.context.group, job)
                worker.target = Target.model_validate_json(record)
            if nbytes and self.kind == "composite":
                process.call("keep", nbytes // 2, seed)
                nbytes -= nbytes // 2
            if nbytes:
                worker.digest = process.call("allocate", nbytes, seed)
        return worker

    def job(self, *workers: Worker, name: str = "a") -> Job:
        targets = tuple(worker.target for worker in workers)
        return Job(group=self.context.group, job=name, node=self.context.node, targets=targets)

    async def out(self, job: Job, *, deadline_s: float = DEADLINE_S) -> None:
        await self.backend.prepare(job, ALL, deadline_s=deadline_s)
        await self.backend.suspend(job, ALL, deadline_s=deadline_s)

    async def back(self, job: Job, *, deadline_s: float = DEADLINE_S) -> None:
        await self.backend.restore(job, ALL, deadline_s=deadline_s)
        await self.backend.release(job, deadline_s=deadline_s)


MakeRig = Callable[[str], Rig]
MakeNode = Callable[[tuple[int, ...]], Node]


@pytest.fixture
def make_node(
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    needs_tool: Callable[[str], str],
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[MakeNode]:
    """A node with stand-ins for GPUs of these sizes, which this process and those that it starts see. Whoever runs the
    tests counts as root there."""
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    with ExitStack() as stack:

        def make(sizes: tuple[int, ...]) -> Node:
            libraries = tmp_path_factory.getbasetemp() / "stub-gpu"
            if not libraries.exists():
                build(libraries, needs_tool("cc"))
            node = Node.make(tmp_path / "gpu", libraries, sizes)
            for name, value in node.environment.items():
                monkeypatch.setenv(name, value)
            stack.enter_context(nvml_of(node))
            return node

        yield make


@pytest.fixture
def device(tmp_path: Path) -> Iterator[Device]:
    made = Device.create(tmp_path / "device", CAPACITY)
    yield made
    made.destroy(force=True)


@pytest.fixture
async def make_rig(
    device: Device,
    redis_url: str,
    prefix: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    make_node: MakeNode,
) -> AsyncIterator[MakeRig]:
    monkeypatch.setenv("TIMESLICE_NODE", "n1")  # for the workers
    driver = AsyncDriver(redis_url)
    rigs: list[Rig] = []

    def make(kind: str) -> Rig:
        node = make_node((CAPACITY,)) if kind.startswith("cuda") else None
        if node and kind == "cuda by toggle":
            node.set("driver", 550)
        context = Context(
            group="trainers",
            node="n1",
            devices=() if node else (Path(device.path),),
            accelerators=(uuid(0),) if node else (),
            channel=StreamChannel(driver, Keys(prefix), lambda *_: None),
            options=OPTIONS[kind](tmp_path) if kind in OPTIONS else {},
        )
        rig = Rig(kind=kind, context=context, url=redis_url, prefix=prefix, node=node)
        rigs.append(rig)
        return rig

    yield make
    for rig in rigs:
        for worker in rig.workers:
            worker.process.end()
    await driver.close()


CUDA = ["cuda by tool", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("cuda by driver", "cuda by toggle"))]

# Those that differ from another one only in whom they ask for the state or how they tell it what to do. Each has a test
# of its own in the fast tier all the same: a restore that fails, and is tried again.
VARIANTS = [
    pytest.param(kind, marks=pytest.mark.slow) for kind in ("arena by tool", "cuda by driver", "cuda by toggle")
]


@pytest.fixture(params=["arena", "cuda by tool", "channel", "http", "composite", "process", "noop", *VARIANTS])
def rig(request: pytest.FixtureRequest, make_rig: MakeRig) -> Rig:
    """Each backend in turn."""
    return make_rig(request.param)
