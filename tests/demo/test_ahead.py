"""Samplers that run ahead: bounded, repeatable, and off the trainers."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from timeslice.demo.ahead import loop_ahead
from timeslice.demo.grpo import Array, Rollouts, Work
from timeslice.demo.job import TRAINERS, Job, Log
from timeslice.demo.verifier import score

WORK = Work(modulus=3, width=32, prompts=4, samples=4, minibatches=2, replayed=2)
STEPS = 7


class Recorder(Job):
    """A job that notes how far training was when a batch was generated."""

    def __init__(self) -> None:
        super().__init__(WORK, {})
        self.sent: list[Array] = []  # parameters after each update
        self.made: list[int] = []  # by batch: the update after which its parameters were sent
        self.behind: list[int] = []  # by batch: updates between its parameters and its own

    def generate(self, step: int, trained: Array | None) -> Rollouts:
        version = next((n for n, each in enumerate(self.sent, start=1) if each is trained), 0)
        self.made.append(version)
        return super().generate(step, trained)

    def train(self, rollouts: Rollouts, rewards: Array) -> Array:
        self.behind.append(len(self.sent) - self.made[len(self.sent)])
        self.sent.append(super().train(rollouts, rewards))
        return self.sent[-1]


def verify(modulus: int, rollouts: Rollouts) -> Array:
    return np.array(score(modulus, rollouts.prompts.tolist(), rollouts.tokens.tolist()), float)


@contextmanager
def free(_group: str, _phase: str, _step: int) -> Iterator[None]:
    yield


def run(job: Job, staleness: int) -> tuple[list[float], str]:
    return loop_ahead(job, STEPS, verify, free, Log(io.StringIO()), staleness=staleness, wait_s=30)


@pytest.mark.parametrize("staleness", [1, 2, 20])
def test_no_batch_is_older_than_allowed(staleness: int) -> None:
    """What is trained on was generated at most so many updates ago, and as many once it has run in."""
    job = Recorder()
    rewards, _ = run(job, staleness)
    assert len(rewards) == STEPS
    assert job.behind == [min(step, staleness) for step in range(STEPS)]


def test_two_runs_are_equal_to_the_bit() -> None:
    """However fast the samplers were."""
    assert run(Job(WORK, {}), 2) == run(Job(WORK, {}), 2)


def test_a_batch_is_made_while_another_is_trained_on() -> None:
    """The second batch is verified inside of the first update: neither waits for the other's devices."""
    inside, verified = threading.Event(), threading.Event()
    batches = iter(range(STEPS))

    def slow(modulus: int, rollouts: Rollouts) -> Array:
        if next(batches) == 1:
            assert inside.wait(30)
            verified.set()
        return verify(modulus, rollouts)

    @contextmanager
    def hold(group: str, _phase: str, step: int) -> Iterator[None]:
        assert group == TRAINERS
        if step == 0:
            inside.set()
            assert verified.wait(30)
        yield

    text = io.StringIO()
    loop_ahead(Job(WORK, {}), STEPS, slow, hold, Log(text), staleness=1, wait_s=30)
    assert sum(json.loads(line)["kind"] == "sampled" for line in text.getvalue().splitlines()) == STEPS


def test_a_verifier_that_fails_ends_the_job() -> None:
    """Its error comes out of the loop, and no thread is left."""

    def broken(_modulus: int, _rollouts: Rollouts) -> Array:
        raise ConnectionError("the verifier ended")

    with pytest.raises(ConnectionError, match="the verifier ended"):
        loop_ahead(Job(WORK, {}), STEPS, broken, free, Log(io.StringIO()), staleness=2, wait_s=30)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("samplers")]
