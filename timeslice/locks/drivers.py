"""Drivers run calls and flows: one for threads, one for asyncio. They wait; they decide nothing.

The same on one server, behind sentinels and on a cluster. What differs is redis-py's: sentinels are asked for the
master at each reconnect, and a cluster's client knows who has which slot, follows redirections, and asks anew after a
failure. A driver only tells it which key a command is about, and asks again until the deadline.
"""

from __future__ import annotations

import asyncio
import math
import os
import threading
import time
from collections.abc import Awaitable, Callable, Generator, Sequence
from typing import Any, TypeVar

import redis
import redis.asyncio

from timeslice.addresses import parse_url
from timeslice.errors import ServerUnsuitableError
from timeslice.locks.commands import BLOCK_S, Command, entries_of, first_error, read_command, script_command
from timeslice.locks.connection import REPLY_TIMEOUT_S, connect, connect_async, disconnect, disconnect_async
from timeslice.locks.faults import SERVER_ERRORS, speaks_otherwise, speaks_otherwise_async
from timeslice.locks.flows import Entries, Op, Wait
from timeslice.locks.keys import GroupKeys
from timeslice.locks.outages import ROTATION_S, Tries, contact_of
from timeslice.locks.scripts import CALL_DEADLINE_S, Call
from timeslice.locks.view import GroupView, look

T = TypeVar("T")

_NoScript = redis.exceptions.NoScriptError
# What an attempt may raise: a search for a master raises ServerUnsuitableError.
_FAULTS = (*SERVER_ERRORS, ServerUnsuitableError)


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

    ``reply_s``: how long one attempt of a call waits for its answer. ``patience_s``: how long a call without a deadline
    of its own is tried.
    """

    def __init__(self, url: str, *, reply_s: float = REPLY_TIMEOUT_S, patience_s: float = CALL_DEADLINE_S) -> None:
        self.url, self.patience_s = url, patience_s
        self._contact = contact_of(url)
        self._address = self._contact.address
        self._is_cluster = parse_url(url).kind == "cluster"
        self._reply_s = reply_s
        self._clients: dict[str, Any] = {}
        self._ready: dict[str, list[Any]] = {"calls": [], "waits": []}  # connections that were used, for the next one
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
                return self._ask("calls", call.keys[0], script_command(call, whole=False))
            except _NoScript:
                return self._ask("calls", call.keys[0], script_command(call, whole=True))

        return call.parse(self.retry(attempt, deadline_s=call.deadline_s if deadline_s is None else deadline_s))

    def _ask(self, use: str, key: str, command: Command) -> Any:
        """One question, one answer."""
        if self._is_cluster:
            return _route(self._client(use), key, command)
        return first_error(self._exchange(use, [command]))[0]

    def _exchange(self, use: str, commands: Sequence[Command]) -> list[Any]:
        """Answers, some of them errors, by a connection that nobody else uses meanwhile. It is used again only when all
        was answered: whatever interrupts us, no answer is left for the next one to read.

        redis-py's pool and its bookkeeping would cost a hold that is alone a third of its time.
        """
        self._notice_fork()
        connection = self._take(use)
        answers: list[Any] = []
        try:
            connection.send_packed_command(connection.pack_commands(commands), check_health=False)
            for _ in commands:
                try:
                    answers.append(connection.read_response())
                except redis.exceptions.ResponseError as error:
                    answers.append(error)
        except BaseException:
            connection.disconnect()
            self.drop_idle()
            raise
        if all(not isinstance(answer, Exception) or isinstance(answer, _NoScript) for answer in answers):
            self._ready[use].append(connection)
        else:  # the server may be no master any more
            connection.disconnect()
            self.drop_idle()
        return answers

    def _take(self, use: str) -> Any:
        """A connection on which nothing is under way: neither a word that nobody asked for, which would be taken for
        the next answer, nor the server's good-bye."""
        ready = self._ready[use]
        while True:
            try:
                connection = ready.pop()
            except IndexError:
                break
            if _is_quiet(connection):
                return connection
            connection.disconnect()
        pool = self._client(use).connection_pool  # its limit is not ours: each is used by one thread at a time
        connection = pool.connection_class(**pool.connection_kwargs)
        connection.connect()  # behind sentinels: to the master that they name now
        return connection

    def pipe(self, commands: Sequence[Command], *, deadline_s: float | None = None) -> list[Any]:
        """Plain commands, each about one key, which is its second word; on one server in one round trip.

        No transaction: after a fault all are sent again.
        """

        def attempt() -> list[Any]:
            if self._is_cluster:
                return [_route(self.client, str(command[1]), command) for command in commands]
            return first_error(self._exchange("calls", commands))

        return self.retry(attempt, deadline_s=deadline_s)

    def retry(self, attempt: Callable[[], T], *, deadline_s: float | None = None) -> T:
        """Repeat ``attempt`` over transient faults, with a growing pause, until the deadline, which may be infinite."""
        began, tries = time.monotonic(), None
        while True:
            try:
                answer = attempt()
            except _FAULTS as error:
                if type(error) is redis.exceptions.RedisClusterException:
                    self._drop_clients()  # nobody that it knows answers: begin anew with those of the URL
                tries = tries or Tries(self._contact, began, self.patience_s if deadline_s is None else deadline_s)
                pause, told = tries.failed(error)
                if tries.wants_look(told, over=pause is None) and (otherwise := speaks_otherwise(self._address)):
                    raise otherwise from error
                if pause is None and told is error:
                    raise
                if pause is None:
                    raise told from error
            else:
                self._contact.answered(again=tries is not None)
                return answer
            self._follow()
            time.sleep(pause)

    def _follow(self) -> None:
        """Go where the server is now."""
        if self._address != self._contact.address:
            self._address = self._contact.address
            self.drop_idle()
            self._drop_clients()

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
            reply = self.retry(
                lambda: self._ask("waits", wait.key, read_command(wait, until)), deadline_s=until - time.monotonic()
            )
            if reply or time.monotonic() >= until:
                return entries_of(reply)

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
                    found = self._clients[use] = connect(self._address, block_s=block_s, reply_s=self._reply_s)
        return found

    def _notice_fork(self) -> None:
        """After a fork the sockets are the parent's: leave them alone, neither used nor shut. Its locks may be held for
        ever, so that not even the clients may be let go."""
        if self._pid != os.getpid():
            self._of_the_parent.append((self._clients, self._ready))
            self._lock, self._clients, self._pid = threading.RLock(), {}, os.getpid()
            self._ready = {"calls": [], "waits": []}

    def drop_idle(self) -> None:
        """Close what nobody uses just now."""
        self._notice_fork()
        for ready in self._ready.values():
            while ready:
                try:
                    connection = ready.pop()
                except IndexError:  # taken in this moment
                    break
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
        self.drop_idle()
        self._drop_clients()


