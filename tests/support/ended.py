"""A program that is ended in the middle, and what it leaves."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

DEADLINE_S = 60.0


def end_in_the_middle(
    command: Sequence[str], number: signal.Signals, temporary: Path, child: str, *, terminal: bool = False
) -> str:
    """Start it with its temporary files in ``temporary``, and send it the signal when a process with ``child`` in its
    command line runs; as a terminal does, also those that it has started and that are still of its group. It has to end
    by that, and to leave no process, mount or file. What it said on stderr."""
    environment = {**os.environ, "TMPDIR": str(temporary)}
    running = subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, process_group=0
    )
    try:
        _await(f"nothing runs {child}", lambda: any(child in words for words in _processes(temporary)))
        if terminal:
            os.killpg(running.pid, number)
        else:
            running.send_signal(number)
        _, said = running.communicate(timeout=DEADLINE_S)
    finally:
        running.kill()
    assert running.returncode == 128 + number, said
    _await("processes were left", lambda: not _processes(temporary))
    assert str(temporary) not in Path("/proc/mounts").read_text()
    assert list(temporary.iterdir()) == []
    return said


def _processes(folder: Path) -> list[str]:
    """The command lines of those whose temporary files are there."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and f"TMPDIR={folder}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                found.append((entry / "cmdline").read_bytes().decode(errors="replace").replace("\0", " "))
        except OSError:
            continue  # ended meanwhile, or another user's
    return found


def _await(what: str, check: Callable[[], object]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not check():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)
