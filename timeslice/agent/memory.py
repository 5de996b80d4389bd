"""Admission: may this much device state be copied to host memory without anybody being killed for it?

The kernel's own figures count, and the tightest limit wins: a container that sees the host's memory is still
killed at its own limit. Page cache is no use of memory: the kernel drops it when asked.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from timeslice.errors import BackendError, FaultKind

_UNLIMITED = 1 << 60  # cgroup v1 writes a number near 2^63 for "no limit"


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _stat(path: Path, name: str) -> int:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(name + " ")), 0)


def mem_available(proc: Path = Path("/proc")) -> int:
    """What the kernel says can be allocated without swapping, in bytes."""
    lines = (proc / "meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))


def cgroup_left(pid: str, proc: Path = Path("/proc"), root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes that the process may still allocate under its memory cgroups (v1 and v2); None without a limit.

    A path that is not there (the process is in another cgroup namespace) is looked for upwards.
    """
    try:
        lines = (proc / pid / "cgroup").read_text().splitlines()
    except OSError:
        return None
    left = None
    for line in lines:
        _, controllers, place = line.split(":", 2)
        if controllers == "":
            base, limit, usage, cache = root, "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            base, limit, usage = root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            cache = "total_inactive_file"
        else:
            continue
        folder = base / place.lstrip("/")
        for each in (folder, *folder.parents):
            if not each.is_relative_to(base):
                break
            most, used = _number(each / limit), _number(each / usage)
            if most is not None and used is not None and most < _UNLIMITED:
                here = max(most - used + _stat(each / "memory.stat", cache), 0)
                left = here if left is None else min(left, here)
    return left


class HostMemory:
    """The host memory of this node, shared by the groups of one agent. Sizes in bytes.

    ``budget`` caps what suspended state may take in all, None leaves it to the kernel's figures.
    """

    def __init__(
        self, budget: int | None = None, *, proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")
    ) -> None:
        self._budget, self._proc, self._cgroup = budget, proc, cgroup
        self._promised: dict[str, int] = {}  # group -> admitted but not copied yet
        self.held: dict[str, dict[str, int]] = {}  # group -> job -> bytes of its saved copy

    def held_bytes(self) -> int:
        """What all saved copies take."""
        return sum(sum(jobs.values()) for jobs in self.held.values())

    def available(self, pids: Iterable[int], *, but: str = "") -> int:
        """What may be copied now on behalf of these processes, less what other groups than ``but`` were promised."""
        figures = [mem_available(self._proc)]
        for pid in ("self", *map(str, pids)):
            left = cgroup_left(pid, self._proc, self._cgroup)
            if left is not None:
                figures.append(left)
        if self._budget is not None:
            figures.append(self._budget - self.held_bytes())
        return min(figures) - sum(size for group, size in self._promised.items() if group != but)

    def figures(self) -> dict[str, Any]:
        """For people: what saved copies take, what more may be copied, and both together, which is the budget."""
        available = max(self.available(()), 0)
        return {
            "budget_bytes": self.held_bytes() + available,
            "available_bytes": available,
            "held_bytes": self.held,
        }

    def admit(self, group: str, jobs: Iterable[str], need: int, reserve: int, pids: Iterable[int]) -> None:
        """Promise ``need`` bytes to a group until ``settle``. BackendError(transient) when they are not there."""
        if need == 0:
            return
        have = self.available(pids, but=group) - reserve
        if need > have:
            raise BackendError(
                f"group {group}: suspending {', '.join(jobs)} needs {need} bytes of host memory, {max(have, 0)} are "
                f"available (reserve {reserve}); the device is kept. Free host memory, raise the container's limit, "
                "or lower host_reserve_bytes.",
                kind=FaultKind.TRANSIENT,
                group=group,
            )
        self._promised[group] = need

    def settle(self, group: str) -> None:
        """The copy was made or given up: from now on the kernel's figures say it."""
        self._promised.pop(group, None)

    def note(self, group: str, job: str, size: int) -> None:
        """What a job's saved copy takes."""
        jobs = self.held.setdefault(group, {})
        jobs.pop(job, None)
        if size:
            jobs[job] = size
