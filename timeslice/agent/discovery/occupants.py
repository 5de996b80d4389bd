"""Who has memory on a group's devices, by whatever lists that: the driver, or the files of emulated devices."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from timeslice.agent import procfs
from timeslice.agent.discovery import nvml
from timeslice.agent.discovery.environment import Process, Snapshot
from timeslice.arena.device import Device
from timeslice.arena.errors import EmulatedDeviceError
from timeslice.arena.process import Target as ArenaTarget
from timeslice.arena.survey import ArenaInfo, arenas_of, holders
from timeslice.backends.base import Context

UNEXPLAINED = 1 << 20  # from so many bytes on, somebody has them who can't be looked into


@dataclass(frozen=True)
class Occupants:
    """``sizes``: bytes of each process, by its number here. ``unseen``: numbers of which nobody here is known, and
    ``unexplained`` bytes that nobody has who can be looked into."""

    sizes: Mapping[int, int] = field(default_factory=dict)
    unseen: Collection[int] = ()
    unexplained: int = 0


async def occupants_of(context: Context, snapshot: Snapshot, known: Collection[Process]) -> Occupants | None:
    """Everybody on the group's devices; of ``known`` processes maybe nothing. None where no devices are known.
    BackendError, EmulatedDeviceError and OSError: they can't be listed."""
    if context.accelerators:
        return _by_numbers(await nvml.sizes_on(context.accelerators), snapshot)
    if context.devices:
        return await asyncio.to_thread(_by_arenas, [str(path) for path in context.devices], known)
    return None


async def with_arenas(context: Context, processes: Collection[Process]) -> set[Process]:
    """Those with state of the group's emulated devices, be it that all of it is in host memory."""
    here = {str(path.resolve()) for path in context.devices}

    def look() -> set[Process]:
        return {each for each in processes if any(arena.bytes_allocated for arena in _arenas(each, here))}

    return await asyncio.to_thread(look) if here and processes else set()


def _arenas(process: Process, devices: Collection[str]) -> list[ArenaInfo]:
    try:
        return [arena for arena in arenas_of(ArenaTarget(*process)) if arena.device in devices]
    except (EmulatedDeviceError, PermissionError):
        return []  # it ended meanwhile, or may not be looked into


def _by_numbers(told: Mapping[int, int], snapshot: Snapshot) -> Occupants:
    inside = {each.inner: each.pid for each in snapshot.looked.values() if each and each.inner != each.pid}
    sizes, unseen = {}, []
    for number, size in told.items():
        pid = number if number in snapshot.lines else inside.get(number)
        if pid is not None:
            sizes[pid] = size
        elif procfs.is_there(number) or not procfs.sees_all():  # else it has just ended
            unseen.append(number)
    return Occupants(sizes, unseen)


def _by_arenas(paths: Collection[str], known: Collection[Process]) -> Occupants:
    devices = [Device.open(path) for path in paths]
    here = {device.path for device in devices}
    used = sum(device.used_bytes() for device in devices)
    sizes: dict[int, int] = {}
    for process in known if used else ():
        if size := sum(arena.bytes_on_device for arena in _arenas(process, here)):
            sizes[process[0]] = size
    if sum(sizes.values()) >= used:
        return Occupants(sizes)
    for device in devices:
        for arena in holders(device):
            if (arena.target.pid, arena.target.start_time) not in known:
                sizes[arena.target.pid] = sizes.get(arena.target.pid, 0) + arena.bytes_on_device
    used = min(used, sum(device.used_bytes() for device in devices))  # what came or went meanwhile is nobody's riddle
    return Occupants(sizes, unexplained=max(used - sum(sizes.values()), 0))
