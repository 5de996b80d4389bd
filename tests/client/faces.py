"""Both clients behind one face, so that one test runs over both."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

from timeslice import AsyncClient, Client
from timeslice.client.lease import BaseLease

T = TypeVar("T")
Body = Callable[[Any], Any]


class Face(Protocol):
    """What waits is started and gives a Future; a body is a plain function that is given the lease."""

    def client(self, **options: Any) -> Any: ...
    def acquire(self, client: Any, group: str, **options: Any) -> Future[BaseLease]: ...
    def give_up(self, lease: Any) -> Any: ...
    def hold(self, client: Any, *groups: str, body: Body, **options: Any) -> Future[Any]: ...
    def nested(self, client: Any, outer: str, inner: str, *, body: Body, **inner_options: Any) -> Future[Any]: ...
    def close(self, client: Any) -> None: ...
    def end(self) -> None: ...


def in_thread(function: Callable[[], T]) -> Future[T]:
    """Run ``function`` in a raw daemon thread, which inherits no context."""
    future: Future[T] = Future()

    def work() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return future


class SyncFace:
    def __init__(self) -> None:
        self._clients: list[Client] = []

    def client(self, **options: Any) -> Client:
        made = Client(**options)
        self._clients.append(made)
        return made

    def acquire(self, client: Client, group: str, **options: Any) -> Future[BaseLease]:
        return in_thread(lambda: client.acquire(group, **options))

    def give_up(self, lease: Any) -> Any:
        return lease.yield_()

    def hold(self, client: Client, *groups: str, body: Body, **options: Any) -> Future[Any]:
        def work() -> Any:
            with client.hold(*groups, **options) as lease:
                return body(lease)

        return in_thread(work)

    def nested(self, client: Client, outer: str, inner: str, *, body: Body, **inner_options: Any) -> Future[Any]:
        def work() -> Any:
            with (
                client.hold(outer, lock_only=True) as first,
                client.hold(inner, lock_only=True, **inner_options) as second,
            ):
                return body((first, second))

        return in_thread(work)

    def close(self, client: Client) -> None:
        client.close()

    def end(self) -> None:
        for client in self._clients:
            client.close()


class AsyncFace:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._clients: list[AsyncClient] = []

    def run(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def client(self, **options: Any) -> AsyncClient:
        made = AsyncClient(**options)
        self._clients.append(made)
        return made

    def acquire(self, client: AsyncClient, group: str, **options: Any) -> Future[BaseLease]:
        return self.run(client.acquire(group, **options))

    def give_up(self, lease: Any) -> Any:
        return self.run(lease.yield_()).result(20)

    def hold(self, client: AsyncClient, *groups: str, body: Body, **options: Any) -> Future[Any]:
        async def work() -> Any:
            async with client.hold(*groups, **options) as lease:
                return await asyncio.to_thread(body, lease)

        return self.run(work())

    def nested(self, client: AsyncClient, outer: str, inner: str, *, body: Body, **inner_options: Any) -> Future[Any]:
        async def work() -> Any:
            holds = client.hold(outer, lock_only=True), client.hold(inner, lock_only=True, **inner_options)
            async with holds[0] as first, holds[1] as second:
                return await asyncio.to_thread(body, (first, second))

        return self.run(work())

    def close(self, client: AsyncClient) -> None:
        self.run(client.close()).result(20)

    def end(self) -> None:
        self.run(self._end()).result(20)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(20)
        self._loop.close()

    async def _end(self) -> None:
        rest = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)
        for client in self._clients:
            await client.close()
