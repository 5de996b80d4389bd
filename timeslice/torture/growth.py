"""Nothing grows: a whole system under thousands of swaps, each by a new job, measured until the end.

Real agents, coordinators and jobs' processes, and emulated devices with room for one job each, so that a swap that
did not really move anything would stop the run. A second kind of traffic holds a lock-only group as new jobs and
has waiters give up. What only waits for its expiry is told but not judged: it is bounded by time, not by use.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import redis
from pydantic import BaseModel
from rich.table import Table

from timeslice.arena.device import Device
from timeslice.cli.output import size
from timeslice.embedded import EmbeddedServer
from timeslice.errors import TimeSliceError
from timeslice.locks.connection import connect
from timeslice.locks.keys import Keys
from timeslice.locks.scripts import text
from timeslice.torture.growth_parts import LOCK, Done, Spec
from timeslice.torture.growth_series import Sample, Series, judge_all, of_folder, of_process

GROUPS = ("g1", "g2")
NODES = ("n1", "n2")
COORDINATORS = ("c1", "c2")
SAMPLES = 40
_READY_S = 60.0
_TURN_S = 600.0  # for the swaps between two samples
_ENDED_KEEP_MS = 150_000  # the ids of ended waiters are kept for 120 s, and swept when the next one ends
_SIZES = {"stream": "xlen", "hash": "hlen", "zset": "zcard", "set": "scard", "list": "llen", "string": "strlen"}


class GrowthReport(BaseModel):
    """What grew. ``expiring`` is the largest number of keys that only waited for their expiry; ``level`` says that
    every series levelled off, ``growing`` names those that did not."""

    swaps: int
    jobs: int
    holds: int
    timeouts: int
    seconds: float
    samples: int
    expiring: int
    series: tuple[Series, ...]
    growing: tuple[str, ...]
    level: bool


def run(
    swaps: int, *, folder: Path, samples: int = SAMPLES, say: Callable[[str], None] = lambda _: None
) -> GrowthReport:
    """Do ``swaps`` swaps, or up to four more, taking ``samples`` measurements. Everything lies below ``folder`` and
    ends with the call. Raises TimeSliceError when a part fails or stands still."""
    with ExitStack() as stack:
        server = EmbeddedServer(folder / "server")
        stack.callback(server.kill)
        server.start()
        return _Soak(server, folder, stack).run(swaps, samples, say)


def summary(report: GrowthReport) -> str:
    """What was done, and how much of what was measured grew."""
    return (
        f"{report.swaps} swaps by {report.jobs} jobs, {report.holds} lock-only holds and {report.timeouts} waiters "
        f"that gave up, in {report.seconds:.0f} s (emulated device): of {len(report.series)} series that were "
        f"measured, {len(report.growing)} grew"
    )


def table(report: GrowthReport) -> Table:
    """What grew, for people. JSON has all that was measured."""
    found = Table("what grew", "first", "second quarter", "last quarter", "most")
    for each in report.series:
        if not each.level:
            found.add_row(each.name, *(_shown(each, value) for value in (each.first, each.early, each.late, each.most)))
    return found


def _shown(series: Series, value: float) -> str:
    return size(round(value)) if series.unit.startswith("B") else f"{value:.0f}"


class _Part:
    """A process of the run; it ends when its input is closed."""

    def __init__(self, role: str, spec: Spec, folder: Path, **environment: str) -> None:
        self.label = f"{role} {spec.name}"
        self._log = folder / f"{role}-{spec.name}.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "timeslice.torture.growth_parts", role, spec.model_dump_json()],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, **environment},
                text=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, more: int) -> None:
        assert self._process.stdin
        self._process.stdin.write(f"{more}\n")
        self._process.stdin.flush()

    def answer(self, seconds: float) -> Any:
        assert self._process.stdout
        ready, _, _ = select.select([self._process.stdout], [], [], seconds)
        line = self._process.stdout.readline() if ready else ""
        if not line:
            told = self._log.read_text(errors="replace").strip()[-2000:]
            raise TimeSliceError(f"{self.label} {'ended' if ready else f'stood still for {seconds:g} s'}:\n{told}")
        return json.loads(line)

    def close(self) -> None:
        assert self._process.stdin
        assert self._process.stdout
        try:
            self._process.communicate(timeout=_READY_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class _Soak:
    def __init__(self, server: EmbeddedServer, folder: Path, stack: ExitStack) -> None:
        self._server, self._folder, self._stack = server, folder, stack
        self._keys = Keys()
        self._homes = {node: folder / node for node in NODES}
        self._client: redis.Redis = connect(server.url)
        stack.callback(self._client.close)
        for home in self._homes.values():
            for group in GROUPS:
                stack.callback(_destroy, home / "devices" / group)
        daemons = [self._part("agent", n, GROUPS, folder=folder / f"state-{n}", home=self._homes[n]) for n in NODES]
        daemons += [self._part("coordinator", name, ()) for name in COORDINATORS]
        for each in daemons:
            each.answer(_READY_S)
        self._holder = self._part("holder", LOCK, ())
        self._chains = [self._part("jobs", group, (group,)) for group in GROUPS]
        self._parts = [*daemons, self._holder, *self._chains]

    def run(self, swaps: int, samples: int, say: Callable[[str], None]) -> GrowthReport:
        began, taken, expiring = time.monotonic(), [], 0
        shares = [(swaps + index) // len(GROUPS) for index in range(len(GROUPS))]
        for number in range(1, samples + 1):
            done = self._work([share * number // samples - share * (number - 1) // samples for share in shares])
            sample, waiting = self._measure()
            taken.append(sample)
            expiring = max(expiring, waiting)
            say(f"{number}/{samples}: {done.swaps} swaps, {done.jobs} jobs, {time.monotonic() - began:.0f} s")
        seconds = time.monotonic() - began
        series = judge_all(taken)
        growing = tuple(each.name for each in series if not each.level)
        return GrowthReport(
            **done.model_dump(), seconds=round(seconds, 1), samples=samples, expiring=expiring, series=series,
            growing=growing, level=not growing,
        )  # fmt: skip

    def _work(self, swaps: Sequence[int]) -> Done:
        """So many swaps in each group, and as many lock-only holds; the sum of all that was done so far."""
        for part, more in zip(self._chains, swaps, strict=True):
            part.ask(more)
        self._holder.ask(sum(swaps))
        answers = [Done(**part.answer(_TURN_S)) for part in (*self._chains, self._holder)]
        return Done(**{name: sum(getattr(answer, name) for answer in answers) for name in Done.model_fields})

    def _measure(self) -> tuple[Sample, int]:
        sample, waiting = self._server_side()
        for part in self._parts:
            sample |= of_process(part.label, part.pid)
        sample |= of_process("server", self._server.pid)
        for node in NODES:
            sample |= of_folder(f"state of {node}", self._folder / f"state-{node}")
            sample |= of_folder(f"runtime folder of {node}", self._homes[node])
        return sample, waiting

    def _server_side(self) -> tuple[dict[str, float], int]:
        """Sizes of all keys that don't expire, and how many there are that do."""
        client: Any = self._client
        sample: dict[str, float] = {"server: keys": 0, "server: used memory (B)": client.info("memory")["used_memory"]}
        waiting = 0
        for key in map(text, client.scan_iter(count=1000)):
            if client.ttl(key) >= 0:
                waiting += 1
                continue
            sample["server: keys"] += 1
            if key.endswith(":ended"):
                newest = client.zrevrange(key, 0, 0, withscores=True)
                size = client.zcount(key, "-inf", newest[0][1] - _ENDED_KEEP_MS) if newest else 0
            else:
                kind = text(client.type(key))
                size = getattr(client, _SIZES[kind])(key) if kind in _SIZES else 0
            name = f"server: {self._name(key)}"
            sample[name] = sample.get(name, 0) + size
        return sample, waiting

    def _name(self, key: str) -> str:
        """Keys of our own groups and nodes by themselves, all others by what they are."""
        ours = {f"{{{tag}" for tag in (*GROUPS, LOCK, *(f"node:{node}" for node in NODES))}
        tag, brace, leaf = key.removeprefix(f"{self._keys.prefix}:").partition("}:")
        return f"{tag}{brace}{leaf}" if tag in ours or not leaf else f"others:{leaf.partition(':')[0]}"

    def _part(
        self, role: str, name: str, groups: Sequence[str], *, folder: Path = Path(), home: Path | None = None
    ) -> _Part:
        spec = Spec(url=self._server.url, name=name, groups=tuple(groups), folder=folder, homes=self._homes)
        part = _Part(role, spec, self._folder, TIMESLICE_RUNTIME_DIR=str(home or self._folder))
        self._stack.callback(part.close)
        return part


def _destroy(device: Path) -> None:
    if device.exists():
        Device.open(device).destroy(force=True)
