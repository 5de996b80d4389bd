"""The emulated device: a size-limited tmpfs at a folder, whose capacity the kernel enforces.

Without the right to mount, a pool under ``/dev/shm`` with its own accounting (`ledger`) stands in; its capacity
is advisory: it binds whoever asks through this package, nobody else.
"""

# pathlib knows no dir_fd and no descriptors, and would cost the command start-up time.
# ruff: noqa: PTH102, PTH103, PTH106, PTH108, PTH112, PTH115, PTH118, PTH120, PTH208, PTH211
from __future__ import annotations

import errno
import fcntl
import os
import stat
from binascii import crc32

from timeslice.arena.errors import DeviceInUseError, DeviceOutOfMemoryError, NotADeviceError, mib
from timeslice.arena.ledger import Ledger, Owner
from timeslice.errors import UsageError

TYPE_CHECKING = False  # typing costs the command a fifth of its start-up time
if TYPE_CHECKING:
    from collections.abc import Sequence

PAGE = os.sysconf("SC_PAGESIZE")
SHM = "/dev/shm"  # noqa: S108  (only a folder of our own in it is used, and its owner is checked)
FAULTS_FILE = ".timeslice-faults"
# The marker is a symlink that points nowhere: a short one takes no page, so the whole capacity stays usable,
# and it appears whole or not at all.
MARKER = ".timeslice-device"
_MARK = "timeslice-emulated-device"
_NO_RIGHT = (errno.EPERM, errno.EACCES, errno.ENODEV, errno.ENOSYS)


class Device:
    """One emulated device. Make it with `create`, find it again with `open`."""

    def __init__(self, path: str, capacity: int, pool: str | None) -> None:
        self.path = path
        self.capacity = capacity
        self._pool = pool
        self._ledger = Ledger(pool) if pool else None

    def __repr__(self) -> str:
        kind = "advisory emulated device" if self.advisory else "emulated device"
        return f"<{kind} {self.path}, {mib(self.capacity)}>"

    @property
    def advisory(self) -> bool:
        """True when no kernel limit stands behind `capacity`, only this package's accounting."""
        return self._pool is not None

    @classmethod
    def create(
        cls,
        path: str | os.PathLike[str],
        capacity_bytes: int,
        *,
        mode: int = 0o700,
        advisory: bool | None = None,
    ) -> Device:
        """Make the device at ``path``, or return it when it is there with the same size.

        ``advisory`` True takes the pool even where a mount is possible, False refuses the pool, None decides.
        """
        folder = os.path.realpath(path)
        if capacity_bytes < PAGE:
            raise UsageError(f"emulated device {folder}: capacity {capacity_bytes} is less than a page of {PAGE}")
        capacity = whole_pages(capacity_bytes)
        os.makedirs(folder, mode=mode, exist_ok=True)
        parent = os.open(os.path.dirname(folder), os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(parent, fcntl.LOCK_EX)  # two creators at once would mount one above the other
            if os.path.lexists(os.path.join(folder, MARKER)):
                return cls._existing(folder, capacity)
            if os.listdir(folder):
                raise UsageError(f"{folder} is not empty and no emulated device; choose an empty folder")
            pool = None
            if advisory or not _mount(folder, capacity, mode, required=advisory is False):
                pool = _make_pool(folder, warn=advisory is None)
            os.symlink(f"{_MARK}:1:{capacity}:{pool or ''}", os.path.join(folder, MARKER))
            return cls(folder, capacity, pool)
        finally:
            os.close(parent)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Device:
        """The device at ``path``; a clear error when there is none."""
        folder = os.path.realpath(path)
        try:
            mark, version, capacity, pool = os.readlink(os.path.join(folder, MARKER)).split(":", 3)
        except (OSError, ValueError):
            raise NotADeviceError(
                f"{folder} is no emulated device; make one with Device.create or `timeslice up`"
            ) from None
        if (mark, version) != (_MARK, "1"):
            raise NotADeviceError(f"{folder} is an emulated device of another version; destroy it and make it anew")
        if pool and not pool.startswith(f"{SHM}/timeslice-"):
            raise NotADeviceError(f"{folder}: its marker names a pool outside {SHM}; destroy it and make it anew")
        if pool and not os.path.isdir(pool):
            raise NotADeviceError(f"{folder}: its pool {pool} is gone (a reboot?); make the device anew")
        return cls(folder, int(capacity), pool or None)

    @classmethod
    def _existing(cls, folder: str, capacity: int) -> Device:
        try:
            device = cls.open(folder)
        except NotADeviceError:
            os.unlink(os.path.join(folder, MARKER))  # the pool went with a reboot: nothing is lost by starting over
            pool = _make_pool(folder, warn=True)
            os.symlink(f"{_MARK}:1:{capacity}:{pool}", os.path.join(folder, MARKER))
            return cls(folder, capacity, pool)
        if device.capacity != capacity:
            raise UsageError(
                f"emulated device {folder} has {mib(device.capacity)}, asked for {mib(capacity)}; destroy it first"
            )
        return device

    def destroy(self, *, force: bool = False) -> None:
        """Unmount it. Refused while processes have memory on it, unless forced (they keep what they have)."""
        if self._ledger is None:
            _unmount(self.path, force)
            return
        if not force and (used := self._ledger.used()):
            raise DeviceInUseError(f"emulated device {self.path}: {mib(used)} in use; end those processes first")
        assert self._pool is not None
        for name in os.listdir(self._pool):
            os.unlink(os.path.join(self._pool, name))
        os.rmdir(self._pool)
        for name in (MARKER, FAULTS_FILE):
            if os.path.lexists(os.path.join(self.path, name)):
                os.unlink(os.path.join(self.path, name))

    def free_bytes(self) -> int:
        """Bytes that can be allocated now, as the kernel (or the ledger) counts them."""
        if self._ledger is not None:
            return max(0, self.capacity - self._ledger.used())
        stats = os.statvfs(self.path)
        return stats.f_bavail * stats.f_frsize

    def used_bytes(self) -> int:
        """Bytes that are taken now, by whomever."""
        return self.capacity - self.free_bytes()

    def new_file(self) -> int:
        """A nameless file on the device: it goes away with the last process that has it open or mapped."""
        return os.open(self._pool or self.path, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)

    def reserve(self, files: Sequence[tuple[int, int]], owner: Owner, total: int, hint: str) -> None:
        """Give every (fd, size) its bytes on the device, all or nothing; ``total`` is what ``owner`` has then."""
        need = sum(size for _, size in files)
        # Asking first keeps a doomed request from filling the device for a moment, under a neighbour's nose.
        if self._ledger is None and need > (free := self.free_bytes()):
            raise DeviceOutOfMemoryError(self.path, need=need, free=free, hint=hint)
        if self._ledger is not None and (left := self._ledger.claim(owner, total, self.capacity)) is not None:
            raise DeviceOutOfMemoryError(self.path, need=need, free=left, hint=hint)
        try:
            for fd, size in files:
                os.ftruncate(fd, size)
                os.posix_fallocate(fd, 0, size)
        except BaseException as error:
            self.release([fd for fd, _ in files], owner, total - need)
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.ENOMEM):
                raise DeviceOutOfMemoryError(self.path, need=need, free=self.free_bytes(), hint=hint) from error
            raise

    def release(self, fds: Sequence[int], owner: Owner, total: int) -> None:
        """Take the bytes of these files off the device; a process that touches them dies of SIGBUS."""
        for fd in fds:
            os.ftruncate(fd, 0)
        if self._ledger is not None:
            self._ledger.claim(owner, total, self.capacity)


