"""The code of the page for accelerate, as two ranks on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.client.world import World
from tests.test_docs import blocks_of
from timeslice.locks import scripts

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "researchers" / "accelerate.md"

# What the page takes as given: a model, its data, and the reader's own functions.
GIVEN = """
import torch
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batches = torch.utils.data.DataLoader([torch.ones(4)] * 8, batch_size=2)
def score(batch):
    return torch.ones(len(batch))
def loss_of(model, batch, rewards):
    return -(model(batch).squeeze(-1) * rewards).mean()
"""


def test_the_page_runs_as_two_ranks(redis_url: str, prefix: str, tmp_path: Path) -> None:
    """Under a launcher the holds of all ranks are one: first load, each step and the checkpoint, each under one lease
    of the job; and the checkpoint is there."""
    world = World(redis_url, prefix)
    world.redis.sadd(world.keys.groups, "trainers")
    world.run(scripts.configure(world.group("trainers"), {}, mode="lock"))
    (block,) = blocks_of(PAGE.read_text())
    script = tmp_path / "page.py"
    script.write_text(GIVEN + block.code)
    run = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)],
        cwd=tmp_path,
        env={
            **os.environ,
            "ACCELERATE_USE_CPU": "true",
            "OMP_NUM_THREADS": "1",
            "TIMESLICE_URL": redis_url,
            "TIMESLICE_PREFIX": prefix,
            "TIMESLICE_JOB": "run-1",
        },
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    granted = [event for event in world.events("trainers") if event["type"] == "LeaseGranted"]
    assert [event["label"] for event in granted] == ["init", "train", "train", "save"]  # 4 batches over 2 ranks
    assert {event["job"] for event in granted} == {"run-1"}
    assert (tmp_path / "checkpoint").is_dir()
    world.close()
