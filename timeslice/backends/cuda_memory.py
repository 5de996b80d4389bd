"""Which process has how much on which GPU, and what follows from it. Sizes in bytes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from timeslice.backends.base import DeviceMemory
from timeslice.backends.nvml import Nvml
from timeslice.models import Target

Listing = Mapping[str, Mapping[int, int | None]]  # device -> process -> bytes, None where the driver does not tell
Footprint = Mapping[str, int | None]  # device -> bytes of one process

_SAME = 0.9  # what came back is at least this share of what left: the driver rounds, and a context may differ


def listing(nvml: Nvml) -> Listing:
    """Who computes on each GPU (or MIG instance) of this node."""
    return {device.uuid: dict(nvml.processes(device.uuid)) for device in nvml.devices()}


def status(pid: int, name: str, proc: Path = Path("/proc")) -> list[str]:
    """A line of /proc/PID/status, in words; empty when the process is gone."""
    try:
        lines = (proc / str(pid) / "status").read_text(errors="replace").splitlines()
    except OSError:
        return []
    return next((line.split()[1:] for line in lines if line.startswith(f"{name}:")), [])


def number_of(target: Target, numbers: Collection[int], proc: Path = Path("/proc")) -> int:
    """How the driver lists a process: by its number here, or (on some drivers) by the one in its own container."""
    if target.pid in numbers:
        return target.pid
    for inner in map(int, status(target.pid, "NSpid", proc)[1:]):
        if inner in numbers and not (proc / str(inner)).exists():  # one of ours would be meant itself
            return inner
    return target.pid


def footprint(target: Target, listed: Listing) -> dict[str, int | None]:
    """What the driver lists of one process."""
    number = number_of(target, {pid for each in listed.values() for pid in each})
    return {device: processes[number] for device, processes in listed.items() if number in processes}


@dataclass(frozen=True, kw_only=True)
class Placement:
    """What of a process is not where it was, and where it may be instead."""

    pid: int = 0
    missing: tuple[str, ...] = ()  # with the bytes that it had there, and has now
    elsewhere: tuple[str, ...] = ()

    @classmethod
    def compare(cls, pid: int, before: Footprint, now: Footprint) -> Placement:
        gone = [device for device, had in before.items() if device not in now or _is_less(now[device], had)]
        more = [device for device, has in now.items() if device not in before or _is_less(before[device], has)]
        return cls(
            pid=pid,
            missing=tuple(f"{now.get(device, 0)} of {before[device]} bytes on {device}" for device in gone),
            elsewhere=tuple(f"{now[device]} bytes on {device}" for device in more),
        )

    def __str__(self) -> str:
        return f"process {self.pid} has {', '.join((*self.missing, *(f'but {each}' for each in self.elsewhere)))}"


def _is_less(now: int | None, before: int | None) -> bool:
    return now is not None and before is not None and now < before * _SAME


def shortage(devices: Sequence[DeviceMemory], footprints: Collection[Footprint], own: Collection[int]) -> str:
    """Why these do not fit onto the devices, and who has the memory; empty when they do. What their ``own`` processes
    still have there, though they are out, is no obstacle."""
    found = []
    for device in devices:
        need = sum(each.get(device.device) or 0 for each in footprints)
        if need > device.free_bytes + sum(size for pid, size in device.holders if pid in own):
            holders = "".join(f"; process {pid} holds {size}" for pid, size in device.holders)
            found.append(f"device {device.device}: {need} bytes needed, {device.free_bytes} free{holders}")
    return "; ".join(found)


def strangers(devices: Sequence[DeviceMemory], own: Collection[int]) -> str:
    """Who else has memory there."""
    return "; ".join(
        f"process {pid} holds {size} on {device.device}"
        for device in devices
        for pid, size in device.holders
        if pid not in own
    )
