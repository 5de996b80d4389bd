"""Errors of the emulated device. Each names the device or process, what happened and what to do next.

::

    TimeSliceError
    └── EmulatedDeviceError            ``reason`` is the short text that the command prints, ``kind`` what it means
        ├── DeviceOutOfMemoryError     also an ``OSError`` with ``errno.ENOSPC``; nothing was left behind
        ├── NotADeviceError            the folder is no emulated device
        ├── DeviceInUseError           it can't be destroyed while processes use it
        ├── ArenaStateError            the process is in another state than this operation needs
        ├── ArenaBusyError             the deadline passed: another operator works on it, or it did not stop
        ├── NoArenaError               the process has no device memory here
        ├── TargetGoneError            the process ended, or its number belongs to another one now
        ├── NotAllowedError            also a ``PermissionError``: no right to work on that process
        ├── NotAProcessError           a thread id, or no process id at all
        └── InjectedFaultError         a fault that was asked for with ``TIMESLICE_ARENA_FAULTS``
"""

from __future__ import annotations

import errno

from timeslice.errors import FaultKind, TimeSliceError


def mib(nbytes: int) -> str:
    """Sizes as the messages show them: MiB, or bytes below one page so that a small number is not "0.0"."""
    return f"{nbytes / 2**20:.1f} MiB" if nbytes == 0 or nbytes >= 2**16 else f"{nbytes} bytes"


class EmulatedDeviceError(TimeSliceError):
    """Root of what goes wrong with an emulated device."""

    reason = "unknown error"
    kind = FaultKind.TRANSIENT


class DeviceOutOfMemoryError(EmulatedDeviceError, OSError):
    """The bytes asked for do not fit on the device now; nothing was left behind."""

    reason = "out of memory"

    def __init__(self, device: str, *, need: int, free: int, hint: str) -> None:
        super().__init__(f"emulated device {device}: need {mib(need)}, {mib(free)} free; {hint}")
        self.errno = errno.ENOSPC
        self.device = device
        self.need = need
        self.free = free

    def __reduce__(self) -> tuple[type[Exception], tuple[str]]:
        # OSError's own way of pickling loses the keyword arguments; the text is what a log in another process needs.
        return EmulatedDeviceError, (str(self),)


class NotADeviceError(EmulatedDeviceError):
    """The folder is no emulated device."""

    reason = "invalid argument"
    kind = FaultKind.UNSUPPORTED


class DeviceInUseError(EmulatedDeviceError):
    """Processes have memory on the device."""

    reason = "operation not permitted"
    kind = FaultKind.BUSY


class ArenaStateError(EmulatedDeviceError):
    """The process is in another state than this operation needs; read the state first."""

    reason = "the operation cannot be performed in the present state"
    kind = FaultKind.UNSUPPORTED

    def __init__(self, message: str, *, state: str) -> None:
        super().__init__(message)
        self.state = state


class ArenaBusyError(EmulatedDeviceError):
    """The deadline passed before the operation could begin; nothing was changed, so try again."""

    reason = "device not ready"
    kind = FaultKind.BUSY


class NoArenaError(EmulatedDeviceError):
    """The process has no arena on any visible device."""

    reason = "initialization error"
    kind = FaultKind.UNSUPPORTED


class TargetGoneError(EmulatedDeviceError):
    """The process ended, or its number belongs to another process now."""

    reason = "OS call failed or operation not supported on this OS"
    kind = FaultKind.GONE


class NotAllowedError(EmulatedDeviceError, PermissionError):
    """No right to work on that process."""

    reason = "operation not permitted"
    kind = FaultKind.UNSUPPORTED


class NotAProcessError(EmulatedDeviceError):
    """The number is a thread's, or can be no process id."""

    reason = "invalid argument"
    kind = FaultKind.UNSUPPORTED


class InjectedFaultError(EmulatedDeviceError):
    """A fault that was asked for with ``TIMESLICE_ARENA_FAULTS`` or the device's fault file."""

    def __init__(self, message: str, *, reason: str, kind: FaultKind) -> None:
        super().__init__(message)
        self.reason = reason
        self.kind = kind
