"""Drivers run calls and flows: one for threads, one for asyncio. They wait; they decide nothing."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Awaitable, Callable, Generator
from typing import Any, TypeVar

import redis
import redis.asyncio

from timeslice.addresses import redact_url
from timeslice.locks.connection import connect, connect_async, explain, is_transient
from timeslice.locks.flows import Entries, Op, Wait
from timeslice.locks.keys import GroupKeys
from timeslice.locks.scripts import CALL_DEADLINE_S, Call, text
from timeslice.locks.view import GroupView, look

T = TypeVar("T")

LONGEST_BLOCK_S = 5.0  # the longest wait at once: how soon a connection that died silently is noticed
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 0.5


def _entries(reply: Any) -> Entries:
    """XREAD's answer for one stream: [(id, {field: value})]."""
    found: Entries = []
    for _, items in reply or []:
        for entry_id, fields in items:
            found.append((text(entry_id), {text(k): text(v) for k, v in (fields or {}).items()}))
    return found


def _command(call: Call[Any], *, whole: bool) -> list[Any]:
    """EVALSHA, or EVAL when the server does not know the script (which also teaches it)."""
    verb, body = ("EVAL", call.script.source) if whole else ("EVALSHA", call.script.sha)
    verb += "_RO" if call.script.reads_only else ""
    return [verb, body, len(call.keys), *call.keys, *call.args]


def _read(wait: Wait, until: float) -> list[Any]:
    """XREAD for what is left of the wait, or its longest piece; 0 would mean for ever."""
    left_ms = int(min(until - time.monotonic(), LONGEST_BLOCK_S) * 1000)
    return ["XREAD", "BLOCK", max(left_ms, 1), "STREAMS", wait.key, wait.after]


