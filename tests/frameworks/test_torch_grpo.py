"""The example in plain PyTorch, run as its users run it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "torch_grpo.py"


@pytest.mark.timeout(240)
def test_two_jobs_take_turns_and_learn_what_they_learn_alone(tmp_path: Path) -> None:
    """G32: rewards, evaluations and checkpoints, all made inside of holds, are to the bit those of jobs that were
    alone. No two jobs were on the device at once, state moved, and the reference model was copied once a job."""
    report = tmp_path / "torch.json"
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), "--jobs", "2", "--steps", "5", "--json", str(report)],
        capture_output=True,
        text=True,
        timeout=220,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(report.read_text())
    assert (found["results_equal"], found["overlaps"]) == (True, 0)
    assert found["phases"] == ["eval", "generate", "init", "save", "train"]
    assert found["swaps"] > 2
    assert found["bytes_moved"] > found["bytes_saved"] > 5e6
    assert found["gain"] == pytest.approx(found["alone_s"] / found["sliced_s"], rel=0.01)
    for run in found["runs"].values():
        assert (len(run["rewards"]), len(run["evaluations"]), len(set(run["checkpoints"]))) == (5, 3, 3)
        assert run["rewards"][0] < run["rewards"][-1]
    assert found["runs"]["a"]["checkpoints"] != found["runs"]["b"]["checkpoints"]
    assert "job a alone" in done.stdout
    assert "equal to the bit; overlaps on the device: 0" in done.stdout