def _route(client: Any, key: str, command: Command) -> Any:
    """To the node of a cluster that has the key. Without the key redis-py asks a server what a command's keys are."""
    return client.execute_command(*command, target_nodes=client.get_node_from_key(key))


def _named(node: Any) -> str:
    return f"{node.host}:{node.port}"


class AsyncDriver:
    """As SyncDriver, for one event loop."""

    def __init__(self, url: str, *, patience_s: float = CALL_DEADLINE_S) -> None:
        self.url, self.patience_s = url, patience_s
        self._contact = contact_of(url)
        self._is_cluster = parse_url(url).kind == "cluster"
        self._connect()

    def _connect(self) -> None:
        self._address = self._contact.address
        self.client = connect_async(self._address)
        self._waits: Any = connect_async(self._address, block_s=BLOCK_S)

    async def run(self, call: Call[T], *, deadline_s: float | None = None) -> T:
        async def attempt() -> Any:
            try:
                return await self._send(self.client, call.keys[0], script_command(call, whole=False))
            except _NoScript:
                return await self._send(self.client, call.keys[0], script_command(call, whole=True))

        return call.parse(await self.retry(attempt, deadline_s=call.deadline_s if deadline_s is None else deadline_s))

    async def _send(self, client: Any, key: str, command: Command) -> Any:
        if self._is_cluster:
            await client.initialize()
            return await client.execute_command(*command, target_nodes=client.get_node_from_key(key))
        try:
            return await client.execute_command(*command)
        except Exception as error:
            if _unreliable(error) and not isinstance(error, _NoScript):
                await self.drop_idle()
            raise

    async def pipe(self, commands: Sequence[Command], *, deadline_s: float | None = None) -> list[Any]:
        async def attempt() -> list[Any]:
            if self._is_cluster:
                return await asyncio.gather(
                    *(self._send(self.client, str(command[1]), command) for command in commands)
                )
            async with self.client.pipeline(transaction=False) as pipeline:
                for command in commands:
                    pipeline.execute_command(*command)
                return first_error(await pipeline.execute(raise_on_error=False))

        return await self.retry(attempt, deadline_s=deadline_s)

    async def retry(self, attempt: Callable[[], Awaitable[T]], *, deadline_s: float | None = None) -> T:
        began, tries = time.monotonic(), None
        while True:
            try:
                answer = await attempt()
            except _FAULTS as error:
                starts = ROTATION_S if self.patience_s == math.inf else 0.0  # a daemon that waits for its server
                limit_s = self.patience_s if deadline_s is None else deadline_s
                tries = tries or Tries(self._contact, began, limit_s, rotation_s=starts)
                pause, told = tries.failed(error)
                if type(error) is redis.exceptions.RedisClusterException or self._address != self._contact.address:
                    await self.close()
                    self._connect()
                if tries.wants_look(told, over=pause is None) and (
                    otherwise := await speaks_otherwise_async(self._address)
                ):
                    raise otherwise from error
                if pause is None and told is error:
                    raise
                if pause is None:
                    raise told from error
            else:
                self._contact.answered(again=tries is not None)
                return answer
            await asyncio.sleep(pause)

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
                lambda: self.block(wait.key, read_command(wait, until)), deadline_s=until - time.monotonic()
            )
            if reply or time.monotonic() >= until:
                return entries_of(reply)

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

    async def drop_idle(self) -> None:
        """Close what nobody uses just now."""
        for client in (self.client, self._waits):
            await client.connection_pool.disconnect(inuse_connections=False)

    async def close(self) -> None:
        await disconnect_async(self.client)
        await disconnect_async(self._waits)
