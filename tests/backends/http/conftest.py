"""Stand-in servers on one emulated device, and the backend that asks them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import pytest

from tests.servers.processes import ServerProcess
from timeslice.arena import Device
from timeslice.arena.process import start_time_of
from timeslice.backends.base import Context, Job, Selection
from timeslice.backends.http import HttpBackend
from timeslice.models import Residency, Target

MIB = 1 << 20
WEIGHTS, KV_CACHE = 4 * MIB, 2 * MIB
DEADLINE_S = 20.0
ALL = Selection()
DISCARD = Selection(mode="discard")
TAGS = {"vllm": ("weights", "kv_cache"), "sglang": ("weights", "kv_cache", "cuda_graph")}
FLAGS = {"vllm": ("--enable-sleep-mode",), "sglang": ("--enable-memory-saver", "--enable-weights-cpu-backup")}


@dataclass
class Lab:
    """Makes servers, jobs of them, and backends; ``backend`` asks whatever listens on this machine."""

    device: Device
    folder: Path
    servers: list[ServerProcess] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.backend = self.make()

    def make(self, **options: str) -> HttpBackend:
        """With other options, or as in an agent that was started again."""
        given = {"allow": "http://127.0.0.1:*", "state": str(self.folder / "marks"), "timeout": "2"}
        return HttpBackend(Context(group="g", node="n1", devices=(Path(self.device.path),), options=given | options))

    def start(
        self,
        kind: Literal["vllm", "sglang"] = "vllm",
        *more: str,
        flags: tuple[str, ...] | None = None,
        seed: int = 1,
        faults: tuple[str, ...] = (),
        **environment: str,
    ) -> ServerProcess:
        sizes = ("--weights", str(WEIGHTS), "--kv-cache", str(KV_CACHE), "--seed", str(seed))
        wrong = [argument for fault in faults for argument in ("--fault", fault)]
        chosen = FLAGS[kind] if flags is None else flags
        server = ServerProcess(kind, "--device", self.device.path, *sizes, *chosen, *wrong, *more, **environment)
        self.servers.append(server)
        return server

    def target(self, server: ServerProcess, dialect: str = "vllm", **fields: Any) -> Target:
        start = start_time_of(server.pid)
        assert start is not None
        known = Target(
            job="a",
            host="n1",
            pid=server.pid,
            start=start,
            uid=os.getuid(),
            pid_namespace=str(Path("/proc/self/ns/pid").readlink()),
            backend="http",
            endpoints=(server.url,),
            dialect=dialect,
            tags=TAGS[dialect],
        )
        return known.model_copy(update=fields)

    def job(self, *servers: ServerProcess, dialect: str = "vllm", **fields: Any) -> Job:
        targets = tuple(self.target(server, dialect, **fields) for server in servers)
        return Job(group="g", job="a", node="n1", targets=targets)

    async def out(self, job: Job, selection: Selection = ALL, *, deadline_s: float = DEADLINE_S) -> None:
        await self.backend.prepare(job, selection, deadline_s=deadline_s)
        await self.backend.suspend(job, selection, deadline_s=deadline_s)

    async def back(self, job: Job, selection: Selection = ALL) -> None:
        await self.backend.restore(job, selection, deadline_s=DEADLINE_S)

    async def state(self, job: Job) -> Residency:
        return (await self.backend.probe(job)).state


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    device = Device.create(tmp_path / "device", 16 * MIB)
    made = Lab(device, tmp_path)
    yield made
    for server in made.servers:
        server.end()
    device.destroy(force=True)


def of_job(job: Job, **fields: Any) -> Job:
    """The same job with other fields in its targets."""
    return replace(job, targets=tuple(target.model_copy(update=fields) for target in job.targets))
