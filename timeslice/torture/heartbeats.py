"""Reads when nodes' heartbeats were overdue: what the scripts decide by, and tell nowhere."""

from __future__ import annotations

import threading
import time
from typing import Any, NamedTuple

from timeslice.errors import TimeSliceError
from timeslice.locks.drivers import SyncDriver
from timeslice.locks.keys import Keys
from timeslice.locks.scripts import text
from timeslice.torture.history import Silent, Writer

_EVERY_S = 0.4
_STEP_NS = 1_000_000_000  # a server's clock that moved by so much says nothing of the time before
_MS = 1_000_000


class Beat(NamedTuple):
    """A node's deadline, and when it was read, on the server's clock (ms); ``offset`` leads to the history's (ns)."""

    deadline: int
    now: int
    offset: int


def overdue(before: Beat | None, beat: Beat, ttl_ms: int) -> list[tuple[int, int]]:
    """When the node was silent between two looks, and is now; on the history's clock.

    A heartbeat puts the deadline off to ``ttl_ms`` from then, so that it tells when it came.
    """
    found = []
    if before is not None and abs(beat.offset - before.offset) < _STEP_NS and beat.deadline > before.deadline:
        came = beat.deadline - ttl_ms
        if came > before.deadline:
            found.append((before.deadline, came))
    if beat.now > beat.deadline:
        found.append((beat.deadline, beat.now))
    return [(start * _MS + beat.offset, end * _MS + beat.offset) for start, end in found]


class Heartbeats:
    """A thread. Faults of the server delay it, no more."""

    def __init__(self, url: str, groups: tuple[str, ...], ttl_s: float, writer: Writer) -> None:
        self._driver, self._writer, self._ttl_ms = SyncDriver(url), writer, int(ttl_s * 1000)
        self._keys = {group: Keys().group(group).nodes for group in groups}
        self._last: dict[tuple[str, str], Beat] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="torture-heartbeats", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self._driver.close()

    def _run(self) -> None:
        while not self._stop.wait(_EVERY_S):
            for group, key in self._keys.items():
                try:
                    self._read(group, key)
                except TimeSliceError:
                    continue  # it does not answer now

    def _read(self, group: str, key: str) -> None:
        client: Any = self._driver.client

        def ask() -> tuple[Any, Any]:
            return client.zrange(key, 0, -1, withscores=True), client.time()

        nodes, (seconds, micros) = self._driver.retry(ask, deadline_s=0)
        now = seconds * 1000 + micros // 1000
        offset = time.monotonic_ns() - now * _MS
        for raw, score in nodes:
            place, beat = (group, text(raw)), Beat(int(score), now, offset)
            for since, until in overdue(self._last.get(place), beat, self._ttl_ms):
                self._writer.write(Silent(at=until, who="heartbeats", node=place[1], group=group, since=since))
            self._last[place] = beat
