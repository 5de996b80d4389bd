"""Sharded models under the real torchrun: two ranks, gloo, a real agent that moves each rank's shard."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.frameworks.fsdp_ranks import STEPS
from timeslice.up import LocalStack

ROOT = Path(__file__).parents[2]
RANKS = 2

# The other job: takes a turn whenever it can, and counts them.
RIVAL = """
import sys, timeslice
from itertools import count
from pathlib import Path
from torch import nn
from timeslice.integrations.torch import register_module

with timeslice.hold("trainers", timeout=100):
    model = nn.Linear(4, 4)
    register_module("trainers", model)
for turns in count(1):
    with timeslice.hold("trainers", timeout=100):
        pass
    path = Path(sys.argv[1])
    (path / "next").write_text(str(turns))
    (path / "next").replace(path / "rival")
"""


@pytest.fixture
def stack() -> Iterator[LocalStack]:
    local = LocalStack({"trainers": 0})
    try:
        yield local.start()
    finally:
        local.stop()


def train(kind: str, folder: Path, name: str, **environment: str) -> list[dict[str, Any]]:
    """What each rank found."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)),
        *("-m", "tests.frameworks.fsdp_ranks", kind, str(folder)),
    ]
    environment = {**os.environ, "TIMESLICE_JOB": name, "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=115, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((folder / f"{name}-{rank}.json").read_text()) for rank in range(RANKS)]


@contextmanager
def rival(folder: Path, url: str) -> Iterator[None]:
    (folder / "rival").touch()
    environment = {**os.environ, "TIMESLICE_URL": url, "TIMESLICE_JOB": "rival"}
    with subprocess.Popen([sys.executable, "-c", RIVAL, str(folder)], env=environment, cwd=ROOT) as process:
        try:
            yield
            assert process.poll() is None
        finally:
            process.kill()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["fsdp2", "fsdp1", "fsdp1-flat"])
def test_shards_leave_and_come_back(kind: str, tmp_path: Path, stack: LocalStack) -> None:
    """Between any two steps another job has the device. Each rank finds its shard, gradients and optimizer state to the
    bit, in the same Parameter objects, and ends at the same bytes as in a run that nobody interrupted."""
    alone = train(kind, tmp_path, "alone", TIMESLICE_DISABLE="1")
    with rival(tmp_path, stack.url):
        sliced = train(kind, tmp_path, "sliced", TIMESLICE_URL=stack.url)
    for rank, (one, other) in enumerate(zip(alone, sliced, strict=True)):
        assert other["how"] == ["restored"] * STEPS, rank
        assert all(other["same_bytes"])
        assert other["same_objects"]
        assert (one["losses"], one["end"]) == (other["losses"], other["end"])
    assert sliced[0]["end"] != sliced[1]["end"]  # each has its own shard
