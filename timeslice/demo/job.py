"""One job: generate on the samplers, have the answers verified, train on the trainers, again and again.

In the synchronous mode both groups are shared; in the asynchronous one each job has samplers of its own (`ahead`).

Run as ``python -m timeslice.demo.job SPEC`` (JSON). It prints ``ready``, waits for a line on standard input, and dies
when standard input ends early, so that it never outlives who started it. Its state on a device is in an arena
of that device and nowhere else. What travels between the devices goes through host memory: the rollouts to verifier
and trainer, and the trained parameters from the end of one train phase to the start of the next generate phase; both
transfers are made inside the phases and counted in their times.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from pydantic import BaseModel

from timeslice.arena import Arena
from timeslice.demo.grpo import Allocate, Array, Rollouts, Sampler, Trainer, Work

SAMPLERS, TRAINERS = "samplers", "trainers"
GROUPS = (SAMPLERS, TRAINERS)

Inside = Callable[[str, str, int], AbstractContextManager[object]]  # group, phase, step
Verify = Callable[[int, Rollouts], Array]


class Spec(BaseModel):
    """What a job's process is told."""

    job: str
    work: Work
    steps: int
    devices: dict[str, Path]  # group -> folder of its emulated device
    verifier: Path  # socket
    log: Path
    staleness: int | None = None  # of the asynchronous mode; None: synchronous
    channel: bool  # register callbacks; else the agent moves the state from outside
    wait_s: float  # longest wait for a group, and for the verifier


class Log:
    """One line of JSON an entry. Times are of CLOCK_MONOTONIC, which all processes of a machine share."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._writing = threading.Lock()

    def write(self, kind: str, **values: Any) -> None:
        with self._writing:
            self._file.write(json.dumps({"kind": kind, "at": time.monotonic(), **values}) + "\n")
            self._file.flush()


def allocator(arena: Arena) -> Allocate:
    """Arrays in the memory of an arena."""

    def allocate(shape: tuple[int, ...], dtype: Any) -> Array:
        view = arena.allocate(math.prod(shape) * np.dtype(dtype).itemsize)
        return np.frombuffer(view, dtype).reshape(shape)

    return allocate


def state_bytes(work: Work) -> dict[str, int]:
    """Bytes of a job's state on each group's device."""
    sizes = {}
    for group, half in ((SAMPLERS, Sampler), (TRAINERS, Trainer)):
        made: list[int] = []

        def count(shape: tuple[int, ...], dtype: Any, made: list[int] = made) -> Array:
            array = np.zeros(shape, dtype)  # takes no memory until it is touched
            made.append(array.nbytes)
            return array

        half(work, count)
        sizes[group] = sum(made)
    return sizes


class Job:
    """A job's two halves. Each is loaded by its first phase; to be called only while the group is held.

    A half without an arena is on devices of the job's own: its memory is the process's.
    """

    def __init__(self, work: Work, arenas: dict[str, Arena]) -> None:
        self.work = work
        self.arenas = arenas
        self._sampler: Sampler | None = None
        self._trainer: Trainer | None = None

    def generate(self, step: int, trained: Array | None) -> Rollouts:
        """Take over the parameters that the trainer sent, if any, and draw a batch."""
        if self._sampler is None:
            self._sampler = Sampler(self.work, self._allocate(SAMPLERS))
            self._sampler.load()
        if trained is not None:
            self._sampler.trained[:] = trained
        return self._sampler.generate(step)

    def train(self, rollouts: Rollouts, rewards: Array) -> Array:
        """Update, and send the parameters."""
        if self._trainer is None:
            self._trainer = Trainer(self.work, self._allocate(TRAINERS))
            self._trainer.load()
        return self._trainer.train(rollouts, rewards)

    def _allocate(self, group: str) -> Allocate:
        return allocator(self.arenas[group]) if group in self.arenas else np.zeros


def loop(job: Job, steps: int, verify: Verify, inside: Inside, log: Log) -> tuple[list[float], str]:
    """All steps. Returns the mean reward of each, and the SHA-256 of the parameters at the end."""
    rewards: list[float] = []
    trained: Array | None = None
    for step in range(steps):
        with inside(SAMPLERS, "generate", step):
            rollouts = job.generate(step, trained)
        scores = verify(job.work.modulus, rollouts)
        rewards.append(float(scores.mean()))
        log.write("reward", step=step, reward=rewards[-1])
        with inside(TRAINERS, "train", step):
            trained = job.train(rollouts, scores)
    assert trained is not None
    return rewards, hashlib.sha256(trained.tobytes()).hexdigest()


def holding(spec: Spec, log: Log) -> Inside:
    """Phases inside a hold, logged with their times and tokens."""
    from timeslice import hold  # loads the client, now and not in the first phase

    @contextmanager
    def inside(group: str, phase: str, step: int) -> Iterator[None]:
        asked = time.monotonic()
        log.write("asks", group=group, phase=phase, step=step)
        with hold(group, job=spec.job, phase=phase, timeout=spec.wait_s) as lease:
            entered = time.monotonic()
            log.write("enters", group=group, phase=phase, step=step)
            yield
            left = time.monotonic()
        log.write(
            "body",
            group=group,
            phase=phase,
            step=step,
            token=lease.fencing_token,
            asked=asked,
            entered=entered,
            left=left,
            waited_s=lease.grant.waited_s,
            swap_s=lease.grant.swap_s,
            how=lease.grant.how,
        )

    return inside


def main(text: str) -> None:
    """The process of one job."""
    from timeslice import register_arena
    from timeslice.demo.ahead import loop_ahead
    from timeslice.demo.verifier import Verifier

    spec = Spec.model_validate_json(text)
    arenas = {group: Arena(path, label=f"{spec.job}-{group}") for group, path in spec.devices.items()}
    workloads = [register_arena(group, arena, job=spec.job) for group, arena in arenas.items() if spec.channel]
    verifier = Verifier(spec.verifier, spec.wait_s)
    with spec.log.open("w") as file:
        log = Log(file)
        inside = holding(spec, log)
        print("ready", flush=True)  # noqa: T201 - the starter waits for it
        if not sys.stdin.readline():
            return
        threading.Thread(target=_die_with_starter, daemon=True).start()
        log.write("begins")
        try:
            job = Job(spec.work, arenas)
            if spec.staleness is None:
                rewards, digest = loop(job, spec.steps, verifier.rewards, inside, log)
            else:
                rewards, digest = loop_ahead(
                    job, spec.steps, verifier.rewards, inside, log, staleness=spec.staleness, wait_s=spec.wait_s
                )
        finally:
            log.write("ends")
        sizes = {group: arena.bytes_allocated for group, arena in arenas.items()}
        log.write("result", rewards=rewards, sha256=digest, bytes=sizes)
    for workload in workloads:
        workload.close()
    verifier.close()


def _die_with_starter() -> None:
    while os.read(0, 64):  # not sys.stdin: a thread inside its lock would break the interpreter's own end
        pass
    os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1])
