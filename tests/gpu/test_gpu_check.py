"""scripts/gpu-check on stand-ins: what it tells, and that it can fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent


def run(path: Path, *words: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "gpu_check.py", "--json", path, *words],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    return done, json.loads(path.read_text())


def test_all_cases_pass_on_stand_ins_and_are_called_so(tmp_path: Path, needs_tool: Any) -> None:
    """No claim of a GPU: the device says stub, the first line says that nothing ran on hardware, no speeds are told."""
    needs_tool("cc")
    done, told = run(tmp_path / "out.json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert told["device"] == "stub (no NVIDIA GPU here)"
    assert "nothing ran on hardware" in done.stdout.splitlines()[0]
    assert "GiB/s" not in done.stdout
    assert told["failed"] == 0
    assert {case["outcome"] for case in told["cases"]} == {"passed"}
    assert len({case["name"] for case in told["cases"]}) == len(told["cases"]) >= 13
    for case in told["cases"]:
        assert f"{case['name']:<26}passed" in done.stdout


def test_a_tool_that_does_not_work_fails_cases(tmp_path: Path, needs_tool: Any) -> None:
    """The exit status and the count say so, each case says why, and health said it before."""
    needs_tool("cc")
    done, told = run(tmp_path / "out.json", "--tool", "/nowhere/cuda-checkpoint")
    assert done.returncode == 1
    assert told["failed"] == len(told["cases"])
    assert all("can't be started" in case["why"] for case in told["cases"])
    assert "! /nowhere/cuda-checkpoint was not found" in done.stdout
