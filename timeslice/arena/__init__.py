"""The emulated device: accelerator memory for machines without an accelerator. See README.md of this package.

Nothing is imported here until it is asked for: the command ``timeslice-arena-checkpoint`` starts in milliseconds.
"""

from __future__ import annotations

TYPE_CHECKING = False  # typing costs the command a fifth of its start-up time
if TYPE_CHECKING:
    from timeslice.arena.device import Device as Device
    from timeslice.arena.errors import DeviceOutOfMemoryError as DeviceOutOfMemoryError
    from timeslice.arena.errors import EmulatedDeviceError as EmulatedDeviceError
    from timeslice.arena.memory import Arena as Arena
    from timeslice.arena.process import Target as Target

__all__ = ["Arena", "Device", "DeviceOutOfMemoryError", "EmulatedDeviceError", "Target"]

_HOMES = {
    "Arena": "memory",
    "Device": "device",
    "DeviceOutOfMemoryError": "errors",
    "EmulatedDeviceError": "errors",
    "Target": "process",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
