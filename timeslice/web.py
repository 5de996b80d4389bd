"""The HTTP port of agent and coordinator: whether a job is ready, metrics, and whether the daemon lives.

Nothing can be changed here. It runs in the daemon's own event loop, so ``/healthz`` answers only while that turns.
One request a connection. Who is slow is cut off, and when all places are taken the oldest connection ends: an honest
request takes milliseconds.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from email.utils import formatdate
from functools import partial
from http import HTTPStatus
from typing import Any, Generic, Self, TypeVar
from urllib.parse import parse_qs, unquote, urlsplit

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from timeslice.errors import RedisUnreachableError, RefusedError, ServerUnsuitableError, UsageError
from timeslice.locks.drivers import AsyncDriver
from timeslice.locks.keys import Keys
from timeslice.locks.scripts import text
from timeslice.locks.view import GroupView, look
from timeslice.names import check_name, is_name
from timeslice.readiness import Readiness, in_all, in_one

log = logging.getLogger("timeslice.web")
T = TypeVar("T")

EVERYWHERE = "0.0.0.0"  # noqa: S104 - who probes is on other machines; what it shows stands in docs/threat-model.md
SCHEMA = 1  # as in every JSON document: docs/reference/json.md
LOOK_S = 2.0  # the longest time that a probe waits for the server
CONNECTION_S = 10.0  # to send a request and take the answer
CONNECTIONS = 200
HEAD_BYTES = 8 << 10
BODY_BYTES = 1 << 20  # taken from who sends what nobody asked for, so that he can read his answer
PATHS = ("/healthz", "/metrics", "/jobs/JOB/ready", "/jobs/JOB/ready?group=GROUP")

_REQUEST = re.compile(r"([A-Z]+) (\S+) HTTP/1\.[01]")
_METHODS = frozenset({"GET", "HEAD"})


@dataclass(frozen=True)
class Answer:
    status: HTTPStatus
    body: bytes
    kind: str = "application/json"

    def encode(self, *, body: bool) -> bytes:
        lines = [
            f"HTTP/1.1 {self.status.value} {self.status.phrase}",
            f"Date: {formatdate(usegmt=True)}",
            f"Content-Type: {self.kind}",
            f"Content-Length: {len(self.body)}",
            "Cache-Control: no-store",
            "Connection: close",
        ]
        if self.status is HTTPStatus.METHOD_NOT_ALLOWED:
            lines.append(f"Allow: {', '.join(sorted(_METHODS))}")
        return "\r\n".join([*lines, "", ""]).encode() + (self.body if body else b"")


def _json(status: HTTPStatus, document: Mapping[str, Any]) -> Answer:
    return Answer(status, json.dumps({"schema": SCHEMA, **document}).encode() + b"\n")


def _problem(status: HTTPStatus, what: str) -> Answer:
    return _json(status, {"error": what, "paths": PATHS})


class _Latest(Generic[T]):
    """One question at a time, for all who wait. Nobody gets an answer to a question that was sent before his own."""

    def __init__(self, ask: Callable[[], Awaitable[T]]) -> None:
        self._ask = ask
        self._turn = asyncio.Lock()
        self._asked_at = float("-inf")
        self._answer: T

    async def get(self) -> T:
        loop = asyncio.get_running_loop()
        wanted_at = loop.time()
        async with self._turn:
            if self._asked_at <= wanted_at:
                asked_at = loop.time()
                self._answer = await self._ask()
                self._asked_at = asked_at
            return self._answer


class _Jobs:
    """What Redis says of jobs now, in the groups that this daemon's user may read."""

    def __init__(self, driver: AsyncDriver, keys: Keys) -> None:
        self._driver, self._keys = driver, keys
        self._names = _Latest(self._read_names)
        self._views: dict[str, _Latest[GroupView]] = {}

    async def readiness(self, job: str, group: str | None) -> Readiness:
        """RedisUnreachableError, ServerUnsuitableError."""
        names = await self._names.get()
        views = self._views = {name: self._views.get(name) or self._latest(name) for name in names}
        if group is not None:
            return in_one(job, group, await views[group].get() if group in views else None)
        asking = in_all(job, names)
        view: GroupView | None = None
        try:
            while True:
                name = asking.send(view)
                try:
                    view = await views[name].get()
                except (ServerUnsuitableError, UsageError):
                    view = None  # another tenant's, or spoilt; no reason to be silent about the others
        except StopIteration as end:
            found: Readiness = end.value
            return found

    async def _read_names(self) -> list[str]:
        (members,) = await self._driver.pipe([("SMEMBERS", self._keys.groups)], deadline_s=LOOK_S)
        return sorted(filter(is_name, map(text, members)))

    def _latest(self, name: str) -> _Latest[GroupView]:
        return _Latest(lambda: self._driver.run(look(self._keys.group(name)), deadline_s=LOOK_S))


