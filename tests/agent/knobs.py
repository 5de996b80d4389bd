"""A snapshot backend for tests: it moves numbers instead of bytes, and can be told to misbehave.

Its state is in files, so that it outlives an agent that is killed, and a test can read and change it. A job's entry
is ``<job>.json``, the knobs are in ``knobs.json``: operation -> settings::

    delay     seconds to wait first
    fail      how often it still fails; -1 for ever
    kind      of the fault
    hang      wait for ever, until the file `release` appears
    die       kill the agent's process: "before" or "after" the work
    share     of the memory that a suspend really frees; ``of`` one job only
    lie       report success and do nothing
    saved     bytes of it that are said to need no copy

Any knob named ``overlaps`` lets one job come in while another one goes.
    late      seconds after which the rest of it is freed

A job that was loaded in parts can leave in parts.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from timeslice.agent import procfs
from timeslice.agent.journal import write_whole
from timeslice.backends.base import Backend, Capabilities, Context, DeviceMemory, Job, Outcome, Probe, Selection
from timeslice.errors import BackendError, FaultKind
from timeslice.models import Mode, Residency

CAPACITY = 1000
_ALL = Selection()


@dataclass
class Fake:
    """The fake device of one group: what a test sets and reads."""

    folder: Path

    def read(self, name: str) -> dict[str, Any]:
        path = self.folder / f"{name}.json"
        found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        return found

    def write(self, name: str, value: dict[str, Any]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        write_whole(self.folder / f"{name}.json", json.dumps(value).encode())

    def load(self, job: str, size: int = 0, **parts: int) -> None:
        """The job has state on the device now."""
        size = size or sum(parts.values())
        entry = {"state": "resident", "bytes": size, "locked": False, "lingers": 0, "until": 0}
        self.write(job, {**entry, "parts": parts or {"": size}, "out": []})

    def on_device(self, job: str) -> dict[str, int]:
        """The parts of a job that are on the device."""
        entry = self.read(job)
        out = entry["out"] or (entry["parts"] if entry["state"] == "suspended" else ())
        return {tag: size for tag, size in entry["parts"].items() if tag not in out}

    def knob(self, operation: str, **settings: Any) -> None:
        self.write("knobs", {**self.read("knobs"), operation: settings})

    def state(self, job: str) -> str:
        return str(self.read(job).get("state", "absent"))

    def locked(self, job: str) -> bool:
        return bool(self.read(job).get("locked"))

    def calls(self) -> list[str]:
        """Every operation that touched a job, as ``operation job``."""
        path = self.folder / "calls"
        return path.read_text().splitlines() if path.exists() else []

    def asked(self) -> list[str]:
        """The same with what was selected: ``suspend job discard tags slot``."""
        path = self.folder / "asked"
        return path.read_text().splitlines() if path.exists() else []


class KnobBackend(Backend):
    name = "knobs"

    def __init__(self, context: Context) -> None:
        self._fake = Fake(Path(context.options["folder"]) / context.group)
        self._fake.folder.mkdir(parents=True, exist_ok=True)

    def capabilities(self) -> Capabilities:
        overlaps = bool(self._fake.read("knobs").get("overlaps"))
        modes: frozenset[Mode] = frozenset({"offload", "discard"})
        return Capabilities(modes=modes, forced=True, freed_share=0.99, overlaps=overlaps)

    async def probe(self, job: Job) -> Probe:
        await self._knobs("probe")
        entry = self._fake.read(job.job)
        if not entry or not any(procfs.look_at(target.pid) for target in job.targets):
            return Probe(state=Residency.ABSENT)
        here = self._fake.on_device(job.job)
        return Probe(
            state=Residency(entry["state"]),
            device_bytes=sum(here.values()),
            host_bytes=entry["bytes"] - sum(here.values()),
            locked=entry["locked"],
            parts={} if "" in entry["parts"] else here,
        )

    async def estimate(self, job: Job, selection: Selection) -> int:
        return sum(self._selected(job, selection).values())

    async def prepare(self, job: Job, selection: Selection, *, deadline_s: float) -> Outcome:
        return await self._change("prepare", job, selection, locked=True)

    async def suspend(self, job: Job, selection: Selection, *, deadline_s: float) -> Outcome:
        knobs = self._fake.read("knobs").get("suspend", {})
        leaves = self._selected(job, selection)
        out = [*self._fake.read(job.job).get("out", ()), *leaves]
        share = knobs.get("share", 1) if knobs.get("of", job.job) == job.job else 1
        kept = int(sum(leaves.values()) * (1 - share))
        until = time.time() + knobs.get("late", 1e9)
        values = {"state": "suspended", "locked": False, "lingers": kept, "until": until, "out": out}
        return await self._change("suspend", job, selection, **values)

    async def restore(self, job: Job, selection: Selection, *, deadline_s: float) -> Outcome:
        return await self._change("restore", job, selection, state="resident", locked=True, lingers=0, out=[])

    async def release(self, job: Job, *, deadline_s: float) -> Outcome:
        return await self._change("release", job, locked=False)

    async def abort(self, job: Job, *, deadline_s: float) -> Outcome:
        return await self._change("abort", job, locked=False)

    async def health(self) -> Sequence[str]:
        return ()

    async def memory(self) -> Sequence[DeviceMemory]:
        holders = []
        for path in sorted(self._fake.folder.glob("*.json")):
            entry = self._fake.read(path.stem)
            if "state" in entry:
                lingers = entry["lingers"] if time.time() < entry["until"] else 0
                size = sum(self._fake.on_device(path.stem).values()) + lingers
                if size and procfs.look_at(entry.get("pid", os.getpid())):
                    holders.append((entry.get("as", entry.get("pid", 0)), size))
        taken = sum(size for _, size in holders)
        free = CAPACITY - taken
        return (DeviceMemory(device="fake0", total_bytes=CAPACITY, free_bytes=free, holders=tuple(holders)),)

    def _selected(self, job: Job, selection: Selection) -> dict[str, int]:
        """What of the selected parts is on the device."""
        here = self._fake.on_device(job.job) if self._fake.read(job.job) else {}
        return {tag: size for tag, size in here.items() if tag in selection.tags or not selection.tags}

    async def _change(self, operation: str, job: Job, selection: Selection = _ALL, **values: Any) -> Outcome:
        with (self._fake.folder / "calls").open("a") as calls:
            calls.write(f"{operation} {job.job}\n")
        if operation != "release":
            with (self._fake.folder / "asked").open("a") as asked:
                words = (selection.mode, ",".join(selection.tags), selection.slot)
                asked.write(" ".join(filter(None, (operation, job.job, *words))) + "\n")
        knobs = await self._knobs(operation)
        entry = self._fake.read(job.job)
        if entry and not knobs.get("lie"):
            self._fake.write(job.job, {**entry, "pid": job.targets[0].pid, **values})
        if knobs.get("die") == "after":
            os.kill(os.getpid(), signal.SIGKILL)
        saved = knobs.get("saved", 0)
        return Outcome(moved_bytes=entry.get("bytes", 0) - saved, saved_bytes=saved)

    async def _knobs(self, operation: str) -> dict[str, Any]:
        knobs: dict[str, Any] = self._fake.read("knobs").get(operation, {})
        await asyncio.sleep(knobs.get("delay", 0))
        while knobs.get("hang") and not (self._fake.folder / "release").exists():
            await asyncio.sleep(0.02)
        if knobs.get("die") == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        if left := knobs.get("fail", 0):
            self._fake.knob(operation, **{**knobs, "fail": left - 1 if left > 0 else -1})
            raise BackendError(
                f"{operation} fails by order of the test", kind=FaultKind(knobs.get("kind", "transient"))
            )
        return knobs


def make(name: str, context: Context) -> Backend:
    """Stands in for the registry."""
    assert name == "knobs"
    return KnobBackend(context)
