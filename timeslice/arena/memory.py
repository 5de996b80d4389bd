"""Device memory for the process that uses it."""

from __future__ import annotations

import errno
import mmap
import os
import time
import weakref
from contextlib import contextmanager, suppress
from threading import RLock

from timeslice.arena import forks, operations, syscalls
from timeslice.arena.control import (
    CHECKPOINTED,
    HOST_MEMFD_NAME,
    LOCKED,
    RUNNING,
    Allocation,
    ControlBlock,
    Record,
)
from timeslice.arena.device import PAGE, Device
from timeslice.arena.errors import ArenaStateError
from timeslice.arena.process import Target
from timeslice.errors import UsageError

TYPE_CHECKING = False  # kept like the other modules of this package
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Self

_WAIT = 10.0
_HINT = "free some of it, or wait until the job that holds it is suspended"


class _Piece:
    """What this process keeps of one allocation."""

    def __init__(self, allocation: Allocation, mapping: mmap.mmap, view: memoryview) -> None:
        self.allocation = allocation
        self.mapping = mapping
        self.view = view


class Arena:
    """All device memory that one user (a framework, a role) of this process has on one emulated device.

    The memory is at the same address with the same content before a suspend and after the resume; in between a
    touch kills the process (SIGBUS), as it must not go unnoticed. A child of fork has none of it.
    """

    def __init__(self, device: Device | str | os.PathLike[str], *, label: str = "") -> None:
        self.device = device if isinstance(device, Device) else Device.open(device)
        self.label = label
        self._mutex = RLock()
        self._pieces: list[_Piece] = []
        self._closed = False
        self._saved = 0
        if forks.mappings is None:
            forks.mappings = weakref.WeakKeyDictionary()
        me = Target.current()
        self._pid = me.pid
        self._control = ControlBlock.create()
        ident = os.fstat(self._control.fd).st_ino
        self._owner = (me.pid, me.start_time, ident)
        self._control.write(
            Record(me.pid, me.start_time, ident, self.device.path, label, advisory=self.device.advisory)
        )

    def __repr__(self) -> str:
        return f"<Arena {self.label or 'unnamed'} on {self.device!r}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def state(self) -> str:
        """``running``, ``locked`` or ``checkpointed``; operators outside the process change it too."""
        self._check_usable()
        return self._control.read().state

    @property
    def bytes_on_device(self) -> int:
        """Bytes that are on the device now, measured: none while suspended."""
        return self._measure(lambda a: a.device_fd)

    @property
    def bytes_on_host(self) -> int:
        """Bytes of host memory behind the saved copies, measured. Kept after a resume, see `trim`."""
        return self._measure(lambda a: a.host_fd)

    @property
    def bytes_saved(self) -> int:
        """Bytes that the last `suspend` did not have to copy: sealed ones, of which there was a copy already."""
        return self._saved

    @property
    def bytes_allocated(self) -> int:
        """Bytes that `allocate` gave and `free` did not take back, wherever they are now."""
        return sum(piece.allocation.size for piece in self._pieces) if self._usable else 0

    def allocate(self, nbytes: int) -> memoryview:
        """Device memory of ``nbytes``, zeroed and writable (the device accounts for whole pages).

        Raises `DeviceOutOfMemoryError` when it does not fit, and leaves nothing behind then.
        """
        if nbytes <= 0:
            raise UsageError(f"allocate({nbytes}): ask for at least one byte")
        size = -(-nbytes // PAGE) * PAGE
        with self._changing() as record, forks.guard:
            self._check_running(record, "allocate")
            opened: list[int] = []
            try:
                opened.append(forks.note(self.device.new_file()))
                opened.append(forks.note(os.memfd_create(HOST_MEMFD_NAME)))
                device_fd, host_fd = opened
                self.device.reserve([(device_fd, size)], self._owner, record.total + size, _HINT)
                piece = _map(device_fd, host_fd, size, nbytes)
                record.allocations.append(piece.allocation)
                self._control.write(record)
            except BaseException as error:
                if opened:
                    self.device.release(opened[:1], self._owner, sum(p.allocation.size for p in self._pieces))
                for fd in opened:
                    forks.close(fd)
                if isinstance(error, OSError) and error.errno == errno.EMFILE:
                    error.strerror = "Too many open files: raise `ulimit -n`, or make fewer and larger allocations"
                raise
            self._pieces.append(piece)
            return piece.view

    def free(self, view: memoryview) -> None:
        """Give the memory of ``view`` back to the device at once, whether resident or suspended.

        Refused while arrays or slices made from it live; ``view`` itself is unusable afterwards either way, but
        may be passed again once they are gone.
        """
        self._check_usable()
        with self._mutex:
            piece = self._find(view, "free")
            try:
                view.release()
                piece.view.release()
                piece.mapping.close()  # refuses while anything else still exposes the memory
            except BufferError:
                raise UsageError(
                    "free(): arrays or slices made from this view are still alive; delete them, then call it again"
                ) from None
            with self._changing() as record:
                record.allocations = [a for a in record.allocations if a.device_fd != piece.allocation.device_fd]
                self._control.write(record)
                self._pieces.remove(piece)
                self._let_go(piece, record.total)

    def seal(self, view: memoryview) -> None:
        """Say that the memory of ``view`` does not change any more: it is copied out once, and later suspends only drop
        it from the device. A write to it kills the process (SIGSEGV) until `unseal`, as it must not go unnoticed."""
        self._protect(view, sealed=True)

    def unseal(self, view: memoryview) -> None:
        """Let the memory of ``view`` be written to again; the next suspend copies it."""
        self._protect(view, sealed=False)

    def suspend(self) -> int:
        """Move everything to host memory and free the device; returns the bytes moved, see `bytes_saved`.

        Nothing may touch the memory until `resume`. On an error all stays where it was.
        """
        with self._mutex:
            self._check_usable()
            operations.lock_arena(self._control.fd)
            try:
                moved = operations.checkpoint_arena(self._control.fd)
                self._saved = self.bytes_allocated - moved
                return moved
            except BaseException:
                if self.state == LOCKED:
                    operations.unlock_arena(self._control.fd)
                raise

    def resume(self) -> int:
        """Move everything back to where it was; returns the bytes moved.

        Raises `DeviceOutOfMemoryError` when it does not fit now; the saved copy is intact then.
        """
        with self._mutex:
            self._check_usable()
            try:
                return operations.restore_arena(self._control.fd)
            finally:
                if self.state == LOCKED:
                    operations.unlock_arena(self._control.fd)

    def trim(self) -> int:
        """Give the host memory of past copies back (they are kept to make the next suspend fast); bytes freed."""
        with self._changing() as record:
            if record.state == CHECKPOINTED:
                return 0
            before = self.bytes_on_host
            for allocation in record.allocations:
                allocation.copied = False
            self._control.write(record)
            for piece in self._pieces:
                os.ftruncate(piece.allocation.host_fd, 0)
            return before

    def close(self) -> None:
        """Free everything on the device and on the host. Views of it must not be touched any more."""
        if not self._usable:
            return
        with self._mutex, self._changing() as record:
            record.closed = True
            record.allocations.clear()
            self._control.write(record)
            for piece in self._pieces:
                with suppress(BufferError):
                    piece.view.release()
                self._let_go(piece, 0)
            self._pieces.clear()
            self._closed = True
        self._control.close()

    @property
    def _usable(self) -> bool:
        return not self._closed and self._pid == os.getpid()

    def _check_usable(self) -> None:
        if self._pid != os.getpid():
            raise UsageError(
                f"this arena belongs to process {self._pid}; device memory does not survive a fork, "
                "make an Arena in this process"
            )
        if self._closed:
            raise UsageError("this arena is closed; make a new one")

    def _find(self, view: memoryview, what: str) -> _Piece:
        piece = next((p for p in self._pieces if p.view is view), None)
        if piece is None:
            with suppress(ValueError):  # a released view has no obj
                piece = next((p for p in self._pieces if p.mapping is view.obj), None)
        if piece is None:
            raise UsageError(f"{what}(): this view is not of this arena, or was freed already")
        return piece

    def _protect(self, view: memoryview, *, sealed: bool) -> None:
        self._check_usable()
        with self._mutex:
            piece = self._find(view, "seal" if sealed else "unseal")
            with self._changing() as record:
                self._check_running(record, "seal" if sealed else "unseal")
                mine = next(a for a in record.allocations if a.device_fd == piece.allocation.device_fd)
                address, size = mine.address, mine.size
                if sealed:  # first nobody can write any more, then that is relied upon; and the other way round
                    syscalls.allow_writes(address, size, allowed=False)
                mine.sealed, mine.copied = sealed, mine.copied and sealed
                self._control.write(record)
                if not sealed:
                    syscalls.allow_writes(address, size, allowed=True)

    def _check_running(self, record: Record, what: str) -> None:
        if record.state != RUNNING:
            raise ArenaStateError(
                f"arena {self.label or self.device.path} is {record.state}; {what} after its resume",
                state=record.state,
            )

    def _measure(self, which: operations.FdOf) -> int:
        if not self._usable:
            return 0
        with self._mutex:
            return sum(os.fstat(which(piece.allocation)).st_blocks * 512 for piece in self._pieces)

    @contextmanager
    def _changing(self) -> Iterator[Record]:
        self._check_usable()
        with self._mutex, self._control.locked(time.monotonic() + _WAIT):
            yield self._control.read()

    def _let_go(self, piece: _Piece, total: int) -> None:
        self.device.release([piece.allocation.device_fd], self._owner, total)
        with suppress(BufferError):  # arrays live on: the addresses stay taken until they go, the memory is free
            piece.mapping.close()
        forks.close(piece.allocation.device_fd)
        forks.close(piece.allocation.host_fd)


def _map(device_fd: int, host_fd: int, size: int, nbytes: int) -> _Piece:
    # Python's mmap of a file would keep a descriptor of its own, which a forked child could not close safely.
    # So it only owns the addresses here, and the file's pages are laid over them.
    mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE)
    address = syscalls.address_of(mapping)
    syscalls.map_file_over(address, size, device_fd)
    mapping.madvise(mmap.MADV_DONTFORK)
    assert forks.mappings is not None
    forks.mappings[mapping] = (address, size)
    device, host = os.fstat(device_fd), os.fstat(host_fd)
    allocation = Allocation(device_fd, host_fd, device.st_dev, device.st_ino, host.st_ino, size, address)
    with memoryview(mapping) as whole:
        return _Piece(allocation, mapping, whole[:nbytes])