class SyncDriver:
    """Runs calls on a small pool, and each wait on a connection of its own. Threads may share it."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.client = connect(url)
        self._ready: list[Any] = []  # connections for calls, kept for the next one
        self._idle: list[redis.Redis] = []  # connections for waits, likewise
        self._lock = threading.Lock()
        self._pid = os.getpid()

    def run(self, call: Call[T], *, deadline_s: float | None = None) -> T:
        """Send a call until it is answered. RedisUnreachableError after ``deadline_s`` (default: the call's own)."""

        def attempt() -> Any:
            try:
                return self._ask(_command(call, whole=False))
            except redis.exceptions.NoScriptError:
                return self._ask(_command(call, whole=True))

        return call.parse(self.retry(attempt, deadline_s=call.deadline_s if deadline_s is None else deadline_s))

    def _ask(self, command: list[Any]) -> Any:
        """One question, one answer, on a connection that nobody else uses meanwhile.

        redis-py's pool and its bookkeeping would cost a hold that is alone a third of its time.
        """
        self._notice_fork()
        try:
            connection = self._ready.pop()
        except IndexError:
            connection = self.client.connection_pool.make_connection()
        try:
            connection.send_command(*command, check_health=False)
            answer = connection.read_response()
        except BaseException as error:
            # After an error that the server sent, the connection is still good.
            if isinstance(error, redis.exceptions.NoScriptError):
                self._ready.append(connection)
            else:
                connection.disconnect()
                self._drop_idle()  # they met the same fate, or lead to a server that is no master any more
            raise
        self._ready.append(connection)
        return answer

    def retry(self, attempt: Callable[[], T], *, deadline_s: float = CALL_DEADLINE_S) -> T:
        """Repeat ``attempt`` over transient faults, with a growing pause, until the deadline."""
        until, pause = time.monotonic() + deadline_s, _FIRST_PAUSE_S
        while True:
            try:
                return attempt()
            except (redis.exceptions.RedisError, OSError) as error:
                if not is_transient(error) or time.monotonic() + pause > until:
                    raise explain(error, redact_url(self.url)) from error
            time.sleep(pause)
            pause = min(pause * 2, _LONGEST_PAUSE_S)

    def view(self, group: GroupKeys) -> GroupView:
        """The group as one consistent picture."""
        return self.run(look(group))

    def wait(self, wait: Wait) -> Entries:
        """Block on a stream of one's own for at most ``wait.ms`` (a long wait ends early), over faults of the connection
        too."""
        until = time.monotonic() + wait.ms / 1000

        def attempt() -> Entries:
            client = self._take()
            try:
                reply = client.execute_command(*_read(wait, until))  # type: ignore[no-untyped-call]
            except BaseException as error:
                client.close()  # an answer may still be under way on it
                if isinstance(error, redis.exceptions.ConnectionError):
                    self._drop_idle()  # they met the same fate
                raise
            with self._lock:
                self._idle.append(client)
            return _entries(reply)

        return self.retry(attempt, deadline_s=wait.ms / 1000)

    def drive(self, flow: Generator[Op, Any, T]) -> T:
        """Run a flow to its end."""
        try:
            op = next(flow)
            while True:
                try:
                    answer = self.wait(op) if isinstance(op, Wait) else self.run(op)
                except Exception as error:
                    op = flow.throw(error)
                else:
                    op = flow.send(answer)
        except StopIteration as stop:
            result: T = stop.value
            return result

    def _take(self) -> redis.Redis:
        self._notice_fork()
        with self._lock:
            if self._idle:
                return self._idle.pop()
        return connect(self.url, block_s=LONGEST_BLOCK_S, single=True)

    def _notice_fork(self) -> None:
        """After a fork the sockets are the parent's: leave them alone, neither used nor shut."""
        if self._pid != os.getpid():
            self._lock = threading.Lock()
            self._idle, self._ready, self._pid = [], [], os.getpid()

    def _drop_idle(self) -> None:
        self._notice_fork()
        with self._lock:
            idle, self._idle = self._idle, []
            ready, self._ready = self._ready, []
        for client in idle:
            client.close()
        for connection in ready:
            connection.disconnect()

    def close(self) -> None:
        self._drop_idle()
        if self._pid == os.getpid():
            self.client.close()


class AsyncDriver:
    """As SyncDriver, for one event loop."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.client = connect_async(url)
        self._idle: list[redis.asyncio.Redis] = []

    async def run(self, call: Call[T], *, deadline_s: float | None = None) -> T:
        async def attempt() -> Any:
            try:
                return await self.client.execute_command(*_command(call, whole=False))  # type: ignore[no-untyped-call]
            except redis.exceptions.NoScriptError:
                return await self.client.execute_command(*_command(call, whole=True))  # type: ignore[no-untyped-call]

        return call.parse(await self.retry(attempt, deadline_s=call.deadline_s if deadline_s is None else deadline_s))

    async def retry(self, attempt: Callable[[], Awaitable[T]], *, deadline_s: float = CALL_DEADLINE_S) -> T:
        until, pause = time.monotonic() + deadline_s, _FIRST_PAUSE_S
        while True:
            try:
                return await attempt()
            except (redis.exceptions.RedisError, OSError) as error:
                if not is_transient(error) or time.monotonic() + pause > until:
                    raise explain(error, redact_url(self.url)) from error
            await asyncio.sleep(pause)
            pause = min(pause * 2, _LONGEST_PAUSE_S)

    async def view(self, group: GroupKeys) -> GroupView:
        return await self.run(look(group))

    async def wait(self, wait: Wait) -> Entries:
        until = time.monotonic() + wait.ms / 1000

        async def attempt() -> Entries:
            client = self._idle.pop() if self._idle else connect_async(self.url, block_s=LONGEST_BLOCK_S, single=True)
            try:
                reply = await client.execute_command(*_read(wait, until))  # type: ignore[no-untyped-call]
            except BaseException as error:
                await client.aclose()  # an answer may still be under way on it
                if isinstance(error, redis.exceptions.ConnectionError):
                    await self._drop_idle()  # they met the same fate
                raise
            self._idle.append(client)
            return _entries(reply)

        return await self.retry(attempt, deadline_s=wait.ms / 1000)

    async def drive(self, flow: Generator[Op, Any, T]) -> T:
        try:
            op = next(flow)
            while True:
                try:
                    answer = await (self.wait(op) if isinstance(op, Wait) else self.run(op))
                except Exception as error:
                    op = flow.throw(error)
                else:
                    op = flow.send(answer)
        except StopIteration as stop:
            result: T = stop.value
            return result

    async def _drop_idle(self) -> None:
        idle, self._idle = self._idle, []
        for client in idle:
            await client.aclose()

    async def close(self) -> None:
        await self._drop_idle()
        await self.client.aclose()
