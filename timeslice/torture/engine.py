"""A program that holds the device memory of a job, and gives itself a title: ``python -m timeslice.torture.engine``.

As the engine cores of serving systems: a child of the process that holds the group, told by its environment whose it
is, until the title wipes what can be read of that. It talks to nobody but its parent, over pipes.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import signal
import subprocess
import sys
from pathlib import Path

from timeslice.arena import Arena

_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG
_ENV_START, _ENV_END = 47, 48  # of the fields of /proc/PID/stat behind the name
_MODULE = "timeslice.torture.engine"


class Engine:
    """The parent's side. An engine that was killed for touching memory which is not there takes its parent with it."""

    def __init__(self, group: str, device: Path, job: str, size: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", _MODULE, str(device), job, str(size)],
            env={**os.environ, "TIMESLICE_JOB": job, "TIMESLICE_GROUPS": group},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, word: str) -> str:
        """Its answer. A sentence that begins with ``!`` says why it can't."""
        assert self._process.stdin
        assert self._process.stdout
        try:
            self._process.stdin.write(f"{word}\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline().strip()
        except BrokenPipeError:
            answer = ""
        if not answer:
            os.kill(os.getpid(), -self._process.wait() or signal.SIGABRT)
        return answer

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def main(device: str, job: str, size: int) -> None:
    """Answer until the parent is gone."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
        return
    wipe_environment()
    arena = Arena(Path(device), label=job)
    view: memoryview | None = None
    for line in sys.stdin:
        verb, _, seed = line.strip().partition(" ")
        try:
            if verb == "fill":
                content = hashlib.shake_128(seed.encode()).digest(size)
                view = arena.allocate(size) if view is None else view
                view[:] = content
            assert view is not None
            answer = hashlib.blake2b(view, digest_size=12).hexdigest()
        except Exception as error:  # the parent says what it means
            answer = f"!{type(error).__name__}: {error}".replace("\n", " ")
        sys.stdout.write(f"{answer}\n")
        sys.stdout.flush()
    os._exit(0)


def wipe_environment() -> None:
    """What a process title does to the block that /proc/PID/environ shows."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[_ENV_START]), int(fields[_ENV_END])
    ctypes.memset(start, 0, end - start)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
