"""Admission to host memory: the kernel's figures, the container's limit, and promises between groups."""

from __future__ import annotations

from pathlib import Path

import pytest

from timeslice.agent.memory import HostMemory, cgroup_left, mem_available
from timeslice.errors import BackendError, FaultKind

MIB = 1 << 20


class Kernel:
    """A /proc and /sys/fs/cgroup of the test's own."""

    def __init__(self, folder: Path) -> None:
        self.proc, self.cgroup = folder / "proc", folder / "cgroup"
        self.put(self.proc / "meminfo", f"MemTotal: {8 << 20} kB\nMemAvailable: {1 << 20} kB\n")

    def put(self, path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def belongs(self, pid: str, *lines: str) -> None:
        self.put(self.proc / pid / "cgroup", "\n".join(lines) + "\n")

    def v2(self, place: str, limit: str, usage: int, cache: int = 0) -> None:
        self.put(self.cgroup / place / "memory.max", limit + "\n")
        self.put(self.cgroup / place / "memory.current", f"{usage}\n")
        self.put(self.cgroup / place / "memory.stat", f"anon 1\ninactive_file {cache}\n")

    def v1(self, place: str, limit: int, usage: int, cache: int = 0) -> None:
        base = self.cgroup / "memory" / place
        self.put(base / "memory.limit_in_bytes", f"{limit}\n")
        self.put(base / "memory.usage_in_bytes", f"{usage}\n")
        self.put(base / "memory.stat", f"cache 1\ninactive_file 7\ntotal_inactive_file {cache}\n")

    def left(self, pid: str) -> int | None:
        return cgroup_left(pid, self.proc, self.cgroup)

    def memory(self, budget: int | None = None) -> HostMemory:
        return HostMemory(budget, proc=self.proc, cgroup=self.cgroup)


@pytest.fixture
def kernel(tmp_path: Path) -> Kernel:
    return Kernel(tmp_path)


def test_the_real_kernel_is_understood() -> None:
    """On this machine there is some memory, and the cgroup files can be read."""
    assert mem_available() > MIB
    left = cgroup_left("self")
    assert left is None or left >= 0


def test_the_container_s_limit_counts_and_page_cache_does_not(kernel: Kernel) -> None:
    """G08, cgroup v2: limit less usage, with the cache that the kernel would drop given back."""
    kernel.belongs("self", "0::/pod/box")
    kernel.v2("pod/box", str(1000 * MIB), 900 * MIB, cache=300 * MIB)
    assert kernel.left("self") == 400 * MIB


def test_cgroup_v1_likewise(kernel: Kernel) -> None:
    """G08: the hierarchical figure of the cache counts."""
    kernel.belongs("self", "5:cpu:/x", "4:memory:/pod", "0::/")
    kernel.v1("pod", 1000 * MIB, 900 * MIB, cache=100 * MIB)
    assert kernel.left("self") == 200 * MIB


def test_the_tightest_limit_upwards_wins(kernel: Kernel) -> None:
    """A parent's limit binds its children."""
    kernel.belongs("9", "0::/pod/box")
    kernel.v2("pod/box", "max", 10 * MIB)
    kernel.v2("pod", str(50 * MIB), 30 * MIB)
    assert kernel.left("9") == 20 * MIB


def test_no_limit_is_no_figure(kernel: Kernel) -> None:
    """`max` in v2, a huge number in v1, or no memory controller at all."""
    kernel.belongs("1", "0::/a")
    kernel.v2("a", "max", 5)
    kernel.belongs("2", "4:memory:/b")
    kernel.v1("b", 9223372036854771712, 5)
    kernel.belongs("3", "4:cpu:/c")
    assert [kernel.left(pid) for pid in "123"] == [None, None, None]
    assert kernel.left("4") is None


def test_a_path_of_another_namespace_is_looked_for_upwards(kernel: Kernel) -> None:
    """Inside a container the host's path is not there, but its own limit is at the root."""
    kernel.belongs("self", "0::/kubepods/pod1/box")
    kernel.v2(".", str(70 * MIB), 20 * MIB)
    assert kernel.left("self") == 50 * MIB


def test_too_much_is_refused_with_need_and_have(kernel: Kernel) -> None:
    """The smallest of machine, own container and the job's container, less the reserve."""
    kernel.belongs("self", "0::/agent")
    kernel.v2("agent", str(800 * MIB), 0)
    kernel.belongs("77", "0::/job")
    kernel.v2("job", str(500 * MIB), 100 * MIB)
    memory = kernel.memory()
    memory.admit("g", ["a"], 300 * MIB, 100 * MIB, [77])
    with pytest.raises(BackendError, match=f"a needs {301 * MIB} bytes of host memory, {300 * MIB} are available") as e:
        memory.admit("g", ["a"], 301 * MIB, 100 * MIB, [77])
    assert e.value.kind is FaultKind.TRANSIENT


def test_two_groups_can_not_be_promised_the_same_memory(kernel: Kernel) -> None:
    """What one group was admitted with counts for the others until its copy is made or given up."""
    memory = kernel.memory()
    memory.admit("g", ["a"], 700 * MIB, 0, [])
    with pytest.raises(BackendError, match="needs"):
        memory.admit("h", ["b"], 400 * MIB, 0, [])
    memory.admit("g", ["a"], 800 * MIB, 0, [])  # its own promise is no obstacle
    memory.settle("g")
    memory.admit("h", ["b"], 400 * MIB, 0, [])


def test_the_budget_counts_what_is_held(kernel: Kernel) -> None:
    """An operator's budget is for all saved copies together."""
    memory = kernel.memory(budget=1000)
    memory.note("g", "a", 600)
    memory.note("h", "b", 300)
    with pytest.raises(BackendError, match="needs 101 bytes of host memory, 100 are available"):
        memory.admit("g", ["c"], 101, 0, [])
    memory.note("g", "a", 0)
    memory.admit("g", ["c"], 700, 0, [])


def test_a_job_with_nothing_to_copy_is_always_admitted(kernel: Kernel) -> None:
    """No bytes, no question."""
    kernel.put(kernel.proc / "meminfo", "MemAvailable: 0 kB\n")
    kernel.memory().admit("g", ["a"], 0, 256 * MIB, [])


def test_the_budget_is_what_is_held_and_what_is_left(kernel: Kernel) -> None:
    """G08: the figures of a node: the tightest of machine, container and --host-budget, less what is held already."""
    kernel.belongs("self", "0::/agent")
    kernel.v2("agent", str(800 * MIB), 0)
    memory = kernel.memory()
    memory.note("g", "a", 100 * MIB)
    figures = memory.figures()
    assert (figures["available_bytes"], figures["budget_bytes"]) == (800 * MIB, 900 * MIB)
    assert figures["held_bytes"] == {"g": {"a": 100 * MIB}}
    capped = kernel.memory(budget=300 * MIB)
    capped.note("g", "a", 100 * MIB)
    assert (capped.figures()["available_bytes"], capped.figures()["budget_bytes"]) == (200 * MIB, 300 * MIB)
    capped.note("h", "b", 250 * MIB)  # taken in before the operator lowered the budget
    assert (capped.figures()["available_bytes"], capped.figures()["budget_bytes"]) == (0, 350 * MIB)
