"""Fixtures for tests that need a node with (stand-ins for) GPUs; a conftest or a test imports them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.build import build
from tests.gpu.node import Node
from tests.support.jobs import shows

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def gpu_node(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, needs_tool: Callable[[str], str]) -> Node:
    """A node with one GPU of 1 GiB that nobody uses. Only processes with its ``environment`` see it."""
    libraries = tmp_path_factory.getbasetemp() / "stub-gpu"
    if not libraries.exists():
        build(libraries, needs_tool("cc"))
    return Node.make(tmp_path / "gpu", libraries)


@pytest.fixture
def sleeper() -> Iterator[Start]:
    """Start a process that does nothing, in which the job named takes part; it ends with the test."""
    started: list[subprocess.Popen[str]] = []

    def start(job: str = "", group: str = "trainers", **options: Any) -> subprocess.Popen[str]:
        shown = shows(job, group=group) if job else ()
        command = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, pass_fds=shown, **options)
        started.append(process)
        assert process.stdout is not None
        process.stdout.readline()
        return process

    yield start
    for each in started:
        each.kill()
        each.wait()
        assert each.stdout is not None
        each.stdout.close()
