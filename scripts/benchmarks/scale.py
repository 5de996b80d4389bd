"""A thousand groups on one server, each with a blocked waiter of its own: how long a handoff takes among them."""

from __future__ import annotations

import asyncio
import multiprocessing as mp
import time
from multiprocessing.connection import Connection

import timeslice
from benchmarks.tools import Figures, free_port, percentile, tcp_url
from timeslice.embedded import EmbeddedServer
from timeslice.locks.drivers import SyncDriver
from timeslice.locks.keys import Keys

GROUPS = 1000


def _names() -> list[str]:
    return [f"g{number}" for number in range(GROUPS)]


def _waiters(url: str, pipe: Connection) -> None:
    """One process, a thousand waiters; tells for each when it was inside."""

    async def one(client: timeslice.AsyncClient, name: str) -> float:
        lease = await client.acquire(name, lock_only=True, timeout=300)
        inside = time.monotonic()
        await client.yield_(lease)
        return inside

    async def run() -> list[float]:
        async with timeslice.AsyncClient(url, job="waiter") as client:
            tasks = [asyncio.create_task(one(client, name)) for name in _names()]
            return list(await asyncio.gather(*tasks))

    pipe.send(asyncio.run(run()))


def measure() -> Figures:
    with EmbeddedServer(port=free_port()) as embedded, timeslice.Client(tcp_url(embedded), job="holder") as client:
        leases = [client.acquire(name, lock_only=True, lease=300) for name in _names()]
        mine, theirs = mp.Pipe()
        process = mp.get_context("spawn").Process(target=_waiters, args=(tcp_url(embedded), theirs), daemon=True)
        process.start()
        driver = SyncDriver(tcp_url(embedded))
        until = time.monotonic() + 120
        for name in _names():
            while driver.client.zcard(Keys().group(name).queue) == 0:
                if time.monotonic() > until:
                    raise TimeoutError(f"no waiter came to {name}")
                time.sleep(0.01)
        time.sleep(1)  # let the last ones block; not part of what is measured
        began = []
        for lease in leases:
            began.append(time.monotonic())
            client.yield_(lease)
            time.sleep(0.002)  # one after the other, so that a handoff is measured and not a backlog
        inside = mine.recv()
        process.join(30)
        driver.close()
    times = [(there - here) * 1e3 for there, here in zip(inside, began, strict=True)]
    return Figures(
        values={
            "groups_1000_handoff_median_ms": percentile(times, 0.5),
            "groups_1000_handoff_p99_ms": percentile(times, 0.99),
        },
    )
