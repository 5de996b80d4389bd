"""Requests of the ``http`` backend: only where it may, bounded in size and time, and again after what passes."""

from __future__ import annotations

import asyncio
import json
import logging
import ssl
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import httpx

from timeslice.backends.http_access import AccessError, AllowList, Token
from timeslice.errors import BackendError, FaultKind, quoted

log = logging.getLogger("timeslice.backends")

MAX_ANSWER = 4 << 20  # bytes; the metrics of a large server are a few hundred thousand
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 2.0
_CONNECT_S = 5.0
_QUOTED = 300


class PassingError(BackendError):
    """What may be otherwise in a moment: no connection, no answer in time, a gateway that says so (502, 503, 504).
    ``unsure``: what was asked may have been done, or be under way."""

    def __init__(self, message: str, *, unsure: bool) -> None:
        super().__init__(message, kind=FaultKind.TRANSIENT)
        self.unsure = unsure


@dataclass(frozen=True)
class Answer:
    status: int
    body: bytes

    def json(self) -> Any:
        """None if it is no JSON."""
        try:
            return json.loads(self.body)
        except (ValueError, RecursionError):
            return None

    def object(self) -> dict[str, Any]:
        """The JSON object in it; empty if there is none."""
        found = self.json()
        return found if isinstance(found, dict) else {}

    def text(self) -> str:
        return self.body.decode(errors="replace")


class HttpClient:
    """``timeout_s`` is how long an answer to a question may take; an order has until its step's deadline."""

    def __init__(self, allow: AllowList, token: Token, *, timeout_s: float) -> None:
        self._allow, self._token, self.timeout_s = allow, token, timeout_s

    async def ask(
        self,
        method: Literal["GET", "POST"],
        url: str,
        path: str,
        *,
        until: float,
        params: dict[str, str] | None = None,
        body: dict[str, Any] | None = None,
        accept: tuple[int, ...] = (),
    ) -> Answer:
        """One attempt. An answer is 2xx or one of ``accept``. PassingError, or BackendError for what stays so."""
        what = f"{method} {url}{path}"
        try:
            address = self._allow.check(url).join(path)
            headers = {"Accept-Encoding": "identity", **self._token.headers()}  # a packed answer has no bound
        except AccessError as error:
            raise BackendError(str(error), kind=FaultKind.UNSUPPORTED) from None
        left = max(until - time.monotonic(), 0.1)
        limits = httpx.Timeout(left, connect=min(left, _CONNECT_S))
        # Not through a proxy and not where a redirect points: neither is on the list.
        client = httpx.AsyncClient(timeout=limits, trust_env=False, follow_redirects=False, verify=_trust())
        try:
            async with asyncio.timeout(left), client:
                request = client.build_request(method, address, params=params, json=body, headers=headers)
                response = await client.send(request, stream=True)
                try:
                    content = await _read(response, what)
                finally:
                    await response.aclose()
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise PassingError(f"{what}: no connection ({error or type(error).__name__})", unsure=False) from None
        except (httpx.TimeoutException, TimeoutError):
            raise PassingError(f"{what}: no answer within {left:.1f} s", unsure=True) from None
        except httpx.TransportError as error:
            raise PassingError(f"{what}: the connection broke ({type(error).__name__})", unsure=True) from None
        return _judge(what, Answer(response.status_code, content), accept, headers.get("Authorization", ""))


async def patiently(
    attempt: Callable[[], Awaitable[None]],
    until: float,
    *,
    who: str,
    after: Callable[[PassingError], Awaitable[bool]],
) -> None:
    """Make attempts until one succeeds, or ``after`` finds that the one that seemed to fail did. The last
    PassingError when time is up."""
    pause = _FIRST_PAUSE_S
    while True:
        try:
            return await attempt()
        except PassingError as error:
            left, failure = until - time.monotonic(), error
        if left <= pause:
            raise failure
        log.warning("%s: %s; trying again in %.1f s (%.0f s left)", who, failure, pause, left)
        await asyncio.sleep(pause)
        pause = min(pause * 2, _LONGEST_PAUSE_S)
        if await after(failure):
            return None


async def _read(response: httpx.Response, what: str) -> bytes:
    content = bytearray()
    async for piece in response.aiter_raw():
        content += piece
        if len(content) > MAX_ANSWER:
            raise BackendError(f"{what}: the answer has more than {MAX_ANSWER} bytes", kind=FaultKind.UNSUPPORTED)
    return bytes(content)


def _judge(what: str, answer: Answer, accept: tuple[int, ...], credentials: str) -> Answer:
    if 200 <= answer.status < 300 or answer.status in accept:
        return answer
    said = answer.text()
    if token := credentials.removeprefix("Bearer "):  # a proxy may repeat what it did not like
        said = said.replace(token, "[token]")
    said = quoted(said[:_QUOTED]).strip()
    message = f"{what} answered {answer.status}{f': {said}' if said else ''}"
    if answer.status in (502, 503, 504):
        raise PassingError(message, unsure=answer.status == 504)
    if answer.status >= 500:  # it tried and failed; the whole step may be tried again
        raise BackendError(message, kind=FaultKind.TRANSIENT)
    if 300 <= answer.status < 400:
        message += "; redirects are not followed: register the address that it points to"
    elif answer.status in (401, 403):
        message += "; give the agent a token: --backend http:allow=...,token_env=NAME or token_file=PATH"
    raise BackendError(message, kind=FaultKind.UNSUPPORTED)


@cache
def _trust() -> ssl.SSLContext:
    return ssl.create_default_context()  # takes some ten milliseconds, so once
