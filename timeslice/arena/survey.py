"""Who has what on an emulated device: what ``nvidia-smi`` tells of a real one."""

from __future__ import annotations

import os

from timeslice.arena.control import MEMFD_NAME
from timeslice.arena.errors import EmulatedDeviceError
from timeslice.arena.process import HeldProcess, Target
from timeslice.arena.session import OpenArena, open_arenas

TYPE_CHECKING = False  # typing costs the command a fifth of its start-up time
if TYPE_CHECKING:
    from timeslice.arena.device import Device


class ArenaInfo:
    """One arena as it is now. Bytes are measured, except ``bytes_allocated``: what it needs to be restored, and
    ``bytes_copied``: of which host memory has a valid copy, so that a suspend does not move them."""

    __slots__ = ("bytes_allocated", "bytes_copied", "bytes_on_device", "bytes_on_host", "device", "label", "state",
                 "target")  # fmt: skip

    def __init__(self, target: Target, arena: OpenArena) -> None:
        self.target = target
        self.device = arena.record.device
        self.label = arena.record.label
        self.state = arena.record.state
        self.bytes_allocated = arena.record.total
        self.bytes_copied = arena.record.copied
        self.bytes_on_device = arena.on_device()
        self.bytes_on_host = arena.on_host()

    def __repr__(self) -> str:
        return f"<arena {self.label!r} of {self.target!r} on {self.device}: {self.state}>"


def arenas_of(target: Target | int) -> list[ArenaInfo]:
    """All arenas of a process, on whatever devices; empty when it has none. Changes nothing."""
    target = target if isinstance(target, Target) else Target(target)
    with HeldProcess(target) as process:
        arenas = open_arenas(process)
        try:
            return [ArenaInfo(target, arena) for arena in arenas]
        finally:
            for arena in arenas:
                arena.close()


def holders(device: Device) -> list[ArenaInfo]:
    """Arenas with memory on this device now, of all processes that we may look into, largest first.

    Milliseconds for each hundred processes of the machine; an empty device is told at once.
    """
    found: list[ArenaInfo] = []
    for name in os.listdir("/proc") if device.used_bytes() else ():  # noqa: PTH208  (names are all that is wanted)
        if name.isdecimal() and _may_have_arena(name):
            try:
                found += arenas_of(int(name))
            except (EmulatedDeviceError, PermissionError):
                continue  # it ended meanwhile, or is another user's
    mine = [info for info in found if info.device == device.path and info.bytes_on_device]
    return sorted(mine, key=lambda info: -info.bytes_on_device)


def _may_have_arena(pid: str) -> bool:
    """A quick look that spares most processes a thorough one."""
    folder = f"/proc/{pid}/fd"
    try:
        return any(MEMFD_NAME in os.readlink(f"{folder}/{name}") for name in os.listdir(folder))  # noqa: PTH115, PTH208
    except FileNotFoundError:
        return True  # a descriptor was closed meanwhile: no answer
    except OSError:
        return False  # it ended meanwhile, or is another user's
