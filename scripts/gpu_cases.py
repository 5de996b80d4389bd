"""The cases of gpu-check: each starts processes on a device and moves them with the cuda backend as an agent does."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.gpu.node import Node
from tests.support.jobs import JobProcess, process_state, wait_until
from timeslice.backends.base import Context, Job, Selection
from timeslice.backends.cuda import CudaBackend
from timeslice.backends.nvml import Nvml
from timeslice.errors import BackendError
from timeslice.models import Residency

ALL = Selection()
DEADLINE_S = 120.0


class WrongError(Exception):
    """A case found something else than it must."""


class CantTellError(Exception):
    """A case needs what this machine does not have."""


def check(truth: object, what: str) -> None:
    if not truth:
        raise WrongError(what)


@dataclass
class Ground:
    """Where the cases run: one device, and ``nbytes`` for a job."""

    device: str
    name: str
    nbytes: int
    options: dict[str, str]
    folder: Path
    node: Node | None = None
    workers: list[JobProcess] = field(default_factory=list)
    size: int = 0
    seconds: list[float] = field(default_factory=lambda: [0.0, 0.0])

    def backend(self) -> CudaBackend:
        options = {"state": str(self.folder / "marks"), **self.options}
        return CudaBackend(Context(group="check", node="here", accelerators=(self.device,), options=options))

    def start(self, nbytes: int, seed: int = 1) -> JobProcess:
        worker = JobProcess("tests.gpu.worker")
        self.workers.append(worker)
        if nbytes:
            worker.call("allocate", nbytes, seed)
        return worker

    def job(self, *workers: JobProcess) -> Job:
        return Job(group="check", job="a", node="here", targets=tuple(worker.target("a") for worker in workers))

    def free_bytes(self) -> int:
        return Nvml().measure([self.device])[0].free_bytes

    def injects(self) -> Node:
        """The node, to make something go wrong."""
        if self.node is None:
            raise CantTellError("a real driver can't be told to fail")
        return self.node

    async def out(self, backend: CudaBackend, job: Job) -> None:
        began = time.monotonic()
        await backend.prepare(job, ALL, deadline_s=DEADLINE_S)
        outcome = await backend.suspend(job, ALL, deadline_s=DEADLINE_S)
        self.size, self.seconds[0] = outcome.moved_bytes, time.monotonic() - began

    async def back(self, backend: CudaBackend, job: Job) -> None:
        began = time.monotonic()
        await backend.restore(job, ALL, deadline_s=DEADLINE_S)
        await backend.release(job, deadline_s=DEADLINE_S)
        self.seconds[1] = time.monotonic() - began

    def clear(self) -> None:
        """As it was before the case."""
        for worker in self.workers:
            worker.end()
        self.workers.clear()
        self.size, self.seconds = 0, [0.0, 0.0]
        if self.node:
            (self.node.folder / "faults").unlink(missing_ok=True)


async def one_process(ground: Ground) -> None:
    """Out: the device has its memory back. Back: the content is what it was."""
    backend, free = ground.backend(), ground.free_bytes()
    worker = ground.start(ground.nbytes)
    digest, job = worker.call("digest"), ground.job(worker)
    await ground.out(backend, job)
    check((await backend.probe(job)).state is Residency.SUSPENDED, "it is not suspended")
    check(ground.free_bytes() >= free - ground.nbytes // 50, f"{free - ground.free_bytes()} bytes are still taken")
    await ground.back(backend, job)
    check(worker.call("digest") == digest, "its content changed")


async def several_processes(ground: Ground) -> None:
    """All of a job leave and come back."""
    backend = ground.backend()
    workers = [ground.start(ground.nbytes // 4, seed) for seed in (1, 2, 3)]
    digests = [worker.call("digest") for worker in workers]
    await ground.out(backend, ground.job(*workers))
    await ground.back(backend, ground.job(*workers))
    check([worker.call("digest") for worker in workers] == digests, "content changed")


async def no_context(ground: Ground) -> None:
    """A process without a context is none of the move."""
    backend, bare, worker = ground.backend(), ground.start(0), ground.start(ground.nbytes // 4)
    job = ground.job(bare, worker)
    await ground.out(backend, job)
    check((await backend.probe(job)).state is Residency.SUSPENDED, "it does not count as suspended")
    await ground.back(backend, job)
    check(bare.call("ping") == bare.pid, "the process without a context is gone")


async def repeated_steps(ground: Ground) -> None:
    """Each step twice does what it does once, also for a new agent."""
    worker = ground.start(ground.nbytes // 4)
    digest, job = worker.call("digest"), ground.job(worker)
    for _ in range(2):
        await ground.backend().prepare(job, ALL, deadline_s=DEADLINE_S)
    for _ in range(2):
        await ground.backend().suspend(job, ALL, deadline_s=DEADLINE_S)
    for _ in range(2):
        await ground.backend().restore(job, ALL, deadline_s=DEADLINE_S)
    for _ in range(2):
        await ground.backend().release(job, deadline_s=DEADLINE_S)
    check(worker.call("digest") == digest, "its content changed")


async def undone_prepare(ground: Ground) -> None:
    """After abort the job runs as if nothing had been asked."""
    backend, worker = ground.backend(), ground.start(ground.nbytes // 4)
    digest, job = worker.call("digest"), ground.job(worker)
    await backend.prepare(job, ALL, deadline_s=DEADLINE_S)
    await backend.abort(job, deadline_s=DEADLINE_S)
    probe = await backend.probe(job)
    check((probe.state, probe.locked) == (Residency.RESIDENT, False), f"it is {probe.state}, locked {probe.locked}")
    check(worker.call("digest") == digest, "its content changed")


async def turns(ground: Ground) -> None:
    """Two jobs take turns, one out before the other comes in."""
    backend = ground.backend()
    first = ground.start(ground.nbytes, 1)
    digests = [first.call("digest")]
    await ground.out(backend, ground.job(first))
    second = ground.start(ground.nbytes, 2)
    digests.append(second.call("digest"))
    await ground.out(backend, ground.job(second))
    await ground.back(backend, ground.job(first))
    check(first.call("digest") == digests[0], "the first one's content changed")
    await ground.out(backend, ground.job(first))
    await ground.back(backend, ground.job(second))
    check(second.call("digest") == digests[1], "the second one's content changed")


async def memory_short(ground: Ground) -> None:
    """A restore that does not fit is not tried; with room again it works."""
    backend, worker = ground.backend(), ground.start(ground.nbytes)
    digest, job = worker.call("digest"), ground.job(worker)
    await ground.out(backend, job)
    squatter = ground.start(0)
    squatter.call("reserve", ground.free_bytes() - ground.nbytes // 2)
    await must_fail(backend.restore(job, ALL, deadline_s=DEADLINE_S), str(squatter.pid))
    squatter.end()
    await ground.back(backend, job)
    check(worker.call("digest") == digest, "its content changed")


async def stopped_process(ground: Ground) -> None:
    """One that its user stopped moves all the same, and stays stopped."""
    backend, worker = ground.backend(), ground.start(ground.nbytes // 4)
    digest, job = worker.call("digest"), ground.job(worker)
    os.kill(worker.pid, signal.SIGSTOP)
    wait_until(lambda: process_state(worker.pid) == "T", "stopped")
    await ground.out(backend, job)
    await ground.back(backend, job)
    check(process_state(worker.pid) == "T", "it was left running")
    os.kill(worker.pid, signal.SIGCONT)
    check(worker.call("digest") == digest, "its content changed")


async def killed_while_out(ground: Ground) -> None:
    """A process that ends while it is out leaves nothing behind."""
    backend, free = ground.backend(), ground.free_bytes()
    worker = ground.start(ground.nbytes // 4)
    job = ground.job(worker)
    await ground.out(backend, job)
    worker.end()
    await ground.back(backend, job)
    check((await backend.probe(job)).state is Residency.ABSENT, "it does not count as absent")
    wait_until(lambda: ground.free_bytes() >= free - ground.nbytes // 50, "its memory is free")


async def undone_failure(ground: Ground) -> None:
    """The second checkpoint of two fails: both run where they were."""
    node, backend = ground.injects(), ground.backend()
    workers = [ground.start(ground.nbytes // 4, seed) for seed in (1, 2)]
    digests = [worker.call("digest") for worker in workers]
    node.set("checkpoint-fails", "every:2")
    job = ground.job(*workers)
    await must_fail(ground.out(backend, job), "Could not checkpoint")
    check((await backend.probe(job)).state is Residency.RESIDENT, "it is not back on the device")
    check([worker.call("digest") for worker in workers] == digests, "content changed")


async def lock_fails_now_and_then(ground: Ground) -> None:
    """Passing failures of locks are none of the job."""
    node, backend, worker = ground.injects(), ground.backend(), ground.start(ground.nbytes // 4)
    node.set("lock-fails", "every:2")
    for _ in range(3):
        await ground.out(backend, ground.job(worker))
        await ground.back(backend, ground.job(worker))


async def wrong_device(ground: Ground) -> None:
    """A restore to another device is noticed and undone."""
    node, backend, worker = ground.injects(), ground.backend(), ground.start(ground.nbytes // 4)
    other = Nvml().devices()[-1].uuid
    job = ground.job(worker)
    await ground.out(backend, job)
    node.set("restore-lands", other)
    await must_fail(backend.restore(job, ALL, deadline_s=DEADLINE_S), other)
    check((await backend.probe(job)).state is Residency.SUSPENDED, "it is not out again")
    node.set("restore-lands", ground.device)
    await ground.back(backend, job)


async def nothing_freed(ground: Ground) -> None:
    """A checkpoint that claims success and frees nothing is measured."""
    node, backend, worker = ground.injects(), ground.backend(), ground.start(ground.nbytes // 4)
    node.set("checkpoint-frees", "nothing")
    job = ground.job(worker)
    await backend.prepare(job, ALL, deadline_s=DEADLINE_S)
    outcome = await backend.suspend(job, ALL, deadline_s=DEADLINE_S)
    check(outcome.freed_bytes == 0, f"{outcome.freed_bytes} bytes are said to be free")


Case = Callable[[Ground], Awaitable[None]]
CASES: tuple[Case, ...] = (
    one_process, several_processes, no_context, repeated_steps, undone_prepare, turns, memory_short, stopped_process,
    killed_while_out, undone_failure, lock_fails_now_and_then, wrong_device, nothing_freed,
)  # fmt: skip


async def must_fail(step: Awaitable[object], word: str) -> None:
    try:
        await step
    except BackendError as error:
        check(word in str(error), f"the fault does not name {word}: {error}")
    else:
        raise WrongError("it was not refused")
