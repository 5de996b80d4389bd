"""The control block of an arena: a memfd that says what it has and in which state that is.

Others find it by its name among the links of ``/proc/PID/fd``. It holds the record twice: a writer fills the older
slot, with a higher sequence number and a checksum, so a writer that dies in the middle leaves the other slot valid.
Writers hold its file lock, which the kernel drops when they die.
"""

from __future__ import annotations

import fcntl
import os
import struct
import time
from binascii import crc32
from contextlib import contextmanager

from timeslice.arena import forks
from timeslice.arena.errors import ArenaBusyError, EmulatedDeviceError

TYPE_CHECKING = False  # typing costs the command a fifth of its start-up time
if TYPE_CHECKING:
    from collections.abc import Iterator

MEMFD_NAME = "timeslice-arena"
HOST_MEMFD_NAME = "timeslice-host-copy"
STATES = ("running", "locked", "checkpointed")
RUNNING, LOCKED, CHECKPOINTED = STATES
# What was under way when the record was written; whoever finds it without its writer finishes or undoes it.
STEPS = ("", "copying-out", "freeing", "copying-in", "freeing-late")
NO_STEP, COPYING_OUT, FREEING, COPYING_IN, FREEING_LATE = STEPS

_VERSION = 2
_SLOT = 256 * 1024
_FRAME = struct.Struct("<8sIIIQ")  # magic, version, checksum and length of the body, sequence number
_BODY = struct.Struct("<IQQBBBBHHHI")
_COUNTER = struct.Struct("<II")
_ALLOCATION = struct.Struct("<IIQQQQQB")
_MAGIC = b"tsarena\0"
MAX_ALLOCATIONS = (_SLOT - 4096 - _FRAME.size - _BODY.size) // _ALLOCATION.size


class Allocation:
    """One piece of device memory: the descriptors in its process, what is behind them, size and address.

    ``sealed``: its process can't write to it. ``copied``: the host copy of a sealed piece is whole, so it need not be
    copied again as long as it stays sealed.
    """

    __slots__ = ("address", "copied", "device_dev", "device_fd", "device_ino", "host_fd", "host_ino", "sealed", "size")

    def __init__(
        self,
        device_fd: int,
        host_fd: int,
        device_dev: int,
        device_ino: int,
        host_ino: int,
        size: int,
        address: int,
        flags: int = 0,
    ) -> None:
        self.device_fd = device_fd
        self.host_fd = host_fd
        self.device_dev = device_dev
        self.device_ino = device_ino
        self.host_ino = host_ino
        self.size = size
        self.address = address
        self.sealed, self.copied = bool(flags & 1), bool(flags & 2)


class Record:
    """What the control block says."""

    def __init__(self, pid: int, start_time: int, arena: int, device: str, label: str, *, advisory: bool) -> None:
        self.pid = pid
        self.start_time = start_time
        self.arena = arena
        self.device = device
        self.label = label
        self.advisory = advisory
        self.state = RUNNING
        self.step = NO_STEP
        self.stopped = False  # an operator stopped the process and has to continue it
        self.was_stopped = False  # it stood still already, by somebody else's hand, and must stay so
        self.closed = False
        self.counters: dict[int, int] = {}  # of injected faults
        self.allocations: list[Allocation] = []

    @property
    def total(self) -> int:
        """Bytes of all allocations."""
        return sum(a.size for a in self.allocations)

    @property
    def copied(self) -> int:
        """Bytes of which host memory has a valid copy."""
        return sum(a.size for a in self.allocations if a.copied)

    def pack(self) -> bytes:
        device, label = os.fsencode(self.device), self.label.encode()
        flags = self.stopped | self.was_stopped << 1 | self.closed << 2 | self.advisory << 3
        parts = [
            _BODY.pack(
                self.pid,
                self.start_time,
                self.arena,
                STATES.index(self.state),
                STEPS.index(self.step),
                flags,
                0,
                len(device),
                len(label),
                len(self.counters),
                len(self.allocations),
            ),
            device,
            label,
        ]
        parts += [_COUNTER.pack(key, count) for key, count in self.counters.items()]
        parts += [
            _ALLOCATION.pack(
                *(a.device_fd, a.host_fd, a.device_dev, a.device_ino, a.host_ino, a.size, a.address),
                a.sealed | a.copied << 1,
            )
            for a in self.allocations
        ]
        return b"".join(parts)

    @classmethod
    def unpack(cls, body: bytes) -> Record:
        pid, start, arena, state, step, flags, _, path_len, label_len, n_counters, n_allocations = _BODY.unpack_from(
            body
        )
        at = _BODY.size
        device = os.fsdecode(body[at : at + path_len])
        at += path_len
        label = body[at : at + label_len].decode()
        at += label_len
        record = cls(pid, start, arena, device, label, advisory=bool(flags & 8))
        record.state, record.step = STATES[state], STEPS[step]
        record.stopped, record.was_stopped, record.closed = bool(flags & 1), bool(flags & 2), bool(flags & 4)
        for _ in range(n_counters):
            key, count = _COUNTER.unpack_from(body, at)
            record.counters[key] = count
            at += _COUNTER.size
        for _ in range(n_allocations):
            record.allocations.append(Allocation(*_ALLOCATION.unpack_from(body, at)))
            at += _ALLOCATION.size
        return record


