"""A program that knows nothing of timeslice but its emulated device: busy for a while, idle for a while, in a loop.

Run as ``python -m tests.observe.worker DEVICE BUSY_S IDLE_S [child]``; ``child``: a process that it starts does that.
"""

from __future__ import annotations

import subprocess
import sys
import time

SIZE = 4 << 20


def main(device: str, busy_s: float, idle_s: float) -> None:
    from timeslice.arena import Arena, Device

    arena = Arena(Device.open(device))
    state = arena.allocate(SIZE)
    print("up", flush=True)
    while True:
        until = time.monotonic() + busy_s
        while time.monotonic() < until:
            state[:1000] = bytes(1000)
        time.sleep(idle_s)


if __name__ == "__main__":
    if sys.argv[-1] == "child":
        line = [sys.executable, "-m", "tests.observe.worker", *sys.argv[1:-1]]
        sys.exit(subprocess.run(line, check=False).returncode)
    main(sys.argv[1], float(sys.argv[2]), float(sys.argv[3]))