class Web:
    """The port, from ``start`` to ``close``."""

    def __init__(self, driver: AsyncDriver, keys: Keys) -> None:
        self._jobs = _Jobs(driver, keys)
        self._connections: dict[asyncio.Task[None], None] = {}  # the oldest first
        self._server: asyncio.Server | None = None

    async def start(self, host: str, port: int) -> Self:
        """RefusedError if somebody else has the port, or the host is none of this machine."""
        try:
            self._server = await asyncio.start_server(self._accept, host, port, limit=HEAD_BYTES)
        except OSError as error:
            raise RefusedError(
                f"can't listen on {host} port {port} ({error.strerror}); choose others with --http-host and --http-port"
            ) from error
        return self

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._connections) >= CONNECTIONS:
            oldest = next(iter(self._connections))
            oldest.cancel()
            del self._connections[oldest]
        task = asyncio.create_task(self._serve(reader, writer), name="http")
        self._connections[task] = None
        task.add_done_callback(lambda done: self._connections.pop(done, None))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(CONNECTION_S):
                answer, method = await self._hear(reader)
                writer.write(answer.encode(body=method != "HEAD"))
                writer.write_eof()
                await writer.drain()
                await _drop(reader)  # a connection that is closed before all is read is reset, and the answer lost
                writer.close()
                await writer.wait_closed()
        except (TimeoutError, OSError, asyncio.IncompleteReadError):
            pass  # slow, or gone: nobody waits for an answer
        finally:
            writer.transport.abort()

    async def _hear(self, reader: asyncio.StreamReader) -> tuple[Answer, str]:
        """The answer to what comes, and the method that was used."""
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError:
            much = f"a request has {HEAD_BYTES} bytes at most"
            return _problem(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, much), ""
        line = head.partition(b"\r\n")[0].decode("latin-1")
        if not (found := _REQUEST.fullmatch(line)):
            return _problem(HTTPStatus.BAD_REQUEST, "this is no HTTP/1 request"), ""
        method, target = found.groups()
        try:
            return await self._answer(method, target), method
        except Exception:
            log.exception("%s %s failed", method, target[:200])
            return _problem(HTTPStatus.INTERNAL_SERVER_ERROR, "failed; see the daemon's log"), method

    async def _answer(self, method: str, target: str) -> Answer:
        try:
            url = urlsplit(target)
        except ValueError:
            return _problem(HTTPStatus.BAD_REQUEST, "this is no URL")
        route: Callable[[], Awaitable[Answer]]
        match url.path.split("/")[1:]:
            case ["healthz"]:
                route = _alive
            case ["metrics"]:
                route = _metrics
            case ["jobs", job, "ready"]:
                route = partial(self._ready, unquote(job), url.query)
            case _:
                return _problem(HTTPStatus.NOT_FOUND, "there is no such path")
        if method not in _METHODS:
            return _problem(
                HTTPStatus.METHOD_NOT_ALLOWED, f"only {' and '.join(sorted(_METHODS))}: nothing can be changed here"
            )
        return await route()

    async def _ready(self, job: str, query: str) -> Answer:
        try:
            check_name("job", job)
            group = _group(query)
        except UsageError as error:
            return _problem(HTTPStatus.BAD_REQUEST, str(error))
        try:
            async with asyncio.timeout(LOOK_S):
                found = await self._jobs.readiness(job, group)
        except (TimeoutError, RedisUnreachableError):
            found = Readiness(job, "unknown", "server unreachable")
        except (ServerUnsuitableError, UsageError):
            found = Readiness(job, "unknown", "this daemon may not or can't read it; run: timeslice doctor")
        return _json(HTTPStatus.OK if found.ready else HTTPStatus.SERVICE_UNAVAILABLE, found.document())


async def _drop(reader: asyncio.StreamReader) -> None:
    """What still comes, until the client has closed or sent too much."""
    left = BODY_BYTES
    while left > 0 and (part := await reader.read(left)):
        left -= len(part)


async def _alive() -> Answer:
    return _json(HTTPStatus.OK, {"alive": True})


async def _metrics() -> Answer:
    return Answer(HTTPStatus.OK, generate_latest(), CONTENT_TYPE_LATEST)


def _group(query: str) -> str | None:
    """The one parameter that there is. A misspelt one would ask something else than was meant."""
    try:
        given = parse_qs(query, keep_blank_values=True, strict_parsing=bool(query), max_num_fields=1)
    except ValueError as error:
        raise UsageError("give one parameter at most: group=GROUP") from error
    if given.keys() - {"group"}:
        raise UsageError("the only parameter is group=GROUP")
    return check_name("group", given["group"][0]) if given else None
