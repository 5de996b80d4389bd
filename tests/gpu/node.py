"""A stand-in for a node with NVIDIA GPUs, as a test holds it. The files are those of stub/state.h."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from timeslice.arena.process import start_time_of

GIB = 1 << 30


def uuid(number: int) -> str:
    """A device's UUID as the driver writes it."""
    return f"GPU-{number:08x}-1111-2222-3333-444444444444"


@dataclass(frozen=True)
class Node:
    """``folder`` is for STUB_GPU_DIR, ``libraries`` (of build.py) for LD_LIBRARY_PATH."""

    folder: Path
    libraries: Path

    @classmethod
    def make(cls, folder: Path, libraries: Path, devices: Sequence[int] = (GIB,)) -> Node:
        """One device a size in bytes, with the UUIDs ``uuid(0)``, ``uuid(1)`` and so on."""
        node = cls(folder, libraries)
        (folder / "procs").mkdir(parents=True)
        (folder / "memory").mkdir()
        (folder / "calls").mkdir()
        (folder / "devices").write_text("")
        for number, size in enumerate(devices):
            node.add_device(uuid(number), size)
        return node

    @property
    def environment(self) -> dict[str, str]:
        """For a process on this node."""
        return {
            "STUB_GPU_DIR": str(self.folder),
            "LD_LIBRARY_PATH": str(self.libraries),
            "PATH": f"{self.libraries}:{os.environ['PATH']}",
        }

    @property
    def tool(self) -> Path:
        return self.libraries / "cuda-checkpoint"

    @contextmanager
    def locked(self) -> Iterator[None]:
        with (self.folder / "lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def add_device(self, name: str, total_bytes: int, *, model: str = "Stub-GPU", parent: str = "") -> None:
        """``parent`` makes it a MIG instance of that GPU."""
        with self.locked(), (self.folder / "devices").open("a") as file:
            file.write(f"{name} {total_bytes} {model} {parent}".rstrip() + "\n")

    def set(self, name: str, value: str | int = "always") -> None:
        """A fault or a setting: operations.h names them."""
        self.clear(name)
        with self.locked(), (self.folder / "faults").open("a") as file:
            file.write(f"{name}={value}\n")

    def clear(self, name: str) -> None:
        with self.locked():
            path = self.folder / "faults"
            lines = path.read_text().splitlines(keepends=True) if path.exists() else []
            draft = self.folder / ".faults"
            draft.write_text("".join(line for line in lines if not line.startswith(f"{name}=")))
            draft.replace(path)

    def overlaps(self) -> list[str]:
        """Calls of the tool that met another one at work on the same process."""
        path = self.folder / "overlaps"
        return path.read_text().splitlines() if path.exists() else []

    def process(self, pid: int) -> Path:
        """The file of a running process."""
        return self.folder / "procs" / f"{pid}-{start_time_of(pid)}"

    def write(self, pid: int, *lines: str) -> None:
        """All that is known of a process, in the words of state.h."""
        with self.locked():
            draft = self.folder / "procs" / f".{pid}"
            draft.write_text("".join(f"{line}\n" for line in lines))
            draft.replace(self.process(pid))

    def read(self, pid: int) -> list[str]:
        return self.process(pid).read_text().splitlines()

    def state(self, pid: int) -> str:
        """running, locked, checkpointed or failed; empty without a context."""
        try:
            lines = self.read(pid)
        except FileNotFoundError:
            return ""
        return next(line.split()[1] for line in lines if line.startswith("state "))

    def used(self, name: str | None = None) -> int:
        """Bytes that running processes have on a device (or on all), but for what is kept in spite of a checkpoint."""
        total = 0
        for path in (self.folder / "procs").glob("[0-9]*"):
            pid, start = map(int, path.name.split("-"))
            if start_time_of(pid) != start or "state checkpointed" in (lines := path.read_text().splitlines()):
                continue
            words = [line.split() for line in lines if line.startswith(("alloc ", "context "))]
            total += sum(int(size) for _, device, size, *_ in words if name in (None, device))
        return total
