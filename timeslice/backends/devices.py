"""The emulated devices of a group, as its backends report them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from timeslice.arena.device import Device
from timeslice.arena.errors import EmulatedDeviceError
from timeslice.arena.survey import holders
from timeslice.backends.base import DeviceMemory


async def measure_devices(devices: Sequence[Path]) -> list[DeviceMemory]:
    """What is free on each, and who has the rest."""
    return [await asyncio.to_thread(_measure, path) for path in devices]


def used_bytes(devices: Sequence[Path]) -> int:
    """Bytes taken on all of them together."""
    return sum(Device.open(path).used_bytes() for path in devices)


def missing_devices(devices: Sequence[Path]) -> list[str]:
    """A sentence for each folder that is no emulated device."""
    found = []
    for path in devices:
        try:
            Device.open(path)
        except EmulatedDeviceError as error:
            found.append(str(error))
    return found


def _measure(path: Path) -> DeviceMemory:
    device = Device.open(path)
    return DeviceMemory(
        device=str(path),
        total_bytes=device.capacity,
        free_bytes=device.free_bytes(),
        holders=tuple((info.target.pid, info.bytes_on_device) for info in holders(device)),
    )
