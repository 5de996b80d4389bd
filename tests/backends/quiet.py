"""A rank of a job that quiesces by signals, told line by line what to do. Run by the tests, not by pytest.

Each signal that it gets is written down with the state of its peers at that moment, to a file that all ranks share.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

from tests.backends.worker import Job, serve

BEFORE, AFTER = signal.SIGRTMIN + 1, signal.SIGRTMIN + 2


class Rank(Job):
    """Also counts signals."""

    def listen(self, journal: str, before: int = BEFORE, after: int = AFTER) -> None:
        """From now on write each signal down: ``before PID`` or ``after PID``."""
        self._journal = os.open(journal, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        signal.signal(before, lambda *_: self._note("before"))
        signal.signal(after, lambda *_: self._note("after"))

    def deaf(self) -> None:
        """As behind an exec: the signals would end it."""
        for number in (BEFORE, AFTER):
            signal.signal(number, signal.SIG_DFL)

    def _note(self, what: str) -> None:
        os.write(self._journal, f"{what} {os.getpid()}\n".encode())


def heard(journal: Path) -> list[str]:
    """What was written down, in order."""
    return journal.read_text().splitlines() if journal.exists() else []


if __name__ == "__main__":
    serve(Rank())
