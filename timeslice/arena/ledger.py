"""Who has how much of a pool that the kernel does not limit: the accounting behind an advisory device.

One line an arena: process id, its start time, the arena's id, bytes. Lines of dead processes count for nothing,
so a crash frees its share without anybody's help. The file is replaced as a whole under a lock.
"""

# pathlib knows no dir_fd and no descriptors, and would cost the command start-up time.
# ruff: noqa: PTH105, PTH118, PTH123
from __future__ import annotations

import fcntl
import os

from timeslice.arena.process import is_start, start_time_of

Owner = tuple[int, int, int]
"""One arena of one process: its id, its start time (which tells a reused id apart), the arena's id."""


class Ledger:
    """The claims on one pool folder."""

    def __init__(self, folder: str) -> None:
        self._path = os.path.join(folder, "ledger")
        self._lock_path = os.path.join(folder, "ledger.lock")

    def used(self) -> int:
        """Bytes claimed by living processes."""
        return sum(self._living().values())

    def holders(self) -> dict[Owner, int]:
        """Living arenas and what they claim."""
        return self._living()

    def claim(self, owner: Owner, total: int, capacity: int) -> int | None:
        """Set what ``owner`` has to ``total``; None when done, else the bytes that were free for it."""
        lock = os.open(self._lock_path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            claims = self._living()
            before = claims.pop(owner, 0)
            free = capacity - sum(claims.values())
            if total > free and total > before:
                return max(0, free - before)
            if total:
                claims[owner] = total
            self._write(claims)
            return None
        finally:
            os.close(lock)

    def _living(self) -> dict[Owner, int]:
        try:
            with open(self._path, encoding="ascii") as file:
                rows = [[int(word) for word in line.split()] for line in file]
        except FileNotFoundError:
            return {}
        return {(pid, start, arena): total for pid, start, arena, total in rows if _lives(pid, start)}

    def _write(self, claims: dict[Owner, int]) -> None:
        new = f"{self._path}.new"
        with open(new, "w", encoding="ascii") as file:
            file.writelines(f"{pid} {start} {arena} {total}\n" for (pid, start, arena), total in claims.items())
        os.replace(new, self._path)


def _lives(pid: int, told: int) -> bool:
    start = start_time_of(pid)
    return start is not None and is_start(pid, start, told)
