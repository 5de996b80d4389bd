"""What can be concluded from measured device memory. Pure. All sizes in bytes.

A backend's word is not enough: a suspend that says "done" may have freed nothing, or free it late; a restore into
a device that is not empty may poison the driver for good.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from timeslice.backends.base import DeviceMemory

Devices = Sequence[DeviceMemory]
NOTHING: Mapping[str, int] = {}


def free_on(devices: Devices) -> dict[str, int]:
    return {device.device: device.free_bytes for device in devices}


def freed(before: Mapping[str, int], after: Devices, taken: Mapping[str, int] = NOTHING) -> dict[str, int]:
    """Bytes that became free on each device; never negative. ``before``: what was free on each. ``taken``: what
    somebody who came in meanwhile has."""
    gained = {device.device: device.free_bytes - before.get(device.device, device.free_bytes) for device in after}
    return {name: max(size + taken.get(name, 0), 0) for name, size in gained.items()}


def unexplained(devices: Devices, pids: Collection[int]) -> int:
    """Bytes in use there that could be these processes': what the holders that are told do not explain. A real device
    always has a little that nobody explains."""
    sizes = [
        device.total_bytes - device.free_bytes - sum(size for pid, size in device.holders if pid not in pids)
        for device in devices
    ]
    return sum(max(size, 0) for size in sizes)


def shortage(devices: Devices, footprint: Mapping[str, int], need: int, own: Collection[int]) -> str:
    """Why a job can't come back now, naming who holds the memory; '' when it fits. What its ``own`` processes hold
    is no obstacle.

    ``footprint`` is what it freed on each device when it left; without it (or when it left by other means) ``need``
    must fit into all of them together.
    """
    room = {device.device: device.free_bytes + _held(device, own) for device in devices}
    if footprint.keys() & room.keys():
        tight = [device for device in devices if footprint.get(device.device, 0) > room[device.device]]
        return "; ".join(_short(device, footprint[device.device]) for device in tight)
    if not devices or need <= sum(room.values()):
        return ""
    return "; ".join(_short(device, need) for device in devices)


def _held(device: DeviceMemory, pids: Collection[int]) -> int:
    return sum(size for pid, size in device.holders if pid in pids)


def _short(device: DeviceMemory, need: int) -> str:
    return _with_holders(device, f"device {device.device}: {need} bytes needed, {device.free_bytes} free")


def told(device: DeviceMemory) -> str:
    """How full it is, and who holds that."""
    return _with_holders(device, f"device {device.device}: {device.free_bytes} of {device.total_bytes} bytes are free")


def _with_holders(device: DeviceMemory, figures: str) -> str:
    holders = ", ".join(f"process {pid} holds {size or 'some'}" for pid, size in device.holders)
    return f"{figures}; {holders}" if holders else figures


# What nobody explains on a device that is free: a driver's own, and what it has not given back yet. Bytes, and a share.
_SLACK_BYTES, _SLACK_SHARE = 1 << 30, 0.02


def unaccounted(devices: Devices, explained: Collection[int]) -> str:
    """What is on the devices that processes other than the ``explained`` ones may have, in words; '' if they are free
    of it."""
    for device in devices:
        for pid, size in device.holders:
            if pid not in explained:
                return f"process {pid} has {size or 'some'} bytes on {device.device}, and it can't be told whose it is"
        used = device.total_bytes - device.free_bytes
        left = used - sum(size for _, size in device.holders)
        if left > min(_SLACK_BYTES, device.total_bytes * _SLACK_SHARE):
            return f"{left} bytes on {device.device} are in use by nobody that can be seen from here"
    return ""


def left_behind(devices: Devices, dead: frozenset[int], others: int, had: int) -> int:
    """Bytes that dead processes still seem to have on the devices.

    Where the devices tell holders and their bytes, theirs are counted. Else what nobody living explains (``others``:
    bytes of the living) is taken for theirs, if it is about as much as they ``had``.
    """
    holders = [holder for device in devices for holder in device.holders]
    total = sum(_held(device, dead) for device in devices)
    if total or (holders and all(size for _, size in holders)):
        return total
    used = sum(device.total_bytes - device.free_bytes for device in devices)
    nobodys = used - others
    return nobodys if had and nobodys >= had // 2 else 0
