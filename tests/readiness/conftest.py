"""Daemons' HTTP ports, asked as a router or a probe would."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from tests.cli.conftest import cli, folder, job, up, world
from tests.support.ports import free_port
from timeslice.locks.drivers import AsyncDriver
from timeslice.locks.keys import Keys
from timeslice.web import Web

__all__ = ["cli", "folder", "job", "up", "world"]

DEADLINE_S = 30.0


def ask(port: int, path: str, method: str = "GET") -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of an answer."""
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=DEADLINE_S)) as connection:
        connection.request(method, path)
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()


def readiness(port: int, job: str, group: str | None = None) -> dict[str, Any]:
    """The document; its status code must say the same."""
    status, headers, body = ask(port, f"/jobs/{job}/ready" + (f"?group={group}" if group else ""))
    found: dict[str, Any] = json.loads(body)
    assert headers["Content-Type"] == "application/json"
    assert status == (200 if found["ready"] else 503)
    assert found["ready"] == (found["state"] == "ready")
    return found


def state(port: int, job: str, group: str | None = None) -> str:
    return str(readiness(port, job, group)["state"])


class Port:
    """A port as a daemon has it, on an event loop of its own."""

    def __init__(self, url: str, prefix: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self.number = free_port()
        self.driver = AsyncDriver(url)
        self.web = Web(self.driver, Keys(prefix))
        self._run(self.web.start("127.0.0.1", self.number))

    def _run(self, what: Any) -> None:
        asyncio.run_coroutine_threadsafe(what, self._loop).result(DEADLINE_S)

    def close(self) -> None:
        self._run(self.web.close())
        self._run(self.driver.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@pytest.fixture
def port(redis_url: str, prefix: str) -> Iterator[int]:
    """Number of a port that answers for the groups of ``world``."""
    made = Port(redis_url, prefix)
    yield made.number
    made.close()
