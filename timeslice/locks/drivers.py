"""Drivers run calls and flows: one for threads, one for asyncio. They wait; they decide nothing.

The same on one server, behind sentinels and on a cluster. What differs is redis-py's: sentinels are asked for the
master at each reconnect, and a cluster's client knows who has which slot, follows redirections, and asks anew after a
failure. A driver only tells it which key a command is about, and asks again until the deadline.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Awaitable, Callable, Generator, Sequence
from typing import Any, TypeVar

import redis
import redis.asyncio

from timeslice.addresses import parse_url
from timeslice.errors import RedisUnreachableError
from timeslice.locks.connection import REPLY_TIMEOUT_S, connect, connect_async, disconnect, disconnect_async
from timeslice.locks.faults import SERVER_ERRORS, explain, is_transient, speaks_otherwise, speaks_otherwise_async
from timeslice.locks.flows import Entries, Op, Wait
from timeslice.locks.keys import GroupKeys
from timeslice.locks.scripts import CALL_DEADLINE_S, Call, text
from timeslice.locks.view import GroupView, look

T = TypeVar("T")
Command = Sequence[str | int]

# The longest wait at once: how soon a connection that died silently is noticed. With the margin that its socket has, it
# is well below the time in which an agent must take an order.
BLOCK_S = 3.0
_LOOK_S = 1.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 0.5


def _entries(reply: Any) -> Entries:
    """XREAD's answer for one stream: [(id, {field: value})]."""
    found: Entries = []
    for _, items in reply or []:
        for entry_id, fields in items:
            found.append((text(entry_id), {text(k): text(v) for k, v in (fields or {}).items()}))
    return found


def _script(call: Call[Any], *, whole: bool) -> Command:
    """EVALSHA, or EVAL when the server does not know the script (which also teaches it)."""
    verb, body = ("EVAL", call.script.source) if whole else ("EVALSHA", call.script.sha)
    verb += "_RO" if call.script.reads_only else ""
    return [verb, body, len(call.keys), *call.keys, *call.args]


def _xread(wait: Wait, until: float) -> Command:
    """XREAD for what is left of the wait, or its longest piece; 0 would mean for ever."""
    left_ms = int(min(until - time.monotonic(), BLOCK_S) * 1000)
    return ["XREAD", "BLOCK", max(left_ms, 1), "STREAMS", wait.key, wait.after]


def _first_error(replies: list[Any]) -> list[Any]:
    for reply in replies:
        if isinstance(reply, Exception):
            raise reply
    return replies


def _unreliable(error: BaseException) -> bool:
    """Whether other connections met the same fate, or lead to a server that is no master any more."""
    return isinstance(error, redis.exceptions.ConnectionError | redis.exceptions.ResponseError | OSError)


def _is_quiet(connection: Any) -> bool:
    """Whether nothing arrived on a connection since its last answer. It costs a microsecond."""
    try:
        return not connection.can_read()
    except (redis.exceptions.ConnectionError, OSError):
        return False  # closed


