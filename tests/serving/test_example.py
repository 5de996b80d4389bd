"""The example with two jobs that sample from servers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


def test_two_samplers_take_turns(tmp_path: Path) -> None:
    """Same texts as alone, nobody at once, turns that alternate with tokens that rise. G20: a request to a sleeper is
    refused and does not hang. G31: probes that know of sleep take no sleeper for dead."""
    path = tmp_path / "out.json"
    command = [sys.executable, "examples/vllm_sampler/run.py", "--jobs", "2", "--json", str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(path.read_text())
    assert (found["results_equal"], found["overlaps"], found["jobs"]) == (True, 0, 2)
    assert len(set(found["texts"].values())) == 2
    assert found["switches"] >= 2
    tokens = [turn["token"] for turn in found["turns"]]
    assert tokens == sorted(set(tokens))
    assert {turn["how"] for turn in found["turns"]} <= {"restored", "no-op"}
    assert found["sleeper_refused"]
    assert found["probes_of_sleepers"] > 0
    assert found["probes_that_saw_death"] == 0
    assert "overlaps 0" in done.stdout


@pytest.mark.parametrize("example", ["vllm_sampler/run", "jax_ppo", "trl_grpo", "torchrun_gang"])
def test_a_file_that_can_not_be_written_is_told_before_anything_runs(tmp_path: Path, example: str) -> None:
    """And not after minutes of work, by a traceback."""
    command = [sys.executable, f"examples/{example}.py", "--json", str(tmp_path / "nowhere" / "out.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 2
    assert "nothing was run" in done.stderr
    assert done.stdout == ""


def test_jobs_that_fail_are_told(tmp_path: Path) -> None:
    """One whose name means nothing: the status is not 0, and the end of the job's log is printed."""
    command = [sys.executable, "-c", FAILING, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 1
    assert "job a b failed" in done.stderr
    assert "TIMESLICE_JOB" in done.stderr


FAILING = """
import pathlib, sys
sys.path.insert(0, "examples/vllm_sampler")
import run
run.together(pathlib.Path(sys.argv[1]), {"a b": 1})
"""
