"""The few system calls that the standard library lacks. Imported only where needed: ctypes takes milliseconds."""

from __future__ import annotations

import ctypes
import mmap

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)

_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_MAP_FIXED_NOREPLACE = 0x100000
_MNT_DETACH = 2
_MS_NOSUID_NODEV_NOEXEC = 2 | 4 | 8
_FAILED = ctypes.c_void_p(-1).value


def mount_tmpfs(folder: str, options: str) -> int:
    """0, or the errno."""
    done = _libc.mount(
        b"timeslice-device", folder.encode(), b"tmpfs", ctypes.c_ulong(_MS_NOSUID_NODEV_NOEXEC), options.encode()
    )
    return 0 if done == 0 else ctypes.get_errno()


def unmount(folder: str, *, lazy: bool) -> int:
    """0, or the errno."""
    return 0 if _libc.umount2(folder.encode(), _MNT_DETACH if lazy else 0) == 0 else ctypes.get_errno()


def address_of(mapping: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(mapping))


def map_file_over(address: int, size: int, fd: int) -> None:
    """Replace the pages at ``address`` by the file's, shared. The caller owns the range."""
    flags = mmap.MAP_SHARED | _MAP_FIXED
    if _libc.mmap(address, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, 0) == _FAILED:
        raise OSError(ctypes.get_errno(), "mapping device memory failed")


def allow_writes(address: int, size: int, *, allowed: bool) -> None:
    """Whether this process may write to mapped pages; a write that is not allowed is a SIGSEGV."""
    if _libc.mprotect(ctypes.c_void_p(address), size, mmap.PROT_READ | (mmap.PROT_WRITE if allowed else 0)):
        raise OSError(ctypes.get_errno(), "changing the protection of device memory failed")


def block_range(address: int, size: int) -> bool:
    """Put an untouchable reservation at a free range; False when something lies there already."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE | _MAP_FIXED_NOREPLACE
    return bool(_libc.mmap(address, size, 0, flags, -1, 0) == address)


def keep_forever(thing: object) -> None:
    """One reference more than anybody will give back."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))
