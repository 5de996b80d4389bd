"""The example with servers, ended in the middle."""

from __future__ import annotations

import signal
import sys
import tempfile
from pathlib import Path

import pytest

from tests.support.ended import end_in_the_middle

EXAMPLE = Path(__file__).parents[2] / "examples" / "vllm_sampler" / "run.py"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_example_that_is_ended_leaves_nothing(number: signal.Signals) -> None:
    """By Ctrl-C or a plain kill while a job has a server: no process, server, mount or file is left, no traceback."""
    with tempfile.TemporaryDirectory(prefix="ex") as temporary:  # short, since a socket's path must be
        said = end_in_the_middle([sys.executable, str(EXAMPLE)], number, Path(temporary), "tests.servers.vllm")
    assert "Traceback" not in said
    assert "KeyboardInterrupt" not in said
