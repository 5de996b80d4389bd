"""`timeslice up` as real processes, for the tests of its life."""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from click.testing import CliRunner, Result

from tests.cli.conftest import TIMESLICE
from timeslice.cli.main import main

Up = Callable[..., subprocess.Popen[str]]


def ready(process: subprocess.Popen[str]) -> str:
    """The URL in the line that it prints when all runs."""
    assert process.stdout is not None
    line = process.stdout.readline()
    found = re.fullmatch(r"export TIMESLICE_URL=(.*)\n", line)
    assert found, f"{line!r} {process.stderr.read() if process.stderr and not line else ''}"
    return shlex.split(found[1])[0]


def mounts(folder: Path) -> list[str]:
    return [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines() if str(folder) in line]


def cli(*args: str) -> subprocess.CompletedProcess[str]:
    """A command in another shell of the same user, with nothing configured."""
    return subprocess.run([TIMESLICE, *args], capture_output=True, text=True, timeout=60, check=False)


def ask(*args: str) -> Result:
    """As `cli`, without a process: for what only asks or orders, and has its answer at once."""
    return CliRunner().invoke(main, args)


def shown(*args: str) -> Any:
    done = ask(*args, "--json")
    assert done.exit_code == 0, done.stderr
    return json.loads(done.stdout)


def family(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def server_of(process: subprocess.Popen[str]) -> psutil.Process:
    """The server that it runs: the one on PATH, or the package's."""
    (found,) = [each for each in family(process) if each.name() in {"redis-server", "valkey-server"}]
    return found


def stop(process: subprocess.Popen[str], number: signal.Signals = signal.SIGINT) -> str:
    """Stop it and return what it wrote to stderr."""
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    return err
