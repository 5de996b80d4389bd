"""Locks: what a hold costs alone, and how fast it passes from one process to another."""

from __future__ import annotations

import multiprocessing as mp
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from multiprocessing.connection import Connection
from typing import Any

import redis

import timeslice
from benchmarks.tools import Figures, free_port, rounds, tcp_url
from timeslice.embedded import EmbeddedServer
from timeslice.locks import scripts
from timeslice.locks.drivers import SyncDriver
from timeslice.locks.keys import Keys

ALONE, HANDOFFS, SLOW_HANDOFFS = 300, 60, 6


def _alone_ours(client: timeslice.Client) -> list[float]:
    times = []
    for _ in range(ALONE):
        began = time.perf_counter()
        lease = client.acquire("bench", lock_only=True)
        client.yield_(lease)
        times.append(time.perf_counter() - began)
    return times


def _alone_theirs(server: redis.Redis) -> list[float]:
    times = []
    for _ in range(ALONE):
        lock = server.lock("bench-lock", timeout=30)
        began = time.perf_counter()
        lock.acquire()
        lock.release()
        times.append(time.perf_counter() - began)
    return times


# --- the other process: says "about to wait", waits, says when it was inside ------------------------------------


def _ours(url: str, pipe: Connection) -> None:
    client = timeslice.Client(url, job="other")
    while pipe.recv():
        lease = client.acquire("handoff", lock_only=True, timeout=30)
        inside = time.monotonic()
        client.yield_(lease)
        pipe.send(inside)


def _stream(url: str, pipe: Connection) -> None:
    server = redis.Redis.from_url(url, socket_timeout=60)
    last: Any = "0-0"
    while pipe.recv():
        entries: Any = server.xread({"bench-stream": last}, block=30_000)
        inside = time.monotonic()
        last = entries[0][1][-1][0] if isinstance(entries, list) else next(iter(entries.values()))[0][-1][0]
        pipe.send(inside)


def _lock(url: str, pipe: Connection) -> None:
    server = redis.Redis.from_url(url)
    while pipe.recv():
        lock = server.lock("handoff-lock", timeout=30)
        lock.acquire()
        inside = time.monotonic()
        lock.release()
        pipe.send(inside)


class _Other(AbstractContextManager["_Other"]):
    """A process that runs one of the above; ``blocked`` tells when it really waits."""

    def __init__(self, run: Callable[[str, Connection], None], url: str, blocked: Callable[[], bool]) -> None:
        self.pipe, theirs = mp.Pipe()
        self.process = mp.get_context("spawn").Process(target=run, args=(url, theirs), daemon=True)
        self.process.start()
        self.blocked = blocked

    def handoff(self, prepare: Callable[[], Callable[[], object]]) -> float:
        """Seconds from giving up here to being inside there."""
        give_up = prepare()
        self.pipe.send(True)
        until = time.monotonic() + 30
        while not self.blocked():
            if time.monotonic() > until:
                raise TimeoutError("the other process never began to wait")
        time.sleep(0.003)  # from "queued" to "blocked in the read"; not part of what is measured
        began = time.monotonic()
        give_up()
        inside: float = self.pipe.recv()
        return inside - began

    def __exit__(self, *_: object) -> None:
        self.pipe.send(False)
        self.process.join(10)


def _script_times(url: str) -> dict[str, float]:
    """Microseconds that the server spends in each verb of the fast path, by its own statistics."""
    driver, server = SyncDriver(url), redis.Redis.from_url(url)
    group = Keys().group("micro")
    spent: dict[str, list[float]] = {"acquire": [], "renew": [], "yield": []}

    def timed(verb: str, call: scripts.Call[Any]) -> Any:
        server.config_resetstat()
        answer = driver.run(call)
        stats: Any = server.info("commandstats")
        spent[verb].append(float(stats["cmdstat_evalsha"]["usec"]))
        return answer

    for number in range(400):
        request = scripts.Request(f"w{number}", "a", "here", os.getpid(), 1, lock_only=True)
        granted = timed("acquire", scripts.acquire(group, request))
        timed("renew", scripts.renew(group, request, granted.token, mode="lock"))
        timed("yield", scripts.yield_(group, request.waiter, granted.token))
    return {f"script_{verb}_us": sorted(times[10:])[len(times[10:]) // 2] for verb, times in spent.items()}


def measure() -> Figures:
    with EmbeddedServer(port=free_port()) as embedded:
        url = tcp_url(embedded)
        server = redis.Redis.from_url(url)
        client = timeslice.Client(url, job="here")
        handoff_keys = Keys().group("handoff")
        ours_alone, theirs_alone = rounds(lambda: _alone_ours(client), lambda: _alone_theirs(server))

        def hold() -> Callable[[], object]:
            lease = client.acquire("handoff", lock_only=True, timeout=30)
            return lambda: client.yield_(lease)

        def stream() -> Callable[[], object]:
            return lambda: server.xadd("bench-stream", {"a": "b"}, maxlen=10)

        def lock() -> Any:
            held = server.lock("handoff-lock", timeout=30)
            held.acquire()
            return held.release

        def reads() -> bool:
            clients: Any = server.client_list()
            return any(one["cmd"] == "xread" and "b" in one["flags"] for one in clients)

        with (
            _Other(_ours, url, lambda: server.zcard(handoff_keys.queue) == 1) as ours,
            _Other(_stream, url, reads) as bare,
            _Other(_lock, url, lambda: True) as theirs,
        ):
            ours_handoff, bare_handoff, their_handoff = rounds(
                lambda: [ours.handoff(hold) for _ in range(HANDOFFS)],
                lambda: [bare.handoff(stream) for _ in range(HANDOFFS)],
                lambda: [theirs.handoff(lock) for _ in range(SLOW_HANDOFFS)],
            )
        client.close()
        micros = _script_times(url)
    return Figures(
        ratios={
            "uncontended_vs_redis_py_lock": ours_alone / theirs_alone,
            "handoff_vs_stream_wakeup": ours_handoff / bare_handoff,
            "redis_py_lock_handoff_vs_ours": their_handoff / ours_handoff,
        },
        values={
            "uncontended_us": ours_alone * 1e6,
            "redis_py_lock_us": theirs_alone * 1e6,
            "handoff_us": ours_handoff * 1e6,
            "stream_wakeup_us": bare_handoff * 1e6,
            "redis_py_lock_handoff_ms": their_handoff * 1e3,
            **micros,
        },
        aims={
            "uncontended_vs_redis_py_lock": "<= 1.6",
            "handoff_vs_stream_wakeup": "<= 2.5",
            "redis_py_lock_handoff_vs_ours": ">= 100",
        },
    )
