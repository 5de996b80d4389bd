"""A job whose state moves by callbacks that do as a folder says. Run by the tests, not by pytest.

In the folder: ``busy`` (a number: so many times, or ``always``), ``hang`` (a suspend lasts as long as it is there),
``watchdog`` (it aborts the process when it is suspended for as many seconds). ``calls`` is what it was asked.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

import timeslice

CONTENT = b"state " * 1000


class Job:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.content, self.saved = bytearray(CONTENT), b""
        self.beat = 0.0

    def note(self, word: str) -> None:
        with (self.folder / "calls").open("a") as file:
            file.write(f"{word}\n")

    def suspend(self, _mode: str, _tags: tuple[str, ...]) -> int:
        self.note("suspend")
        busy = self.folder / "busy"
        left = busy.read_text() if busy.exists() else "0"
        if left != "0":
            if left != "always":
                busy.write_text(str(int(left) - 1))
            raise timeslice.Busy("in the middle of a step")
        while (self.folder / "hang").exists():
            time.sleep(0.01)
        self.saved = bytes(self.content)
        self.beat = time.monotonic()
        self.content.clear()
        self.note("suspended")
        return len(self.saved)

    def restore(self, _tags: tuple[str, ...]) -> int:
        self.note("restore")
        self.content.extend(self.saved)
        return len(self.content)

    def watch(self, limit_s: float) -> None:
        """As watchdogs of collectives do: a thread of the CPU, which does not know that the job is suspended."""
        while self.content or time.monotonic() - self.beat < limit_s:
            time.sleep(0.02)
        self.note("watchdog")
        os.abort()


def main() -> None:
    job = Job(Path(sys.argv[1]))
    timeslice.register_workload("g", job)
    print("up", flush=True)
    hold = timeslice.hold("g", timeout=90)
    watchdog = job.folder / "watchdog"
    if watchdog.exists():
        threading.Thread(target=job.watch, args=(float(watchdog.read_text()),), daemon=True).start()
    for line in sys.stdin:
        if line == "hold\n":
            lease = hold.__enter__()
            print(lease.grant.how, job.content == CONTENT, flush=True)
        else:
            hold.__exit__(None, None, None)
            print("yielded", flush=True)


if __name__ == "__main__":
    main()
