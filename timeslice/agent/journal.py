"""The agent's memory on disk: one small file per group, replaced whole, so that a reader sees the old or the new.

Orders and their answers matter while the jobs' processes live, so they have to survive the agent, not the machine: the
kernel has them once they are written. The fence outlives the machine: whenever it rises, the disk is waited for.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from pathlib import Path

from pydantic import ValidationError

from timeslice.agent.state import Ledger

log = logging.getLogger("timeslice.agent")


def write_whole(path: Path, data: bytes, *, durable: bool = True) -> None:
    """Replace a file so that neither a crash nor a full disk leaves half of it. OSError: the old content stands.

    ``durable`` waits until it would survive the loss of power, too.
    """
    draft = path.with_suffix(".new")
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        os.fchmod(fd, 0o600)  # whatever the umask is
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
        if durable:
            os.fsync(fd)
    finally:
        os.close(fd)
    draft.replace(path)
    if not durable:
        return
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)  # the rename itself
    finally:
        os.close(folder)


def read_whole(path: Path) -> bytes:
    """A file of the state folder. A link in its place is an OSError."""
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW), "rb") as file:
        return file.read()


class Journal:
    """A group's ledger, in memory and on disk."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = asyncio.Lock()
        self.ledger = self._load()

    def _load(self) -> Ledger:
        try:
            return Ledger.model_validate_json(read_whole(self._path))
        except FileNotFoundError:
            return Ledger()
        except ValidationError as error:
            aside = self._path.with_suffix(".unreadable")
            self._path.replace(aside)
            log.error("%s can't be read and was moved to %s; what is observed counts: %s", self._path, aside, error)
            return Ledger()

    async def update(self, change: Callable[[Ledger], Ledger]) -> None:
        """Change the ledger, on disk first. OSError: nothing has changed."""
        async with self._lock:
            changed = change(self.ledger)
            if changed != self.ledger:
                durable = (changed.fence, changed.floor) != (self.ledger.fence, self.ledger.floor)
                data = changed.model_dump_json().encode()
                if durable:
                    await asyncio.to_thread(write_whole, self._path, data)
                else:
                    write_whole(self._path, data, durable=False)  # to the page cache: a thread would take longer
                self.ledger = changed

    async def update_anyway(self, change: Callable[[Ledger], Ledger]) -> None:
        """As ``update``, for what has happened already: a disk that fails is logged, and memory knows."""
        try:
            await self.update(change)
        except OSError as error:
            log.error("%s could not be written: %s. Free space there; until then a restart forgets.", self._path, error)
            self.ledger = change(self.ledger)
