"""A sampler of a job: it serves requests over HTTP, behind the gate of docs/recipes.md, with state on the device.

Run as ``python -m tests.readiness.sampler JOB DEVICE``; it says its port, and obeys ``hold`` and ``yield``.
"""

from __future__ import annotations

import json
import sys
import threading
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.cli.operated import SIZE, Operated

GROUP = "samplers"
PATIENCE_S = 10.0  # a request that waits longer at the gate came to a sleeper, not to one that was about to wake


class Sampler(Operated):
    """Such a process, as a test holds it."""

    def __init__(self, job: str, folder: Path) -> None:
        line = [sys.executable, "-m", __name__, job, str(folder / "devices" / GROUP)]
        self.job, self.said = job, list[str]()
        self._start(line)
        self.address = f"http://127.0.0.1:{self.until('port').split()[1]}"


def main() -> None:
    import numpy as np

    import timeslice
    from tests.readiness.recipe import recipe
    from timeslice.arena import Arena, Device

    job, device = sys.argv[1:]
    page = recipe()
    gate = page["Gate"](PATIENCE_S)
    arena = Arena(Device.open(device))
    memory: np.ndarray[tuple[int, ...], np.dtype[np.uint8]] | None = None
    inside: list[Any] = []  # the lease
    missed = 0

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            nonlocal missed
            self.rfile.read(int(self.headers["Content-Length"]))
            status, told = 200, {"job": job}
            try:
                with gate.request():
                    inside[0].ensure_held()
                    assert memory is not None
                    told["sum"] = str(int(memory[:10].sum()))
            except page["Asleep"]:
                missed += 1
                status = 503
            body = json.dumps(told).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print("port", server.server_address[1], flush=True)
    turn = ExitStack()
    for line in sys.stdin:
        match line.strip():
            case "hold":
                inside[:] = [turn.enter_context(timeslice.hold(GROUP, job=job, phase="generate"))]
                if memory is None:
                    memory = np.frombuffer(arena.allocate(SIZE), dtype="uint8")
                    memory[:] = 7
                turn.enter_context(gate.opened())
                print("inside", flush=True)
            case "yield":
                turn.close()
                print("yielded", missed, flush=True)


if __name__ == "__main__":
    main()