class ControlBlock:
    """An open control block. Two openings of it exclude each other by `locked`, also across processes."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    @classmethod
    def create(cls) -> ControlBlock:
        with forks.guard:
            return cls(forks.note(os.memfd_create(MEMFD_NAME)))

    def close(self) -> None:
        forks.close(self.fd)

    def read(self) -> Record:
        """The newest whole record."""
        for _ in range(100):  # a reader without the lock may catch both slots in change; never for long
            frames = [frame for slot in (0, 1) if (frame := self._frame(slot))]
            if frames:
                try:
                    return Record.unpack(max(frames)[1])
                except (ValueError, IndexError, struct.error):
                    break  # whole, but no record: not written by this package
        raise EmulatedDeviceError("an arena's control block is damaged; end its process")

    def write(self, record: Record) -> None:
        """Replace the record. The caller holds the lock."""
        sequences = {slot: found[0] for slot in (0, 1) if (found := self._frame(slot))}
        newest = max(sequences, key=sequences.__getitem__) if sequences else 1
        body = record.pack()
        if len(body) + _FRAME.size > _SLOT:
            raise EmulatedDeviceError(f"an arena holds at most {MAX_ALLOCATIONS} allocations; make larger ones")
        sequence = sequences.get(newest, 0) + 1
        frame = _FRAME.pack(_MAGIC, _VERSION, crc32(body, sequence), len(body), sequence)
        os.pwrite(self.fd, frame + body, (1 - newest) * _SLOT)

    def _frame(self, slot: int) -> tuple[int, bytes] | None:
        raw = os.pread(self.fd, 4096, slot * _SLOT)
        if len(raw) < _FRAME.size:
            return None
        magic, version, checksum, length, sequence = _FRAME.unpack_from(raw)
        if length > min(len(raw) - _FRAME.size, _SLOT):
            raw = os.pread(self.fd, min(_FRAME.size + length, _SLOT), slot * _SLOT)
        body = raw[_FRAME.size : _FRAME.size + length]
        if magic != _MAGIC or len(body) != length or crc32(body, sequence & 0xFFFFFFFF) != checksum:
            return None
        if version != _VERSION:
            raise EmulatedDeviceError(f"an arena of version {version}, this is {_VERSION}; use the same timeslice")
        return sequence, body

    @contextmanager
    def locked(self, deadline: float) -> Iterator[None]:
        """Hold the file lock; `ArenaBusyError` when somebody else keeps it past the (monotonic) deadline."""
        pause = 0.0001
        while True:
            try:
                fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise ArenaBusyError(
                        "another operator works on this arena (or hangs); try again, and see who it is "
                        "with `fuser` or `lslocks`"
                    ) from None
                time.sleep(pause)
                pause = min(pause * 2, 0.01)
        try:
            yield
        finally:
            fcntl.flock(self.fd, fcntl.LOCK_UN)
