"""Samples a process and its children from outside: device memory, device activity, CPU use. Changes nothing."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import psutil

from timeslice.arena.errors import EmulatedDeviceError, NotAProcessError
from timeslice.arena.survey import arenas_of
from timeslice.backends.nvml import Nvml, NvmlError
from timeslice.errors import RefusedError, TimeSliceError, UsageError
from timeslice.observe.series import Sample

log = logging.getLogger("timeslice")

Sizes = dict[str, int]  # device -> bytes


@dataclass(frozen=True, kw_only=True)
class Reading:
    """One look. ``utilization``: how busy the real devices are on which the processes have something, 0 to 1; None
    where the driver can't tell."""

    at_s: float
    cpu: float  # of one core, at most 1
    real: Sizes
    emulated: Sizes
    utilization: float | None
    shared: bool = False  # others are on these devices too, and count in the utilization


class Observed:
    """A process with all that it started. UsageError, RefusedError, TimeSliceError say why it can't be observed."""

    def __init__(self, pid: int) -> None:
        try:
            self._root = psutil.Process(pid)
            dead = self._root.status() == psutil.STATUS_ZOMBIE
            user = self._root.uids().real
            self.command = "" if os.geteuid() not in {0, user} else " ".join(self._root.cmdline())[:200]
        except psutil.NoSuchProcess:
            dead, user = True, 0
        if dead:
            raise UsageError(f"there is no process {pid} on this machine; see: ps aux")
        if os.geteuid() not in {0, user}:
            raise RefusedError(f"process {pid} is another user's; observe it as that user, or as root")
        self.pid = pid
        self._cpu: dict[int, float] = {}
        self._began = time.monotonic()
        self._last = self._began
        self._uuids, why = _real_devices()
        first = self.read()
        if not self._uuids and not first.emulated:
            raise TimeSliceError(
                f"process {pid} has nothing on an emulated device, and there is no real one here ({why}); observe it "
                "on the machine where it uses a device, after it has loaded"
            )

    def read(self) -> Reading:
        """One look. TimeSliceError when it has ended."""
        processes, now = self._processes(), time.monotonic()
        cpu = self._cpu_since(processes) / max(now - self._last, 1e-6)
        self._last = now
        pids = {process.pid for process in processes}
        real, utilization, shared = self._on_real(pids)
        return Reading(
            at_s=now - self._began,
            cpu=min(cpu, 1.0),
            real=real,
            emulated=self._on_emulated(pids),
            utilization=utilization,
            shared=shared,
        )

    def _processes(self) -> list[psutil.Process]:
        try:
            # Its number may have passed to another process: is_running() knows the start time.
            if self._root.is_running() and self._root.status() != psutil.STATUS_ZOMBIE:
                return [self._root, *self._root.children(recursive=True)]
        except psutil.NoSuchProcess:
            pass  # just now
        raise TimeSliceError(f"process {self.pid} has ended")

    def _cpu_since(self, processes: Sequence[psutil.Process]) -> float:
        """CPU seconds since the last look. Of one that is new all that it used."""
        used = {}
        for process in processes:
            try:
                times = process.cpu_times()
            except psutil.Error:  # it ended meanwhile
                continue
            used[process.pid] = times.user + times.system
        spent = sum(value - self._cpu.get(pid, 0.0) for pid, value in used.items()) if self._cpu else 0.0
        self._cpu = used
        return max(spent, 0.0)

    def _on_real(self, pids: set[int]) -> tuple[Sizes, float | None, bool]:
        found, busy, shared = Sizes(), list[int](), False
        for uuid in self._uuids:
            try:
                told = Nvml().processes(uuid)
                mine = [size or 0 for pid, size in told if pid in pids]
                if not mine:
                    continue
                utilization = Nvml().utilization(uuid)
            except NvmlError as error:
                log.warning("%s could not be looked at: %s", uuid, error)
                continue
            found[uuid] = sum(mine)
            shared = shared or len(mine) < len(told)
            busy += [] if utilization is None else [utilization]
        return found, max(busy) / 100 if busy else None, shared

    def _on_emulated(self, pids: set[int]) -> Sizes:
        found = Sizes()
        for pid in pids:
            try:
                arenas = arenas_of(pid)
            except NotAProcessError as error:
                raise UsageError(str(error)) from error
            except (EmulatedDeviceError, OSError):
                continue  # it ended meanwhile
            for arena in arenas:
                found[arena.device] = found.get(arena.device, 0) + arena.bytes_on_device
        return found


def watch(observed: Observed, seconds: float, every_s: float) -> Iterator[Reading]:
    """A reading every ``every_s``, for so long; fewer when the process ends before."""
    until = time.monotonic() + seconds
    at = time.monotonic()
    while True:
        try:
            yield observed.read()
        except TimeSliceError as error:
            log.warning("%s; what was seen until then counts", error)
            return
        at += every_s
        if at > until:
            return
        time.sleep(max(0.0, at - time.monotonic()))


def samples_of(readings: Sequence[Reading]) -> tuple[list[Sample], str]:
    """What to analyse, and whether its activity is the ``device``'s or, for want of that, the ``cpu``'s."""
    kind = "device" if any(each.utilization is not None for each in readings) else "cpu"
    return [
        Sample(
            at_s=each.at_s,
            activity=each.cpu if kind == "cpu" else each.utilization or 0.0,
            device_bytes=sum(each.real.values()) + sum(each.emulated.values()),
        )
        for each in readings
    ], kind


def _real_devices() -> tuple[tuple[str, ...], str]:
    try:
        found = tuple(device.uuid for device in Nvml().devices())
    except NvmlError as error:
        return (), str(error)
    return found, "" if found else "the driver lists none"
