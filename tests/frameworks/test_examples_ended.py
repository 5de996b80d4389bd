"""The examples with frameworks, ended in the middle."""

from __future__ import annotations

import runpy
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

from tests.support.ended import end_in_the_middle

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(
    ("example", "child"),
    [
        ("torch_grpo", "--job"),
        ("jax_ppo", "--job"),
        ("trl_grpo", "--job"),
        ("ray_jobs", "--driver"),
        ("torchrun_gang", " -u "),
    ],  # its ranks
)
def test_an_example_that_is_ended_leaves_nothing(example: str, child: str) -> None:
    """By a plain kill while a job runs: no process, mount or file is left, and no traceback."""
    with tempfile.TemporaryDirectory(prefix="ex") as temporary:
        command = [sys.executable, str(EXAMPLES / f"{example}.py")]
        said = end_in_the_middle(command, signal.SIGTERM, Path(temporary), child)
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("example", "child"),
    [("torch_grpo", "--job"), ("jax_ppo", "--job"), ("trl_grpo", "--job"), ("ray_jobs", "--driver")],
)
def test_ctrl_c_is_the_examples_to_handle(example: str, child: str) -> None:
    """A terminal sends it to all processes: the jobs say nothing of it, and nothing is left."""
    with tempfile.TemporaryDirectory(prefix="ex") as temporary:
        command = [sys.executable, str(EXAMPLES / f"{example}.py")]
        said = end_in_the_middle(command, signal.SIGINT, Path(temporary), child, terminal=True)
    assert "KeyboardInterrupt" not in said


STARTS_A_RANK = """
import subprocess, sys, time
rank = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print(rank.pid, flush=True)
time.sleep(600)  # what it started is not yet noted where it would be ended with it
"""


def test_torchrun_is_ended_with_ranks_that_it_has_not_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun that is killed while it starts its ranks does not end those it has started: the example does."""
    monkeypatch.syspath_prepend(str(EXAMPLES))  # as for a script
    end = runpy.run_path(str(EXAMPLES / "torchrun_gang.py"))["end"]
    with subprocess.Popen([sys.executable, "-c", STARTS_A_RANK], stdout=subprocess.PIPE, text=True) as torchrun:
        assert torchrun.stdout
        rank = psutil.Process(int(torchrun.stdout.readline()))
        end(torchrun)
    rank.wait(60)
    assert not rank.is_running()
