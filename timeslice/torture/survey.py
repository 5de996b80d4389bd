"""What is on the emulated devices, read from the jobs' processes: no part of the product is asked."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from timeslice.arena import EmulatedDeviceError
from timeslice.arena.survey import arenas_of
from timeslice.torture.forms import children_of
from timeslice.torture.history import Surveyed, Writer

EVERY_S = 0.25

Devices = Mapping[str, Mapping[str, Path]]  # group -> node -> device
Found = dict[tuple[str, str], dict[str, int]]  # (group, node) -> job -> bytes


def look(devices: Devices, pids: Iterable[int]) -> Found:
    """The bytes of each job on each device, as these processes have them mapped. OSError(EMFILE) for one who can open
    nothing now, as it was meant to be: who can't look has seen nothing, which is not that nothing is there."""
    places = {str(path): (group, node) for group, nodes in devices.items() for node, path in nodes.items()}
    found: Found = {place: {} for place in places.values()}
    for pid in pids:
        try:
            arenas = arenas_of(pid)
        except (EmulatedDeviceError, OSError) as error:
            if errno.EMFILE in {getattr(each, "errno", 0) for each in (error, error.__cause__, error.__context__)}:
                raise OSError(errno.EMFILE, "no descriptor left to look with") from error
            continue  # it has ended, or ends
        for arena in arenas:
            jobs = found.get(places.get(arena.device, ("", "")))
            if jobs is not None and arena.bytes_on_device:
                jobs[arena.label] = jobs.get(arena.label, 0) + arena.bytes_on_device
    return found


def read_pids(file: Path) -> list[int]:
    """The processes that ``Surveyor`` wrote down, which may be a moment old. OSError(EMFILE) as for ``look``."""
    try:
        return [int(word) for word in file.read_text().split()]
    except FileNotFoundError:
        return []  # not written yet


class Surveyor:
    """A thread that looks at all devices again and again, and tells the jobs' processes whom to look at."""

    def __init__(self, devices: Devices, processes: Callable[[], Iterable[int]], file: Path, writer: Writer) -> None:
        self._devices, self._processes, self._file, self._writer = devices, processes, file, writer
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="torture-survey", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(EVERY_S):
            pids = [one for pid in self._processes() for one in (pid, *children_of(pid))]
            draft = self._file.with_suffix(".draft")
            draft.write_text(" ".join(map(str, pids)))
            draft.replace(self._file)
            since = time.monotonic_ns()
            found = look(self._devices, pids)
            at = time.monotonic_ns()
            for (group, node), jobs in found.items():
                if jobs:
                    self._writer.write(Surveyed(at=at, who="survey", node=node, group=group, since=since, found=jobs))
