"""What both stand-ins share: HTTP, the faults of what stands before a server, sampling, the command line.

``GET /stand-in`` tells what was asked so far, and ``POST /stand-in`` sets faults; both are of the stand-ins alone.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

WORDS = ("the", "a", "of", "to", "we", "so", "then", "model", "token", "reward", "step", "answer", "three", "seven")
MAX_BODY = 1 << 20


@dataclass
class Asked:
    """A request as a route sees it."""

    query: dict[str, list[str]]
    body: dict[str, Any]


@dataclass
class Reply:
    status: int = 200
    body: Any = b""

    def content(self) -> bytes:
        return self.body if isinstance(self.body, bytes) else json.dumps(self.body).encode()


LOST = Reply(0)
Route = Callable[[Asked], Reply]


class Fault(Exception):
    """What a route answers with a 500."""


@dataclass
class StandIn:
    """A server with routes. ``faults`` maps names to how often they still happen; -1 for ever."""

    faults: dict[str, int] = field(default_factory=dict)
    token: str = ""  # of a proxy before it, for every route
    routes: dict[tuple[str, str], Route] = field(default_factory=dict)
    log: list[dict[str, Any]] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)
    running: int = 0
    waiting: int = 0

    def fault(self, name: str) -> bool:
        """Whether it happens now."""
        with self.changed:
            left = self.faults.get(name, 0)
            if left > 0:
                self.faults[name] = left - 1
            return left != 0

    def start(self, host: str = "127.0.0.1", port: int = 0) -> str:
        """Serve in threads; the address."""
        stand_in = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                stand_in.serve(self, "GET")

            def do_POST(self) -> None:
                stand_in.serve(self, "POST")

            def log_message(self, *_: Any) -> None:
                return

        server = ThreadingHTTPServer((host, port), Handler)
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return f"http://{host}:{server.server_address[1]}"

    def serve(self, handler: BaseHTTPRequestHandler, method: str) -> None:
        parts = urlsplit(handler.path)
        length = min(int(handler.headers.get("Content-Length") or 0), MAX_BODY)
        raw = handler.rfile.read(length)
        reply = self._own(method, raw) if parts.path == "/stand-in" else self._answer(handler, method, parts, raw)
        if reply is LOST:
            handler.close_connection = True
            return
        content = reply.content()
        handler.send_response(reply.status)
        if 300 <= reply.status < 400:
            handler.send_header("Location", str(reply.body, "ascii"))
        handler.send_header("Content-Length", str(len(content)))
        handler.end_headers()
        handler.wfile.write(content)

    def _own(self, method: str, raw: bytes) -> Reply:
        if method == "POST":
            with self.changed:
                self.faults.update(json.loads(raw))
                self.changed.notify_all()
        return Reply(200, {"log": self.log, "faults": self.faults, "running": self.running, "waiting": self.waiting})

    def _answer(self, handler: BaseHTTPRequestHandler, method: str, parts: Any, raw: bytes) -> Reply:
        self.log.append({"method": method, "path": parts.path, "query": parts.query, "body": raw.decode()})
        if self.token and handler.headers.get("Authorization") != f"Bearer {self.token}":
            given = str(handler.headers.get("Authorization", ""))
            return Reply(401, f"not {given}".encode() if self.fault("repeats token") else b"who are you")
        if self.fault(f"die {parts.path}"):
            die(f"{parts.path} was asked")
        if self.fault(f"502 {parts.path}"):
            return Reply(502, b"bad gateway")
        if self.fault(f"400 {parts.path}"):
            return Reply(400, b"what do you mean")
        if self.fault(f"redirect {parts.path}"):
            return Reply(307, b"http://169.254.169.254/latest/meta-data")
        if self.fault(f"huge {parts.path}"):
            return Reply(200, b"x" * (5 << 20))
        route = self.routes.get((method, parts.path))
        if route is None:
            return Reply(404, {"detail": "Not Found"})
        try:
            reply = route(Asked(parse_qs(parts.query), json.loads(raw or b"{}")))
        except Fault as error:
            return Reply(500, {"error": str(error)})
        if self.fault(f"lost {parts.path}"):  # done, and the answer is lost on its way
            return LOST
        if self.fault(f"504 {parts.path}"):  # done, and the gateway did not wait for it
            return Reply(504, b"gateway timeout")
        if self.fault(f"late {parts.path}"):  # done, and answered when nobody waits any more
            handler.connection.recv(1)
            return LOST
        return reply


def sample(weights: str, prompt: str, count: int) -> str:
    """Text that depends on the weights' content and on the prompt, and on nothing else."""
    stream = b"".join(
        hashlib.sha256(f"{weights}/{prompt}/{block}".encode()).digest() for block in range(count // 32 + 1)
    )
    return " ".join(WORDS[byte % len(WORDS)] for byte in stream[:count])


def completion(text: str, reason: str = "stop") -> Reply:
    return Reply(200, {"object": "text_completion", "choices": [{"index": 0, "text": text, "finish_reason": reason}]})


def arguments(name: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=name, description=f"Stand-in for {name}; not the real server.")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one")
    parser.add_argument("--device", type=Path, help="folder of an emulated device; without it plain memory")
    parser.add_argument("--weights", type=int, default=1 << 20, help="bytes")
    parser.add_argument("--kv-cache", type=int, default=1 << 20, help="bytes")
    parser.add_argument("--seed", type=int, default=1, help="of the weights of the checkpoint")
    parser.add_argument("--token-s", type=float, default=0.0, help="seconds a token takes")
    parser.add_argument("--proxy-token", default="", help="bearer token that all requests must have")
    parser.add_argument("--fault", action="append", default=[], metavar="NAME[=TIMES]")
    return parser


def faults_of(given: Sequence[str]) -> dict[str, int]:
    pairs = (each.rpartition("=") if "=" in each else (each, "", "-1") for each in given)
    return {name: int(times) for name, _, times in pairs}


def run(server: StandIn, options: argparse.Namespace) -> None:
    """Until the starter is gone: its end of our standard input closes."""
    print(server.start(options.host, options.port), flush=True)
    while os.read(0, 64):
        pass


def die(why: str) -> None:
    """As a scheduler that meets an assertion takes its server along."""
    print(f"scheduler hit an exception: {why}", file=sys.stderr, flush=True)
    os._exit(131)
