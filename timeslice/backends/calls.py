"""Which process a checkpoint tool works on just now, as an agent sees it that was started while it does.

A tool outlives the agent that started it, and the next agent must not start a second one on the same process: a copy
that another operation meets in its middle can cost the process. So each call holds a lock that only its own end frees.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import struct
import time
from pathlib import Path

from timeslice.models import Target

_FLOCK = struct.Struct("hhqqi4x")  # struct flock: type, whence, start, length, pid
_PAUSE_S = 0.05


class Calls:
    """One file; a call locks the byte at the number of its process. The lock goes to the tool with the descriptor."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def begin(self, target: Target) -> int | None:
        """A descriptor for the tool to inherit, to be closed here then; None while another call works on it."""
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _byte(target))
        except OSError as error:
            os.close(fd)
            if error.errno in {errno.EACCES, errno.EAGAIN}:
                return None
            raise
        return fd

    def works_on(self, target: Target) -> bool:
        """Whether a call is under way, whoever started it."""
        try:
            fd = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            found = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _byte(target))
        finally:
            os.close(fd)
        kind: int = _FLOCK.unpack(found)[0]
        return kind != fcntl.F_UNLCK

    async def ended(self, target: Target, until: float) -> bool:
        """Wait for a call to end; False when it still works at ``until``, which is on the monotonic clock."""
        while self.works_on(target):
            if time.monotonic() > until:
                return False
            await asyncio.sleep(_PAUSE_S)
        return True


def _byte(target: Target) -> bytes:
    return _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, target.pid, 1, 0)