def whole_pages(amount: int) -> int:
    """The capacity of a device of which ``amount`` bytes were asked for."""
    return -(-amount // PAGE) * PAGE


def _mount(folder: str, capacity: int, mode: int, *, required: bool) -> bool:
    """Mount the tmpfs; False when this process has no right to."""
    from timeslice.arena import syscalls

    for huge in (",huge=within_size", ""):  # huge pages double the speed of the copy back; not every kernel has them
        code = syscalls.mount_tmpfs(folder, f"size={capacity},mode={mode:o}{huge}")
        if code == 0:
            return True
        if code in _NO_RIGHT:
            break
    if required or code not in _NO_RIGHT:
        raise OSError(code, f"emulated device {folder}: mounting a tmpfs failed: {os.strerror(code)}")
    return False


def _unmount(folder: str, force: bool) -> None:
    from timeslice.arena import syscalls

    code = syscalls.unmount(folder, lazy=force)
    if code == errno.EBUSY:
        raise DeviceInUseError(f"emulated device {folder} is in use; end the processes on it first")
    if code:
        raise OSError(code, f"emulated device {folder}: unmounting failed: {os.strerror(code)}")


def _make_pool(folder: str, *, warn: bool) -> str:
    pool = os.path.join(SHM, f"timeslice-{os.geteuid()}-{crc32(os.fsencode(folder)):08x}")
    try:
        os.mkdir(pool, 0o700)
    except FileExistsError:
        found = os.lstat(pool)  # /dev/shm is everybody's: somebody else may have laid a folder or link there
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            raise NotADeviceError(f"{pool} belongs to somebody else; remove it or choose another path") from None
    if warn:
        import logging

        logging.getLogger("timeslice.arena").warning(
            "emulated device %s: no right to mount a tmpfs, so its capacity is advisory (pool %s)", folder, pool
        )
    return pool
