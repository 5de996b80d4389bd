"""A stand-in server as a test, or an example, holds it: a process of its own."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).parent.parent.parent
START_S = 20.0


class ServerProcess:
    """``python -m tests.servers.KIND ARGUMENTS``; ends with its starter."""

    def __init__(self, kind: Literal["vllm", "sglang"], *arguments: str, **environment: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", f"tests.servers.{kind}", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env={**os.environ, "VLLM_SERVER_DEV_MODE": "1", **environment},
        )
        self.pid = self.process.pid
        assert self.process.stdout is not None
        if not select.select([self.process.stdout], [], [], START_S)[0]:
            self.end()
            raise TimeoutError(f"the {kind} stand-in did not start within {START_S} s")
        self.url = self.process.stdout.readline().decode().strip()
        assert self.url, f"the {kind} stand-in ended with {self.process.wait()}"

    def ask(self, path: str, body: Any = None, *, timeout: float = 20.0) -> tuple[int, Any]:
        """POST with a body, else GET: status and what was answered."""
        data = None if body is None else json.dumps(body).encode()
        try:
            with urllib.request.urlopen(urllib.request.Request(self.url + path, data), timeout=timeout) as answer:
                content, status = answer.read(), answer.status
        except urllib.error.HTTPError as error:
            content, status = error.read(), error.code
        try:
            return status, json.loads(content)
        except ValueError:
            return status, content

    def sample(self, prompt: str, tokens: int = 8, *, timeout: float = 20.0) -> str:
        status, answer = self.ask("/v1/completions", {"prompt": prompt, "max_tokens": tokens}, timeout=timeout)
        assert status == 200, answer
        return str(answer["choices"][0]["text"])

    def fault(self, **times: int) -> None:
        """Of the names in the stand-in's module; a path goes behind its name."""
        self.ask("/stand-in", times)

    def calls(self, *paths: str) -> list[str]:
        """What was asked of these paths, oldest first: path, query and body."""
        log = self.ask("/stand-in")[1]["log"]
        found = [entry for entry in log if entry["path"] in paths]
        return [f"{entry['path']}?{entry['query']}{entry['body']}".rstrip("?") for entry in found]

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()
