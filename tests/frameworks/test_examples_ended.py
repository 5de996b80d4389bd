"""The examples with frameworks, ended in the middle."""

from __future__ import annotations

import signal
import sys
import tempfile
from pathlib import Path

import pytest

from tests.support.ended import end_in_the_middle

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(
    ("example", "child"),
    [("torch_grpo", "--job"), ("jax_ppo", "--job"), ("trl_grpo", "--job"), ("torchrun_gang", " -u ")],  # its ranks
)
def test_an_example_that_is_ended_leaves_nothing(example: str, child: str) -> None:
    """By a plain kill while a job runs: no process, mount or file is left, and no traceback."""
    with tempfile.TemporaryDirectory(prefix="ex") as temporary:
        command = [sys.executable, str(EXAMPLES / f"{example}.py")]
        said = end_in_the_middle(command, signal.SIGTERM, Path(temporary), child)
    assert "Traceback" not in said
