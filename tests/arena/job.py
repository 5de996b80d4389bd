"""A job's process, told line by line what to do with its device memory. Run by the tests, not by pytest."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
import time
from random import Random
from typing import Any

from timeslice.arena import Arena
from timeslice.arena.control import ControlBlock
from timeslice.errors import TimeSliceError


class Job:
    def __init__(self) -> None:
        self.arenas: list[Arena] = []
        self.views: list[memoryview] = []
        self.threads: list[threading.Thread] = []

    def arena(self, device: str) -> int:
        self.arenas.append(Arena(device, label=f"arena {len(self.arenas)}"))
        return len(self.arenas) - 1

    def allocate(self, nbytes: int, arena: int = 0) -> int:
        self.views.append(self.arenas[arena].allocate(nbytes))
        return len(self.views) - 1

    def fill(self, view: int, seed: int) -> str:
        data = Random(seed).randbytes(1 << 20)
        target = self.views[view]
        for at in range(0, len(target), len(data)):
            target[at : at + len(data)] = data[: len(target) - at]
        return self.digest(view)

    def digest(self, view: int) -> str:
        return hashlib.sha256(self.views[view]).hexdigest()

    def touch(self, view: int) -> int:
        return self.views[view][0]

    def free(self, view: int) -> None:
        for arena in self.arenas:
            try:
                arena.free(self.views[view])
            except TimeSliceError:
                continue

    def address(self, view: int) -> int:
        import numpy as np

        return int(np.frombuffer(self.views[view], np.uint8).__array_interface__["data"][0])

    def seal(self, view: int, arena: int = 0) -> None:
        self.arenas[arena].seal(self.views[view])

    def unseal(self, view: int, arena: int = 0) -> None:
        self.arenas[arena].unseal(self.views[view])

    def write(self, view: int, value: int) -> None:
        self.views[view][0] = value

    def saved(self, arena: int = 0) -> int:
        return self.arenas[arena].bytes_saved

    def trim(self, arena: int = 0) -> int:
        return self.arenas[arena].trim()

    def suspend(self, arena: int = 0) -> int:
        return self.arenas[arena].suspend()

    def resume(self, arena: int = 0) -> int:
        return self.arenas[arena].resume()

    def state(self, arena: int = 0) -> str:
        return self.arenas[arena].state

    def on_device(self, arena: int = 0) -> int:
        return self.arenas[arena].bytes_on_device

    def on_host(self, arena: int = 0) -> int:
        return self.arenas[arena].bytes_on_host

    def thread(self) -> int:
        """Start a thread that stays; its id."""
        ready: list[int] = []
        started = threading.Event()

        def body() -> None:
            ready.append(threading.get_native_id())
            started.set()
            threading.Event().wait()

        thread = threading.Thread(target=body, daemon=True)
        thread.start()
        started.wait()
        return ready[0]

    def spin(self, threads: int) -> None:
        """Keep threads busy in native code, which needs no GIL."""

        def body() -> None:
            data = bytes(1 << 20)
            while True:
                hashlib.sha256(data)

        for _ in range(threads):
            threading.Thread(target=body, daemon=True).start()

    def fork(self) -> int:
        """Fork a child that outlives this process; its id."""
        pid = os.fork()
        if pid == 0:
            null = os.open(os.devnull, os.O_RDWR)
            for fd in (0, 1, 2):
                os.dup2(null, fd)
            self.arenas[0].close()
            time.sleep(60)
            os._exit(0)
        return pid

    def heir(self) -> tuple[int, int]:
        """Start a program that inherits the descriptor of the first arena's control block; its id and that."""
        fd = self.arenas[0]._control.fd
        program = [sys.executable, "-c", "import sys; sys.stdin.read()"]
        self._heir = subprocess.Popen(program, pass_fds=[fd], stdin=subprocess.PIPE)
        return self._heir.pid, fd

    def keep_lock(self) -> None:
        """Hold the lock of the first arena, as an operator that hangs does."""
        fd = os.open(f"/proc/self/fd/{self.arenas[0]._control.fd}", os.O_RDWR)
        self._kept = ControlBlock(fd).locked(time.monotonic())
        self._kept.__enter__()

    def close(self, arena: int = 0) -> None:
        self.arenas[arena].close()


def main() -> None:
    job = Job()
    for line in sys.stdin:
        name, arguments = json.loads(line)
        try:
            answer: dict[str, Any] = {"ok": getattr(job, name)(*arguments)}
        except (TimeSliceError, OSError) as error:
            answer = {"error": type(error).__name__, "message": str(error)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
