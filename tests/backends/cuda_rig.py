"""A ``cuda`` backend on a node of stand-ins for GPUs, and processes that compute there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.backends.conftest import ALL, DEADLINE_S, MIB, MakeNode
from tests.gpu.node import Node, uuid
from tests.support.jobs import JobProcess
from timeslice.backends.base import Context, Job, Outcome
from timeslice.backends.cuda import CudaBackend
from timeslice.errors import BackendError
from timeslice.models import Target

SIZE = 2 * MIB
FIRST, SECOND, THIRD = uuid(0), uuid(1), uuid(2)


@dataclass
class CudaRig:
    """Three devices of 8 MiB; the group has the first two."""

    node: Node
    folder: Path
    processes: list[JobProcess] = field(default_factory=list)
    backend: CudaBackend = field(init=False)

    def __post_init__(self) -> None:
        self.restart()

    def restart(self, **options: str) -> None:
        """A new backend, as in an agent that started again. Its marks are where the old one left them."""
        context = Context(
            group="g", node="n1", accelerators=(FIRST, SECOND), options={"state": str(self.folder / "marks"), **options}
        )
        self.backend = CudaBackend(context)

    def start(self, nbytes: int = SIZE, *, device: int = 0, flags: str = "") -> JobProcess:
        """A process that allocated this much; with none, one without a context. ``flags``: see stub/state.h."""
        process = JobProcess("tests.gpu.worker")
        self.processes.append(process)
        if nbytes:
            process.call("allocate", nbytes, len(self.processes), device)
        if flags:
            lines = [line for line in self.node.read(process.pid) if not line.startswith("flags")]
            self.node.write(process.pid, *lines, f"flags {flags}")
        return process

    def job(self, *processes: JobProcess, **fields: object) -> Job:
        targets = tuple(process.target("a").model_copy(update=fields) for process in processes)
        return Job(group="g", job="a", node="n1", targets=targets)

    def targets(self, *processes: JobProcess) -> list[Target]:
        return list(self.job(*processes).targets)

    def states(self) -> list[str]:
        return [self.node.state(process.pid) for process in self.processes]

    def faults(self) -> str:
        path = self.node.folder / "faults"
        return path.read_text() if path.exists() else ""

    async def out(self, job: Job, deadline_s: float = DEADLINE_S) -> Outcome:
        await self.backend.prepare(job, ALL, deadline_s=deadline_s)
        return await self.backend.suspend(job, ALL, deadline_s=deadline_s)

    async def back(self, job: Job, deadline_s: float = DEADLINE_S) -> None:
        await self.backend.restore(job, ALL, deadline_s=deadline_s)
        await self.backend.release(job, deadline_s=deadline_s)

    async def refused(self, job: Job, match: str, deadline_s: float = DEADLINE_S) -> BackendError:
        """The fault of a prepare that must not work; nothing was touched."""
        before = self.states()
        with pytest.raises(BackendError, match=match) as caught:
            await self.backend.prepare(job, ALL, deadline_s=deadline_s)
        assert self.states() == before
        return caught.value


@pytest.fixture
def cuda(make_node: MakeNode, tmp_path: Path) -> Iterator[CudaRig]:
    """Import it into a test module to use it."""
    rig = CudaRig(make_node((8 * MIB,) * 3), tmp_path)
    yield rig
    for process in rig.processes:
        process.end()
