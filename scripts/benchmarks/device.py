"""Bandwidth of the emulated device against a plain loop of the same system calls."""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from pathlib import Path

from benchmarks.tools import Figures, rounds
from timeslice.arena import Arena, Device

SIZE = 192 << 20
CHUNK = 1 << 20


def _copy(source: int, sink: int) -> None:
    with mmap.mmap(-1, CHUNK, flags=mmap.MAP_PRIVATE) as buffer, memoryview(buffer) as view:
        for offset in range(0, SIZE, CHUNK):
            os.preadv(source, [view], offset)
            os.pwrite(sink, view, offset)


class _Plain:
    """A file on the same device and a memfd; out and in with nothing around it."""

    def __init__(self, folder: Path) -> None:
        self.device = os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o600)
        self.host = os.memfd_create("plain")
        os.posix_fallocate(self.device, 0, SIZE)

    def out(self) -> list[float]:
        began = time.perf_counter()
        _copy(self.device, self.host)
        os.ftruncate(self.device, 0)
        return [time.perf_counter() - began]

    def back(self) -> list[float]:
        began = time.perf_counter()
        os.ftruncate(self.device, SIZE)
        os.posix_fallocate(self.device, 0, SIZE)
        _copy(self.host, self.device)
        return [time.perf_counter() - began]


def _timed(action: object) -> list[float]:
    began = time.perf_counter()
    assert callable(action)
    action()
    return [time.perf_counter() - began]


def measure() -> Figures:
    """suspend_vs_plain_loop, restore_vs_plain_loop: bandwidth ratios, 1.0 is as fast as the plain loop."""
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "device"
        device = Device.create(folder, 2 * SIZE + (64 << 20))
        try:
            plain = _Plain(folder)
            with Arena(device, label="bench") as arena:
                view = arena.allocate(SIZE)
                view[:] = os.urandom(1 << 20) * (SIZE >> 20)
                plain_out, plain_back, ours_out, ours_back = rounds(
                    plain.out, plain.back, lambda: _timed(arena.suspend), lambda: _timed(arena.resume)
                )
            os.close(plain.device)
            os.close(plain.host)
        finally:
            device.destroy()
    gib = SIZE / (1 << 30)
    return Figures(
        ratios={"suspend_vs_plain_loop": plain_out / ours_out, "restore_vs_plain_loop": plain_back / ours_back},
        values={
            "suspend_gib_per_s": gib / ours_out,
            "restore_gib_per_s": gib / ours_back,
            "plain_out_gib_per_s": gib / plain_out,
            "plain_back_gib_per_s": gib / plain_back,
        },
        aims={"suspend_vs_plain_loop": ">= 0.8", "restore_vs_plain_loop": ">= 0.8"},
    )
