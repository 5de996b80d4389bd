"""The asynchronous loop: on a job's own samplers, generation runs ahead of training by a bounded number of updates.

Batch ``k`` is generated with the parameters after update ``max(0, k - staleness)`` and is update ``k`` itself, so what
is trained on is at most ``staleness`` updates old. That lag is the same in every run: so the results can be compared
to the bit. The trainers are asked for when a batch is ready, not when its generation starts.
"""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

from timeslice.demo.grpo import Array, Rollouts
from timeslice.demo.job import TRAINERS, Inside, Job, Log, Verify

Batch = tuple[Rollouts, Array]


def loop_ahead(
    job: Job, steps: int, verify: Verify, inside: Inside, log: Log, *, staleness: int, wait_s: float
) -> tuple[list[float], str]:
    """All steps, as ``timeslice.demo.job.loop``. ``wait_s`` is the longest wait for one batch."""
    rewards: list[float] = []
    trained: Array | None = None

    def make(step: int, parameters: Array | None) -> Batch:
        began = time.monotonic()
        rollouts = job.generate(step, parameters)
        log.write("sampled", step=step, seconds=time.monotonic() - began)
        return rollouts, verify(job.work.modulus, rollouts)

    with _worker() as worker:
        ahead: deque[Future[Batch]] = deque()
        for step in range(min(staleness + 1, steps)):
            ahead.append(worker.submit(make, step, None))
        for step in range(steps):
            log.write("starves", step=step)
            rollouts, scores = ahead.popleft().result(wait_s)
            rewards.append(float(scores.mean()))
            log.write("reward", step=step, reward=rewards[-1])
            with inside(TRAINERS, "train", step):
                trained = job.train(rollouts, scores)
            if (later := step + 1 + staleness) < steps:
                ahead.append(worker.submit(make, later, trained))
    assert trained is not None
    return rewards, hashlib.sha256(trained.tobytes()).hexdigest()


@contextmanager
def _worker() -> Iterator[ThreadPoolExecutor]:
    """The one thread that generates and has verified, batch after batch."""
    worker = ThreadPoolExecutor(1, thread_name_prefix="samplers")
    try:
        yield worker
    finally:
        worker.shutdown(wait=True, cancel_futures=True)
