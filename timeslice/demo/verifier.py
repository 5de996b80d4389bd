"""The reward process: checks answers, as a sandbox or a judge model would, and takes a stated time for each batch.

Run as ``python -m timeslice.demo.verifier SOCKET SECONDS``; prints ``ready`` and ends when its standard input ends,
so that it never outlives who started it. One line of JSON asks, one answers; each connection is served on its own.
"""

from __future__ import annotations

import contextlib
import json
import socket
import socketserver
import sys
import threading
import time
from pathlib import Path

import numpy as np

from timeslice.demo.grpo import Array, Rollouts


def score(modulus: int, prompts: list[list[int]], answers: list[list[int]]) -> list[list[int]]:
    """1 for each right token, else 0."""
    return [
        [int(token == right % modulus) for token, right in zip(answer, (a + b, a - b, a * b), strict=True)]
        for (a, b), answer in zip(prompts, answers, strict=True)
    ]


class Verifier:
    """A job's connection to the reward process."""

    def __init__(self, path: Path, wait_s: float) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(wait_s)
        self._socket.connect(str(path))
        self._file = self._socket.makefile("rwb")

    def rewards(self, modulus: int, rollouts: Rollouts) -> Array:
        """Send a batch and wait for the rewards, one a token.

        ConnectionError when the process has ended, TimeoutError when it does not answer in time.
        """
        request = {"modulus": modulus, "prompts": rollouts.prompts.tolist(), "answers": rollouts.tokens.tolist()}
        self._file.write(json.dumps(request).encode() + b"\n")
        self._file.flush()
        answer = self._file.readline()
        if not answer:
            raise ConnectionError("the verifier ended; its reason is on standard error")
        return np.array(json.loads(answer), np.float64)

    def close(self) -> None:
        with contextlib.suppress(OSError):  # what could not be sent any more: the other end is gone
            self._file.close()
        self._socket.close()


class _Server(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True
    latency_s = 0.0


class _Handler(socketserver.StreamRequestHandler):
    server: _Server

    def handle(self) -> None:
        for line in self.rfile:
            until = time.monotonic() + self.server.latency_s
            answer = json.dumps(score(**json.loads(line)))
            time.sleep(max(until - time.monotonic(), 0.0))
            self.wfile.write(answer.encode() + b"\n")


def serve(path: Path, latency_s: float) -> None:
    """Serve until standard input ends."""
    with _Server(str(path), _Handler) as server:
        server.latency_s = latency_s
        threading.Thread(target=server.serve_forever, daemon=True).start()
        print("ready", flush=True)  # noqa: T201 - the starter waits for it
        sys.stdin.read()
        server.shutdown()


if __name__ == "__main__":
    serve(Path(sys.argv[1]), float(sys.argv[2]))
