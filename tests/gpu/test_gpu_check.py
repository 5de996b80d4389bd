"""scripts/gpu-check on stand-ins: what it tells, and that it can fail."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.support.ended import end_in_the_middle
from tests.support.jobs import process_state, wait_until

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


def test_a_wrong_folder_is_said_before_anything_runs(tmp_path: Path) -> None:
    """Minutes of work are not lost to a typing error."""
    command = [sys.executable, str(ROOT / "scripts" / "gpu_check.py"), "--json", str(tmp_path / "no" / "gpu.json")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 2
    assert "does not exist; nothing was run" in done.stderr
    assert done.stdout == ""


def test_ended_in_the_middle_it_leaves_nothing(needs_tool: Any) -> None:
    """By a plain kill while a process is on the device: no process and no file is left."""
    needs_tool("cc")
    command = ["env", f"PYTHONPATH={ROOT}", sys.executable, str(ROOT / "scripts" / "gpu_check.py")]
    with tempfile.TemporaryDirectory(prefix="gc") as temporary:
        end_in_the_middle(command, signal.SIGTERM, Path(temporary), "tests.gpu.worker")


def test_a_case_that_is_interrupted_leaves_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor one that the case had stopped: it would keep its memory on the GPU for ever."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    checks, cases = (importlib.import_module(name) for name in ("gpu_check", "gpu_cases"))
    pids = []

    async def interrupted(ground: Any) -> None:
        pids.append(ground.start(0).pid)
        os.kill(pids[0], signal.SIGSTOP)
        wait_until(lambda: process_state(pids[0]) == "T", "stopped")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        checks.run_case(cases.Ground("GPU-0", "stub", 0, {}, tmp_path), interrupted)
    assert not Path(f"/proc/{pids[0]}").exists()
