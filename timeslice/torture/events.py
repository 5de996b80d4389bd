"""Reads the groups' event streams into the history all along."""

from __future__ import annotations

import threading
from typing import Any

import redis

from timeslice.errors import TimeSliceError
from timeslice.locks.drivers import SyncDriver
from timeslice.locks.keys import GroupKeys, Keys
from timeslice.locks.scripts import text
from timeslice.torture.history import Told, Writer

_PAUSE_S = 0.2
_AT_ONCE = 500


class EventReader:
    """A thread. ``counts`` has the number of events by type so far. Faults of the server delay it, no more."""

    def __init__(self, url: str, groups: tuple[str, ...], writer: Writer) -> None:
        self._driver = SyncDriver(url)
        self._groups = {group: Keys().group(group) for group in groups}
        self._last = dict.fromkeys(groups, "0-0")
        self._writer = writer
        self.counts: dict[str, int] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="torture-events", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Read what is there now, and end."""
        self._stop.set()
        self._thread.join()
        self._driver.close()

    def _run(self) -> None:
        while not self._stop.wait(_PAUSE_S):
            self._read_all()
        self._read_all()

    def _read_all(self) -> None:
        for group, keys in self._groups.items():
            try:
                while self._read(group, keys):
                    pass
            except TimeSliceError:
                pass  # it does not answer now; what it has to tell is told later

    def _read(self, group: str, keys: GroupKeys) -> bool:
        """Whether there may be more."""
        client = self._driver.client
        found: Any = self._driver.retry(
            lambda: client.xrange(keys.events, f"({self._last[group]}", "+", count=_AT_ONCE), deadline_s=0
        )
        if not found and self._started_over(group, keys):
            self._last[group] = "0-0"
            return True
        for raw_id, fields in found:
            entry = text(raw_id)
            said = {text(name): text(value) for name, value in fields.items()}
            kind = said.get("type", "")
            self._writer.write(Told(who="events", group=group, entry=entry, type=kind, fields=said))
            self.counts[kind] = self.counts.get(kind, 0) + 1
            self._last[group] = entry
        return len(found) == _AT_ONCE

    def _started_over(self, group: str, keys: GroupKeys) -> bool:
        """After data loss and with an earlier clock, new entries have lower ids than those that were read."""
        client = self._driver.client

        def newest() -> Any:
            try:
                return client.xinfo_stream(keys.events)["last-generated-id"]
            except redis.exceptions.ResponseError:  # no such key
                return b"0-0"

        seen = text(self._driver.retry(newest, deadline_s=0))
        return seen != "0-0" and _order(seen) < _order(self._last[group])


def _order(entry: str) -> tuple[int, int]:
    stamp, _, number = entry.partition("-")
    return int(stamp), int(number)