class SyncDriver:
    """Runs calls on connections of their own, and waits on others. Threads may share it.

    ``reply_s``: how long one attempt of a call waits for its answer.
    """

    def __init__(self, url: str, *, reply_s: float = REPLY_TIMEOUT_S) -> None:
        self.url = url
        self._is_cluster = parse_url(url).kind == "cluster"
        self._reply_s = reply_s
        self._clients: dict[str, Any] = {}
        self._ready: list[Any] = []  # connections for calls, kept for the next one
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._of_the_parent: list[Any] = []

    @property
    def client(self) -> redis.Redis:
        """For plain commands, each about one key. It may raise redis-py's errors: use it inside of ``retry``."""
        client: redis.Redis = self._client("calls")
        return client

    def run(self, call: Call[T], *, deadline_s: float | None = None) -> T:
        """Send a call until it is answered. RedisUnreachableError after ``deadline_s`` (default: the call's own)."""

        def attempt() -> Any:
            try:
                return self._ask(call.keys[0], _script(call, whole=False))
            except redis.exceptions.NoScriptError:
                return self._ask(call.keys[0], _script(call, whole=True))

        return call.parse(self.retry(attempt, deadline_s=call.deadline_s if deadline_s is None else deadline_s))

    def _ask(self, key: str, command: Command) -> Any:
        """One question, one answer, on a connection that nobody else uses meanwhile.

        redis-py's pool and its bookkeeping would cost a hold that is alone a third of its time.
        """
        self._notice_fork()
        if self._is_cluster:
            return _route(self.client, key, command)
        connection = self._take()
        try:
            connection.send_command(*command, check_health=False)
            answer = connection.read_response()
        except BaseException as error:
            # After an error that the server sent, the connection is still good.
            if isinstance(error, redis.exceptions.NoScriptError):
                self._ready.append(connection)
            else:
                connection.disconnect()
                self._drop_idle()
            raise
        self._ready.append(connection)
        return answer

    def _take(self) -> Any:
        """A connection on which nothing is under way: neither a word that nobody asked for, which would be taken for
        the next answer, nor the server's good-bye."""
        while True:
            try:
                connection = self._ready.pop()
            except IndexError:
                break
            if _is_quiet(connection):
                return connection
            connection.disconnect()
        pool = self.client.connection_pool  # its limit is not ours: each of these is used by one thread at a time
        connection = pool.connection_class(**pool.connection_kwargs)
        connection.connect()  # behind sentinels: to the master that they name now
        return connection

    def pipe(self, commands: Sequence[Command], *, deadline_s: float = CALL_DEADLINE_S) -> list[Any]:
        """Plain commands, each about one key, which is its second word; on one server in one round trip.

        No transaction: after a fault all are sent again.
        """

        def attempt() -> list[Any]:
            client: Any = self.client
            if self._is_cluster:
                return [_route(client, str(command[1]), command) for command in commands]
            with client.pipeline(transaction=False) as pipeline:
                for command in commands:
                    pipeline.execute_command(*command)
                return _first_error(pipeline.execute(raise_on_error=False))

        return self.retry(attempt, deadline_s=deadline_s)

    def retry(self, attempt: Callable[[], T], *, deadline_s: float = CALL_DEADLINE_S) -> T:
        """Repeat ``attempt`` over transient faults, with a growing pause, until the deadline."""
        until, pause = time.monotonic() + deadline_s, _FIRST_PAUSE_S
        while True:
            try:
                return attempt()
            except SERVER_ERRORS as error:
                if type(error) is redis.exceptions.RedisClusterException:
                    self._drop_clients()  # nobody that it knows answers: begin anew with those of the URL
                if not is_transient(error) or time.monotonic() + pause > until:
                    told = explain(error, self.url)
                    # Who gives no time for an answer has none for a closer look either.
                    look = deadline_s >= _LOOK_S and isinstance(told, RedisUnreachableError)
                    raise (speaks_otherwise(self.url) if look else None) or told from error
            time.sleep(pause)
            pause = min(pause * 2, _LONGEST_PAUSE_S)

    def view(self, group: GroupKeys) -> GroupView:
        """The group as one consistent picture."""
        return self.run(look(group))

    def infos(self) -> dict[str, Any]:
        """INFO of every master, by its address. Raises redis-py's errors."""
        client: Any = self.client
        if self._is_cluster:
            return {_named(node): client.info(target_nodes=node) for node in client.get_primaries()}
        return {parse_url(self.url).shown: client.info()}

    def wait(self, wait: Wait) -> Entries:
        """Block on a stream of one's own for at most ``wait.ms``, over faults of the connection too."""
        until = time.monotonic() + wait.ms / 1000
        while True:
            reply = self.retry(lambda: self._block(wait.key, _xread(wait, until)), deadline_s=until - time.monotonic())
            if reply or time.monotonic() >= until:
                return _entries(reply)

    def _block(self, key: str, command: Command) -> Any:
        client = self._client("waits")
        if self._is_cluster:
            return _route(client, key, command)
        try:
            return client.execute_command(*command)
        except BaseException as error:
            if _unreliable(error):
                self._drop_idle()
            raise

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

    def _client(self, use: str) -> Any:
        """The client for ``calls`` or ``waits``, made when it is first needed."""
        self._notice_fork()
        found = self._clients.get(use)
        if found is None:
            with self._lock:
                found = self._clients.get(use)
                if found is None:
                    block_s = BLOCK_S if use == "waits" else 0.0
                    found = self._clients[use] = connect(self.url, block_s=block_s, reply_s=self._reply_s)
        return found

    def _notice_fork(self) -> None:
        """After a fork the sockets are the parent's: leave them alone, neither used nor shut. Its locks may be held for
        ever, so that not even the clients may be let go."""
        if self._pid != os.getpid():
            self._of_the_parent.append((self._clients, self._ready))
            self._lock, self._clients, self._ready, self._pid = threading.RLock(), {}, [], os.getpid()

    def _drop_idle(self) -> None:
        """Close what nobody uses just now."""
        self._notice_fork()
        with self._lock:
            ready, self._ready = self._ready, []
        for connection in ready:
            connection.disconnect()
        for client in () if self._is_cluster else list(self._clients.values()):
            client.connection_pool.disconnect(inuse_connections=False)

    def _drop_clients(self) -> None:
        with self._lock:
            clients, self._clients = self._clients, {}
        for client in clients.values():
            disconnect(client)

    def close(self) -> None:
        """Close all connections; new ones are made when the driver is used again."""
        self._drop_idle()
        self._drop_clients()


