"""A demo job's state is device memory."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import numpy as np
import pytest

from timeslice.arena import Arena, Device
from timeslice.demo.grpo import Array, Rollouts, Work
from timeslice.demo.job import GROUPS, SAMPLERS, TRAINERS, Job, Log, loop
from timeslice.demo.verifier import score

WORK = Work(modulus=3, width=64, prompts=8, samples=4, minibatches=2, replayed=4)


def verify(modulus: int, rollouts: Rollouts) -> Array:
    return np.array(score(modulus, rollouts.prompts.tolist(), rollouts.tokens.tolist()), float)


def free(_group: str, _phase: str, _step: int) -> AbstractContextManager[object]:
    """A phase without a hold."""
    return nullcontext()


@contextmanager
def devices(folder: Path) -> Iterator[dict[str, Arena]]:
    """An arena on a small device of its own for each group."""
    made = {group: Device.create(folder / group, 1 << 20) for group in GROUPS}
    arenas = {group: Arena(device) for group, device in made.items()}
    try:
        yield arenas
    finally:
        for group in GROUPS:
            arenas[group].close()
            made[group].destroy(force=True)


@pytest.fixture
def arenas(tmp_path: Path) -> Iterator[dict[str, Arena]]:
    with devices(tmp_path) as made:
        yield made


def run(job: Job, steps: int = 3) -> tuple[list[float], str]:
    return loop(job, steps, verify, free, Log(io.StringIO()))


def flip(arena: Arena, piece: int) -> None:
    """Change one byte of a suspended arena's saved copy: the highest of the first non-zero number."""
    allocation = arena._pieces[piece].allocation
    words = np.frombuffer(os.pread(allocation.host_fd, allocation.size, 0), np.uint32)
    at = 4 * int(np.flatnonzero(words)[0]) + 1
    byte = os.pread(allocation.host_fd, 1, at)[0]
    os.pwrite(allocation.host_fd, bytes([byte ^ 0x80]), at)


def two_steps(arenas: dict[str, Arena], between: Callable[[], None]) -> bytes:
    """The parameters after two steps, with something done between them."""
    job = Job(WORK, arenas)
    rollouts = job.generate(0, None)
    trained = job.train(rollouts, verify(WORK.modulus, rollouts))
    between()
    rollouts = job.generate(1, trained)
    return job.train(rollouts, verify(WORK.modulus, rollouts)).tobytes()


def suspended(arenas: dict[str, Arena], change: Callable[[], None] = lambda: None) -> bytes:
    """As above, with the whole state suspended between the steps and ``change`` done to the saved copy."""

    def between() -> None:
        for arena in arenas.values():
            assert arena.suspend() == arena.bytes_allocated > 0
            assert arena.bytes_on_device == 0
        change()
        for arena in arenas.values():
            arena.resume()

    return two_steps(arenas, between)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    with devices(tmp_path_factory.mktemp("undisturbed")) as arenas:
        return two_steps(arenas, lambda: None)


def test_a_suspend_changes_nothing(arenas: dict[str, Arena], undisturbed: bytes) -> None:
    """Suspended and resumed between its steps, a job computes the same bits as if it had been alone."""
    assert suspended(arenas) == undisturbed


# Allocations in the order in which grpo.py makes them.
@pytest.mark.parametrize(
    ("group", "piece"),
    [
        pytest.param(SAMPLERS, 0, id="base on the samplers"),
        pytest.param(TRAINERS, 0, id="base on the trainers"),
        pytest.param(TRAINERS, 1, id="trained parameters"),
        pytest.param(TRAINERS, 3, id="first moment of Adam"),
        pytest.param(TRAINERS, 4, id="second moment of Adam"),
        pytest.param(TRAINERS, 5, id="count of updates"),
        pytest.param(TRAINERS, 11, id="rollout buffer"),
        pytest.param(TRAINERS, 12, id="advantages in the rollout buffer"),
    ],
)
def test_one_flipped_byte_of_the_saved_state_changes_the_result(
    arenas: dict[str, Arena], undisturbed: bytes, group: str, piece: int
) -> None:
    """What is saved is what the job computes with afterwards: there is no copy of it elsewhere."""
    assert suspended(arenas, lambda: flip(arenas[group], piece)) != undisturbed


def test_everything_large_is_on_the_device(arenas: dict[str, Arena]) -> None:
    """Base, parameters, moments and buffers are all accounted for by the two devices."""
    run(Job(WORK, arenas))
    base = WORK.width**2 * 4
    trained = WORK.trained * 4
    assert arenas[SAMPLERS].bytes_allocated > base + trained + 2 * WORK.batch * WORK.width * 4
    assert arenas[TRAINERS].bytes_allocated > base + 4 * trained + 3 * WORK.batch // 2 * 3 * WORK.width * 4


def test_the_log_tells_rewards_as_they_come(arenas: dict[str, Arena]) -> None:
    """Each step's reward is one line of JSON, with a time that rises."""
    text = io.StringIO()
    rewards, digest = loop(Job(WORK, arenas), 3, verify, free, Log(text))
    lines = [json.loads(line) for line in text.getvalue().splitlines()]
    assert [line["reward"] for line in lines if line["kind"] == "reward"] == rewards
    assert [line["at"] for line in lines] == sorted(line["at"] for line in lines)
    assert len(digest) == 64
