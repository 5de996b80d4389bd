"""The demo's processes, for real: the verifier, and what happens when a child fails or its starter goes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from timeslice.demo.grpo import Rollouts
from timeslice.demo.processes import Child
from timeslice.demo.verifier import Verifier
from timeslice.errors import TimeSliceError

ROLLOUTS = Rollouts(np.array([[3, 4], [1, 1]]), np.array([[2, 4, 2], [0, 0, 0]]), np.zeros((2, 3)))


def verifier(folder: Path, latency_s: float = 0.0) -> Child:
    return Child("verifier", "timeslice.demo.verifier", [str(folder / "v.sock"), str(latency_s)], folder, {})


def test_the_verifier_scores_each_token(tmp_path: Path) -> None:
    """Over a real socket, for several batches on one connection."""
    with verifier(tmp_path) as child:
        child.await_line()
        connection = Verifier(tmp_path / "v.sock", 60)
        for _ in range(2):
            assert connection.rewards(5, ROLLOUTS).tolist() == [[1, 1, 1], [0, 1, 0]]
        connection.close()


def test_the_verifier_takes_its_stated_time_for_each_batch(tmp_path: Path) -> None:
    """A batch is never scored sooner, and batches of two jobs don't wait for each other's."""
    with verifier(tmp_path, 0.3) as child:
        child.await_line()
        one, other = Verifier(tmp_path / "v.sock", 60), Verifier(tmp_path / "v.sock", 60)
        before = time.monotonic()
        one.rewards(5, ROLLOUTS)
        assert time.monotonic() - before >= 0.3
        other._file.write(b'{"modulus": 5, "prompts": [], "answers": []}\n')
        other._file.flush()
        one.rewards(5, ROLLOUTS)  # answered although the other connection's batch is being scored
        assert other._file.readline() == b"[]\n"
        one.close()
        other.close()


def test_a_verifier_that_died_is_said(tmp_path: Path) -> None:
    """The job gets an error and no rewards."""
    with verifier(tmp_path) as child:
        child.await_line()
        connection = Verifier(tmp_path / "v.sock", 60)
        connection.rewards(5, ROLLOUTS)
        child._process.kill()
        with pytest.raises(OSError, match=r"verifier ended|Broken pipe|reset"):
            connection.rewards(5, ROLLOUTS)
        connection.close()


def test_a_failed_child_is_shown_with_its_own_words(tmp_path: Path) -> None:
    """What it wrote to standard error is in the message."""
    with Child("job-x", "timeslice.demo.job", ["{}"], tmp_path, {}) as child:
        with pytest.raises(TimeSliceError, match=r"job-x ended with status 1:(.|\n)*Field required"):
            child.await_line()
        with pytest.raises(TimeSliceError, match="job-x ended"):
            child.running()


def test_a_child_ends_with_its_starter(tmp_path: Path) -> None:
    """After kill -9 of whoever started it, the verifier ends too."""
    code = f"""
from pathlib import Path
from timeslice.demo.processes import Child
child = Child("verifier", "timeslice.demo.verifier", [{str(tmp_path / "v.sock")!r}, "0"], Path({str(tmp_path)!r}), {{}})
child.await_line()
print(child._process.pid, flush=True)
input()
"""
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as starter:
        assert starter.stdout is not None
        pid = int(starter.stdout.readline())
        pidfd = os.pidfd_open(pid)
        starter.send_signal(signal.SIGKILL)
        starter.wait()
    try:
        deadline = time.monotonic() + 20
        while alive(pidfd):
            assert time.monotonic() < deadline, "the verifier outlived its starter"
            time.sleep(0.02)
    finally:
        os.close(pidfd)


def alive(pidfd: int) -> bool:
    try:
        signal.pidfd_send_signal(pidfd, 0)
    except ProcessLookupError:
        return False
    fields = Path(f"/proc/self/fdinfo/{pidfd}").read_text().split()
    return fields[fields.index("Pid:") + 1] != "-1"