def _route(client: Any, key: str, command: Command) -> Any:
    """To the node of a cluster that has the key. Without the key redis-py asks a server what a command's keys are."""
    return client.execute_command(*command, target_nodes=client.get_node_from_key(key))


def _named(node: Any) -> str:
    return f"{node.host}:{node.port}"


class AsyncDriver:
    """As SyncDriver, for one event loop."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._is_cluster = parse_url(url).kind == "cluster"
        self.client = connect_async(url)
        self._waits: Any = connect_async(url, block_s=BLOCK_S)

    async def run(self, call: Call[T], *, deadline_s: float | None = None) -> T:
        async def attempt() -> Any:
            try:
                return await self._send(self.client, call.keys[0], _script(call, whole=False))
            except redis.exceptions.NoScriptError:
                return await self._send(self.client, call.keys[0], _script(call, whole=True))

        return call.parse(await self.retry(attempt, deadline_s=call.deadline_s if deadline_s is None else deadline_s))

    async def _send(self, client: Any, key: str, command: Command) -> Any:
        if self._is_cluster:
            await client.initialize()
            return await client.execute_command(*command, target_nodes=client.get_node_from_key(key))
        try:
            return await client.execute_command(*command)
        except Exception as error:
            if _unreliable(error) and not isinstance(error, redis.exceptions.NoScriptError):
                await self._drop_idle()
            raise

    async def pipe(self, commands: Sequence[Command], *, deadline_s: float = CALL_DEADLINE_S) -> list[Any]:
        async def attempt() -> list[Any]:
            if self._is_cluster:
                return await asyncio.gather(
                    *(self._send(self.client, str(command[1]), command) for command in commands)
                )
            async with self.client.pipeline(transaction=False) as pipeline:
                for command in commands:
                    pipeline.execute_command(*command)
                return _first_error(await pipeline.execute(raise_on_error=False))

        return await self.retry(attempt, deadline_s=deadline_s)

    async def retry(self, attempt: Callable[[], Awaitable[T]], *, deadline_s: float = CALL_DEADLINE_S) -> T:
        until, pause = time.monotonic() + deadline_s, _FIRST_PAUSE_S
        while True:
            try:
                return await attempt()
            except SERVER_ERRORS as error:
                if type(error) is redis.exceptions.RedisClusterException:
                    await self.close()
                    self.client, self._waits = connect_async(self.url), connect_async(self.url, block_s=BLOCK_S)
                if not is_transient(error) or time.monotonic() + pause > until:
                    told = explain(error, self.url)
                    look = deadline_s >= _LOOK_S and isinstance(told, RedisUnreachableError)
                    raise (await speaks_otherwise_async(self.url) if look else None) or told from error
            await asyncio.sleep(pause)
            pause = min(pause * 2, _LONGEST_PAUSE_S)

    async def view(self, group: GroupKeys) -> GroupView:
        return await self.run(look(group))

    async def infos(self) -> dict[str, Any]:
        client: Any = self.client
        if self._is_cluster:
            await client.initialize()
            return {_named(node): await client.info(target_nodes=node) for node in client.get_primaries()}
        return {parse_url(self.url).shown: await client.info()}

    async def wait(self, wait: Wait) -> Entries:
        until = time.monotonic() + wait.ms / 1000
        while True:
            reply = await self.retry(
                lambda: self.block(wait.key, _xread(wait, until)), deadline_s=until - time.monotonic()
            )
            if reply or time.monotonic() >= until:
                return _entries(reply)

    async def block(self, key: str, command: Command) -> Any:
        """One blocking read of at most BLOCK_S, on a connection of its own. Raises redis-py's errors."""
        return await self._send(self._waits, key, command)

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
        for client in (self.client, self._waits):
            await client.connection_pool.disconnect(inuse_connections=False)

    async def close(self) -> None:
        await disconnect_async(self.client)
        await disconnect_async(self._waits)
