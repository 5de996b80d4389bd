"""Memory that is short: who waits is told what is missing, and who has it. Real bytes on an emulated device."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import NODE, Cli, World, eventually
from tests.cli.devices import Served
from tests.gpu.fixtures import gpu_node
from tests.gpu.node import Node
from timeslice.locks import scripts
from timeslice.locks.scripts import Observed

__all__ = ["gpu_node"]

MIB = 1 << 20
Squat = Callable[[Path, int], "subprocess.Popen[str]"]
SQUATTER = """
import sys
from timeslice.arena import Arena, Device
arena = Arena(Device.open(sys.argv[1]))
arena.allocate(int(sys.argv[2]))[:] = b"9" * int(sys.argv[2])
print("up", flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def served(cli: Cli, tmp_path: Path, gpu_node: Node, clean_environment: Path) -> Iterator[Served]:
    """A coordinator; the agent with its emulated device comes with the test, and goes with it."""
    made = Served(cli, tmp_path, gpu_node)
    made.coordinator()
    yield made
    cli.close()
    for line in Path("/proc/mounts").read_text().splitlines():
        if str(clean_environment) in line:
            subprocess.run(["umount", "-l", line.split()[1]], check=False)


@pytest.fixture
def squat(cli: Cli) -> Squat:
    """Take memory of a device, as a process that is no job's."""

    def start(device: Path, nbytes: int) -> subprocess.Popen[str]:
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        command = [sys.executable, "-c", SQUATTER, str(device), str(nbytes)]
        process: subprocess.Popen[str] = subprocess.Popen(command, text=True, start_new_session=True, **pipes)
        cli.started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        return process

    return start


@pytest.fixture
def device(clean_environment: Path) -> Path:
    return clean_environment / "devices" / "trainers"


def test_a_squatter_on_an_emulated_device_is_named(served: Served, device: Path, squat: Squat) -> None:
    """G07: a process that is no job has the memory that a job needs to come back. The restore is not tried, the
    waiter's reason names process and bytes, and when the squatter goes the job comes back whole."""
    served.ready("--emulate", "trainers=12M")
    first, second = (served.emulated_job(name, device, size) for name, size in (("a", 8 * MIB), ("b", 2 * MIB)))
    assert first.turn() == "first load True"
    second.go()
    assert second.says() == "first load True"
    squatter = squat(device, 9 * MIB)
    second.go()
    assert second.says() == "yielded"
    first.go()
    eventually(lambda: f"process {squatter.pid} holds {9 * MIB}" in served.why("a"), within=60)
    (job,) = [each for each in served.cli.json("jobs")["jobs"] if each["job"] == "a"]
    assert (job["residency"], job["host_bytes"]) == ("suspended", 8 * MIB)
    squatter.kill()
    squatter.wait()
    assert first.says() == "restored True"


def test_a_suspend_that_does_not_fit_into_host_memory_is_refused_and_told(served: Served, device: Path) -> None:
    """G08: the budget holds two jobs; the third keeps the device, who waits reads need and have, and nobody is killed.
    When a suspended job ends, its room is used again."""
    served.ready("--emulate", "trainers=5M", "--host-budget", "10M")
    assert served.cli("group", "set", "trainers", "--host-reserve", "0").exit_code == 0
    a, b, c = (served.emulated_job(name, device, 4 * MIB) for name in "abc")
    assert [each.turn() for each in (a, b)] == ["first load True"] * 2
    c.go()
    assert c.says() == "first load True"
    node = eventually(lambda: (n := served.shown())["memory"]["available_bytes"] == 2 * MIB and n)
    assert (node["memory"]["budget_bytes"], len(node["suspended"])) == (10 * MIB, 2)
    assert "8 MiB for 2 jobs, 2 MiB of 10 MiB left" in served.cli("nodes").stdout
    b.go()
    c.go()
    assert c.says() == "yielded"
    need = f"suspending c needs {4 * MIB} bytes of host memory, {2 * MIB} are available"
    eventually(lambda: need in served.why("b"), within=60)
    (job,) = eventually(lambda: [each for each in served.cli.json("jobs")["jobs"] if _on_device(each, "c")])
    assert (job["residency"], job["device_bytes"]) == ("resident", 4 * MIB)
    a.kill()
    assert b.says(60) == "restored True"
    assert c.process.poll() is None


def _on_device(job: dict[str, Any], name: str) -> bool:
    """Bytes are told with the next heartbeat after the grant."""
    return bool(job["job"] == name and job["device_bytes"])


def test_a_job_on_the_device_without_a_hold_is_flagged_at_its_node(cli: Cli, world: World) -> None:
    """C20: in `nodes` as in `jobs`."""
    world.serve("trainers")
    world.unheld("trainers", "b")
    (node,) = cli.json("nodes")["nodes"]
    assert node["groups"][0]["unheld"] == ["b"]
    assert "job b uses trainers UNHELD" in cli("nodes").stdout


def test_what_a_suspended_job_leaves_on_a_device_is_summed(cli: Cli, world: World) -> None:
    """G33: leftovers of all suspended jobs of a node add up; those of jobs on the device are none."""
    world.serve("trainers")
    keys = world.keys.group("trainers")
    seen = [
        Observed("a", "suspended", host_bytes=40 * MIB, device_bytes=2 * MIB, backend="channel"),
        Observed("b", "suspended", host_bytes=20 * MIB, device_bytes=3 * MIB, backend="channel"),
        Observed("c", "resident", device_bytes=50 * MIB, backend="channel"),
    ]
    world.driver.run(scripts.report(keys, NODE, world.driver.view(keys).counter, seen))
    (node,) = cli.json("nodes")["nodes"]
    assert [(each["job"], each["host_bytes"], each["device_bytes"]) for each in node["suspended"]] == [
        ("a", 40 * MIB, 2 * MIB),
        ("b", 20 * MIB, 3 * MIB),
    ]
    assert "60 MiB for 2 jobs (5 MiB stayed on devices)" in cli("nodes").stdout
