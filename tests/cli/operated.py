"""A job's process for the tests of an operator's orders: it obeys lines on its standard input.

Run as ``python -m tests.cli.operated JOB DEVICE LEASE_S [busy]``. ``busy``: its workload never lets go by itself.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from tests.cli.conftest import eventually

GROUP = "trainers"
SIZE = 6 << 20  # two of them do not fit on a device of 8 MiB


class Operated:
    """Such a process, as a test holds it. ``said`` is all that it has printed."""

    def __init__(self, job: str, folder: Path, *more: str, lease_s: float = 3.0) -> None:
        line = [sys.executable, "-m", __name__, job, str(folder / "devices" / GROUP), str(lease_s), *more]
        self.job, self.said = job, list[str]()
        self._start(line)

    def _start(self, line: list[str]) -> None:
        self.process = subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said.append(line.strip())

    def tell(self, word: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(word + "\n")

    def until(self, what: str) -> str:
        """The first line that begins so; it is taken off."""
        found: str = eventually(lambda: next((line for line in self.said if line.startswith(what)), ""), within=40)
        self.said.remove(found)
        return found

    def do(self, word: str, answer: str) -> str:
        self.tell(word)
        return self.until(answer)

    def end(self) -> None:
        self.process.kill()
        self.process.wait(60)
        self._listener.join(10)  # it reads what was said last
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            try:
                pipe.close()
            except BrokenPipeError:
                continue


StartJob = Callable[..., Operated]


def main() -> None:
    import numpy as np

    import timeslice
    from timeslice.arena import Arena, Device
    from timeslice.client.callbacks import Busy
    from timeslice.client.lease import BaseLease
    from timeslice.client.workload import register_workload
    from timeslice.errors import LeaseLostError
    from timeslice.models import Residency

    def say(*words: object) -> None:
        print(*words, flush=True)

    def on_lost(lease: BaseLease) -> None:
        try:
            lease.ensure_held()
        except LeaseLostError as error:
            say("lost:", error)

    def refuse(*_: object) -> int:
        raise Busy("in the middle of a step")

    job, device, lease_s, *more = sys.argv[1:]
    arena = Arena(Device.open(device))
    if "busy" in more:
        register_workload(
            GROUP,
            job=job,
            on_suspend=refuse,
            on_restore=refuse,
            probe=lambda: (Residency.RESIDENT, arena.bytes_on_device, arena.bytes_on_host),
        )
    memory: np.ndarray[tuple[int, ...], np.dtype[np.uint8]] | None = None
    hold = timeslice.hold(GROUP, job=job, lease=float(lease_s), on_lost=on_lost)
    say("up")
    for line in sys.stdin:
        match line.strip():
            case "hold":
                lease = hold.__enter__()
                if memory is None:
                    memory = np.frombuffer(arena.allocate(SIZE), dtype="uint8")
                    memory[:] = 7
                say("inside", lease.fencing_token, "same" if (memory == 7).all() else "different")
            case "hang":
                say("hangs")
                while True:
                    time.sleep(0.05)
            case "yield":
                hold.__exit__(None, None, None)
                say("yielded")


if __name__ == "__main__":
    main()
