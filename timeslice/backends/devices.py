"""The devices of a group, emulated and real, as its backends report them."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from pathlib import Path

from timeslice.arena.device import Device
from timeslice.arena.errors import EmulatedDeviceError
from timeslice.arena.survey import holders
from timeslice.backends.base import Context, DeviceMemory
from timeslice.backends.nvml import Nvml, ask
from timeslice.errors import BackendError


def has_devices(context: Context) -> bool:
    """Whether there is anything whose memory can be measured."""
    return bool(context.devices or context.accelerators)


async def measure_devices(context: Context) -> list[DeviceMemory]:
    """What is free on each, and who has the rest."""
    emulated = [await asyncio.to_thread(_measure, path) for path in context.devices]
    return emulated + await _measure_real(context)


async def used_bytes(context: Context) -> int:
    """Bytes taken on all of them together."""
    emulated = sum(Device.open(path).used_bytes() for path in context.devices)
    return emulated + sum(device.total_bytes - device.free_bytes for device in await _measure_real(context))


async def bytes_of(context: Context, pids: Collection[int]) -> int:
    """What processes hold on the real devices by the driver's word: their contexts too, which nothing of their own
    counts."""
    return sum(size for device in await _measure_real(context) for pid, size in device.holders if pid in pids)


async def missing_devices(context: Context) -> list[str]:
    """A sentence for each device that can't be used."""
    found = []
    for path in context.devices:
        try:
            Device.open(path)
        except EmulatedDeviceError as error:
            found.append(str(error))
    for uuid in context.accelerators:
        try:
            await ask(lambda: Nvml().measure([uuid]))  # noqa: B023 - awaited in this round
        except BackendError as error:
            found.append(str(error))
    return found


async def _measure_real(context: Context) -> list[DeviceMemory]:
    return await ask(lambda: Nvml().measure(context.accelerators)) if context.accelerators else []


def _measure(path: Path) -> DeviceMemory:
    device = Device.open(path)
    return DeviceMemory(
        device=str(path),
        total_bytes=device.capacity,
        free_bytes=device.free_bytes(),
        holders=tuple((info.target.pid, info.bytes_on_device) for info in holders(device)),
    )
