"""What a swap on the emulated device moves, and how long that takes: all of it or only what changed, into fresh host
memory or into what was kept, one job after the other or both at once.

Three quarters of a job's memory are static, as the weights of a sampler beside its cache are.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from benchmarks.tools import Figures, rounds
from timeslice.arena import Arena, Device
from timeslice.backends.arena import ArenaBackend
from timeslice.backends.base import Context, Job, Selection
from timeslice.client.identity import process_start, this_target

SIZE, STATIC = 192 << 20, 144 << 20
DEADLINE_S = 60.0
ALL = Selection()

# A job that is moved from outside, and knows nothing of it.
HOLDER = f"""
import os, sys
from timeslice.arena import Arena
arena = Arena(sys.argv[1])
arena.allocate({SIZE})[:] = os.urandom(1 << 20) * {SIZE >> 20}
print("up", flush=True)
sys.stdin.read()
"""


class _Inside:
    """A job that moves its own arena out and back."""

    def __init__(self, device: Device, *, static: bool = False, fresh: bool = False) -> None:
        self._fresh = fresh
        self._arena = Arena(device, label="bench")
        for size in (STATIC, SIZE - STATIC):
            self._arena.allocate(size)[:] = os.urandom(1 << 20) * (size >> 20)
        if static:
            self._arena.seal(self._arena._pieces[0].view)  # noqa: SLF001
        self.moved = 0
        self.out_s: list[float] = []

    def cycle(self) -> list[float]:
        """Out and back; the seconds that it took, and of the way out by itself in ``out_s``."""
        if self._fresh:
            self._arena.trim()
        began = time.perf_counter()
        moved = self._arena.suspend()
        out = time.perf_counter() - began
        self.moved = moved + self._arena.resume()
        self.out_s.append(out)
        return [time.perf_counter() - began]

    def close(self) -> None:
        self._arena.close()


class _Outside:
    """Two jobs that pass a device with room for both to and fro, moved by the checkpoint tool."""

    def __init__(self, stack: ExitStack, device: Device) -> None:
        self._backend = ArenaBackend(Context(group="g", node="n", devices=(Path(device.path),)))
        self._jobs = [self._start(stack, device, name) for name in "ab"]
        asyncio.run(self._out(self._jobs[1]))

    def _start(self, stack: ExitStack, device: Device, name: str) -> Job:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        process = subprocess.Popen([sys.executable, "-c", HOLDER, device.path], **pipes)  # type: ignore[call-overload]
        stack.callback(process.wait)
        stack.callback(process.kill)
        process.stdout.readline()
        known = this_target("g", name, "n")
        target = known.model_copy(update={"pid": process.pid, "start": process_start(process.pid)})
        return Job(group="g", job=name, node="n", targets=(target,))

    async def _out(self, job: Job) -> None:
        await self._backend.prepare(job, ALL, deadline_s=DEADLINE_S)
        await self._backend.suspend(job, ALL, deadline_s=DEADLINE_S)

    async def _into(self, job: Job) -> None:
        await self._backend.restore(job, ALL, deadline_s=DEADLINE_S)

    def swap(self, *, at_once: bool) -> list[float]:
        """The one that is there leaves and the other one comes."""
        going, coming = self._jobs

        async def move() -> None:
            if at_once:
                await asyncio.gather(self._out(going), self._into(coming))
            else:
                await self._out(going)
                await self._into(coming)
            await self._backend.release(coming, deadline_s=DEADLINE_S)

        began = time.perf_counter()
        asyncio.run(move())
        self._jobs.reverse()
        return [time.perf_counter() - began]


def _on_a_device(stack: ExitStack, folder: str, name: str) -> Device:
    device = Device.create(Path(folder) / name, 3 * SIZE + (64 << 20))
    stack.callback(device.destroy, force=True)
    return device


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def measure() -> Figures:
    """Less is better in all ratios: 0.5 is half of the bytes, or half of the time."""
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        inside = _on_a_device(stack, folder, "inside")
        whole, static, fresh = _Inside(inside), _Inside(inside, static=True), _Inside(inside, fresh=True)
        for each in (whole, static, fresh):
            stack.callback(each.close)
        pair = _Outside(stack, _on_a_device(stack, folder, "outside"))
        measures: list[Callable[[], list[float]]] = [
            *(whole.cycle, static.cycle, fresh.cycle),
            *(lambda: pair.swap(at_once=False), lambda: pair.swap(at_once=True)),
        ]
        all_s, static_s, fresh_s, serial_s, overlapped_s = rounds(*measures)
        ratios = {
            "bytes_static_dropped_vs_all_moved": static.moved / whole.moved,
            "suspend_static_dropped_vs_all_moved": _median(static.out_s[1:]) / _median(whole.out_s[1:]),
            "swap_static_dropped_vs_all_moved": static_s / all_s,
            "suspend_kept_host_memory_vs_fresh": _median(whole.out_s[1:]) / _median(fresh.out_s[1:]),
            "swap_overlapped_vs_serial": overlapped_s / serial_s,
        }
    return Figures(
        ratios=ratios,
        values={
            "all_moved_mib_per_swap": whole.moved / (1 << 20),
            "static_dropped_mib_per_swap": static.moved / (1 << 20),
            "all_moved_ms": all_s * 1e3,
            "static_dropped_ms": static_s * 1e3,
            "fresh_host_memory_ms": fresh_s * 1e3,
            "serial_ms": serial_s * 1e3,
            "overlapped_ms": overlapped_s * 1e3,
        },
        aims={
            "bytes_static_dropped_vs_all_moved": "0.625, with 3/4 static",
            "suspend_static_dropped_vs_all_moved": "<= 0.5",
            "suspend_kept_host_memory_vs_fresh": "<= 0.6",
            "swap_overlapped_vs_serial": "< 1",
        },
    )
