"""Whether anything grows: keys, stream lengths and memory, sampled over a run."""

from __future__ import annotations

import statistics
import threading
from collections.abc import Callable, Mapping, Sequence

import psutil

from timeslice.errors import TimeSliceError
from timeslice.locks.drivers import SyncDriver
from timeslice.locks.keys import Keys
from timeslice.torture.stage import GROUPS, NODES

EVERY_S = 2.0


class Sampler:
    """A thread. ``series`` has the values by name; a sample that the server does not answer is left out."""

    def __init__(self, url: str, processes: Callable[[], Mapping[str, Sequence[int]]]) -> None:
        """``processes``: role -> process ids, asked at each sample."""
        self._driver, self._processes = SyncDriver(url), processes
        self._stop = threading.Event()
        self.series: dict[str, list[float]] = {}
        self._thread = threading.Thread(target=self._run, name="torture-samples", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self._driver.close()

    def _run(self) -> None:
        while not self._stop.wait(EVERY_S):
            for role, pids in self._processes().items():
                if sizes := [size for pid in pids if (size := _rss(pid))]:
                    self._note(f"{role}_rss_bytes", max(sizes))
            try:
                self._note("keys", self._count_keys())
                self._note("longest_stream", self._longest_stream())
            except TimeSliceError:
                pass  # a fault: the next sample may be luckier

    def _note(self, name: str, value: float) -> None:
        self.series.setdefault(name, []).append(value)

    def _count_keys(self) -> int:
        client = self._driver.client
        return int(self._driver.retry(client.dbsize, deadline_s=0))

    def _longest_stream(self) -> int:
        keys, client = Keys(), self._driver.client
        groups = [keys.group(group) for group in GROUPS]
        streams = [stream for group in groups for stream in (group.events, group.inbox)]
        streams += [keys.commands(node) for node in NODES]

        def lengths() -> list[int]:
            return [int(client.xlen(stream)) for stream in streams]

        return max(self._driver.retry(lengths, deadline_s=0))


def quarters(series: Mapping[str, Sequence[float]]) -> dict[str, dict[str, float]]:
    """Of each series the means of its quarters: the first, the last and the highest."""
    found = {}
    for name, values in series.items():
        size = max(len(values) // 4, 1)
        means = [statistics.fmean(values[start : start + size]) for start in range(0, len(values), size)][:4]
        found[name] = {"first": round(means[0], 1), "last": round(means[-1], 1), "highest": round(max(means), 1)}
    return found


def _rss(pid: int) -> int:
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return 0
