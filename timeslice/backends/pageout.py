"""Asking the kernel to move another process's memory to swap: ``process_madvise(MADV_PAGEOUT)``."""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path

_PROCESS_MADVISE = 440  # the same number on every architecture
_MADV_PAGEOUT = 21
_MOST_RANGES = 1024  # in one call

_libc = ctypes.CDLL(None, use_errno=True)


class _Range(ctypes.Structure):
    _fields_ = (("start", ctypes.c_void_p), ("length", ctypes.c_size_t))


def free_swap_bytes() -> int:
    """What fits on swap now. Where that is nothing, the call below would claim success and free nothing."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("SwapFree:"):
            return int(line.split()[1]) << 10
    return 0


def resident_bytes(pid: int) -> int:
    """Memory of a process that is in RAM now; 0 when it is gone."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return pages * os.sysconf("SC_PAGESIZE")


def page_out(pid: int) -> None:
    """Move what can be moved of the private memory of a process, which ought to stand still.

    PermissionError without CAP_SYS_NICE and the right to trace it; ProcessLookupError when it is gone.
    """
    pidfd = os.pidfd_open(pid)
    try:
        ranges = _private_ranges(pid)
        for at in range(0, len(ranges), _MOST_RANGES):
            _advise(pidfd, ranges[at : at + _MOST_RANGES])
    finally:
        os.close(pidfd)


def _private_ranges(pid: int) -> list[tuple[int, int]]:
    found = []
    try:
        lines = Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines()
    except FileNotFoundError as error:
        raise ProcessLookupError(f"process {pid} is gone") from error
    for line in lines:
        addresses, permissions, _, _, inode = line.split(maxsplit=5)[:5]
        if permissions[:2] == "rw" and permissions[3] == "p" and inode == "0":
            start, end = (int(text, 16) for text in addresses.split("-"))
            found.append((start, end - start))
    return found


def _advise(pidfd: int, ranges: list[tuple[int, int]]) -> None:
    while ranges:
        vector = (_Range * len(ranges))(*(_Range(start, length) for start, length in ranges))
        done = _libc.syscall(_PROCESS_MADVISE, pidfd, vector, len(ranges), _MADV_PAGEOUT, 0)
        if done < 0 and (code := ctypes.get_errno()) not in (errno.EINVAL, errno.ENOMEM):
            raise OSError(code, f"paging out: {os.strerror(code)}")
        while ranges and done >= ranges[0][1]:
            done -= ranges.pop(0)[1]
        if ranges:
            ranges.pop(0)  # where it stopped: locked or special memory, or unmapped meanwhile
