"""The wrapper of NVML, through the real pynvml, over a stand-in for libnvidia-ml.so.1: no GPU is involved."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import pytest

from tests.gpu.fixtures import Start, gpu_node, sleeper
from tests.gpu.node import GIB, Node, uuid
from tests.support.jobs import wait_until

__all__ = ["gpu_node", "sleeper"]

MIB = 1 << 20
ASK = """
import json, sys
from dataclasses import asdict
from timeslice.backends.nvml import Nvml, NvmlError
nvml = Nvml()
try:
    found = getattr(nvml, sys.argv[1])(*json.loads(sys.argv[2]))
    plain = [asdict(each) for each in found] if sys.argv[1] in ("devices", "measure") else found
    print(json.dumps({"found": plain}))
except NvmlError as error:
    print(json.dumps({"error": str(error), "kind": error.kind}))
"""


def told(environment: Mapping[str, str], what: str, *arguments: Any) -> dict[str, Any]:
    """What another process is told: the library is found when a process starts."""
    command = [sys.executable, "-c", ASK, what, json.dumps(arguments)]
    done = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def ask(node: Node, what: str, *arguments: Any) -> Any:
    answer = told(node.environment, what, *arguments)
    assert "found" in answer, answer
    return answer["found"]


def test_devices_are_told_with_what_is_usable(gpu_node: Node) -> None:
    """UUID, name, number, and the memory without what the driver keeps for itself."""
    gpu_node.add_device(uuid(1), 2 * GIB, model="Other-GPU")
    gpu_node.set("reserved", 100 * MIB)
    first, second = ask(gpu_node, "devices")
    assert first == {
        "uuid": uuid(0),
        "name": "Stub-GPU",
        "index": 0,
        "total_bytes": GIB - 100 * MIB,
        "free_bytes": GIB - 100 * MIB,
        "parent": "",
    }
    assert (second["uuid"], second["name"], second["index"]) == (uuid(1), "Other-GPU", 1)


def test_a_divided_gpu_is_told_by_its_instances(gpu_node: Node) -> None:
    """Where MIG is on, the GPU itself can't be computed on: its instances are listed, and each is measured alone."""
    gpu_node.add_device("MIG-a", 100 * MIB, parent=uuid(0))
    gpu_node.add_device("MIG-b", 200 * MIB, parent=uuid(0))
    gpu_node.add_device(uuid(1), GIB)
    found = ask(gpu_node, "devices")
    assert [(each["uuid"], each["index"], each["parent"]) for each in found] == [
        ("MIG-a", 0, uuid(0)),
        ("MIG-b", 0, uuid(0)),
        (uuid(1), 1, ""),
    ]
    assert [each["total_bytes"] for each in found] == [100 * MIB, 200 * MIB, GIB]
    gpu_node.write(os.getpid(), "state running", f"alloc MIG-b {10 * MIB}")
    measured = ask(gpu_node, "measure", ["MIG-a", "MIG-b"])
    assert [each["free_bytes"] for each in measured] == [100 * MIB, 190 * MIB]
    assert ask(gpu_node, "persistence", "MIG-b") is True  # its GPU's
    assert ask(gpu_node, "utilization", "MIG-b") is None


def test_memory_and_who_has_it_are_measured(gpu_node: Node, sleeper: Start) -> None:
    """G06: a living process is named with its bytes, context and all; one that is suspended is in no list; one that
    ended has nothing."""
    running, out, ended = sleeper(), sleeper(), sleeper()
    for process in (running, out, ended):
        gpu_node.write(
            process.pid, "state running", f"context {uuid(0)} {MIB}", f"alloc {uuid(0)} {9 * MIB}", "util 40"
        )
    (before,) = ask(gpu_node, "measure", [uuid(0)])
    assert before["free_bytes"] == GIB - 30 * MIB
    assert sorted(before["holders"]) == sorted([each.pid, 10 * MIB] for each in (running, out, ended))
    assert ask(gpu_node, "utilization", uuid(0)) == 100  # no more than that
    gpu_node.write(out.pid, "state checkpointed", f"alloc {uuid(0)} {9 * MIB}")
    ended.kill()
    ended.wait()
    (after,) = ask(gpu_node, "measure", [uuid(0)])
    assert (after["free_bytes"], after["holders"]) == (GIB - 10 * MIB, [[running.pid, 10 * MIB]])
    assert ask(gpu_node, "processes", uuid(0)) == [[running.pid, 10 * MIB]]
    assert ask(gpu_node, "utilization", uuid(0)) == 40


def test_a_process_without_a_figure_is_named_all_the_same(gpu_node: Node, sleeper: Start) -> None:
    """Drivers tell no bytes in some containers: the process is None in the list, and holds 0 where it is measured."""
    process = sleeper()
    gpu_node.write(process.pid, "state running", f"alloc {uuid(0)} {9 * MIB}")
    gpu_node.set("novalue", 1)
    assert ask(gpu_node, "processes", uuid(0)) == [[process.pid, None]]
    (measured,) = ask(gpu_node, "measure", [uuid(0)])
    assert (measured["free_bytes"], measured["holders"]) == (GIB - 9 * MIB, [[process.pid, 0]])


def test_driver_and_persistence_are_told(gpu_node: Node) -> None:
    """What decides whether `cuda` can work here."""
    gpu_node.set("driver", 580)
    assert ask(gpu_node, "driver_version") == "580.86.10"
    assert ask(gpu_node, "persistence", uuid(0)) is True
    gpu_node.set("persistence", 0)
    assert ask(gpu_node, "persistence", uuid(0)) is False


@pytest.mark.parametrize(
    ("fault", "kind", "hint"),
    [
        ("not_loaded", "unsupported", "the NVIDIA driver is not loaded; load it"),
        ("no_permission", "unsupported", "no permission to ask the driver; run the agent as root"),
    ],
)
def test_a_driver_that_does_not_answer_is_told_with_the_remedy(
    gpu_node: Node, fault: str, kind: str, hint: str
) -> None:
    """Each fault says what to do."""
    gpu_node.set("nvml", fault)
    answer = told(gpu_node.environment, "devices")
    assert answer["kind"] == kind
    assert hint in answer["error"]


def test_no_library_is_told_with_the_remedy() -> None:
    """A machine without a driver, or a container that was not given it."""
    answer = told({"LD_LIBRARY_PATH": "/nonexistent"}, "devices")
    if "error" not in answer:
        pytest.skip("this machine has NVIDIA's driver")
    assert answer["kind"] == "unsupported"
    assert "NVIDIA driver" in answer["error"]


def test_a_gpu_that_is_lost_does_not_hide_the_others(gpu_node: Node) -> None:
    """It is left out of the list; asked for it, the fault is that the driver can't be trusted, with the remedy."""
    gpu_node.add_device(uuid(1), GIB)
    gpu_node.set("nvml_lost", uuid(0))
    assert [each["uuid"] for each in ask(gpu_node, "devices")] == [uuid(1)]
    answer = told(gpu_node.environment, "measure", [uuid(0)])
    assert answer["kind"] == "poisoned"
    assert "fallen off the bus" in answer["error"]
    assert ask(gpu_node, "measure", [uuid(1)])[0]["free_bytes"] == GIB


def test_a_device_that_is_not_there_is_named(gpu_node: Node) -> None:
    """It went away since the agent started, or never was there."""
    answer = told(gpu_node.environment, "measure", [uuid(7)])
    assert answer["kind"] == "unsupported"
    assert uuid(7) in answer["error"]


HANGS = """
import asyncio, sys, threading, time
from timeslice.backends.nvml import Nvml, NvmlError, ask

async def main():
    nvml = Nvml()
    for line in sys.stdin:
        try:
            print(len(await ask(lambda: nvml.measure([sys.argv[1]]), within_s=float(line))), flush=True)
        except NvmlError as error:
            print(error.kind, threading.active_count(), error, flush=True)

asyncio.run(main())
"""


def test_a_driver_that_hangs_holds_nobody_up(gpu_node: Node) -> None:
    """A question ends in time, with what to look at; later ones end at once and take no thread; when the driver answers
    again, so does the library."""
    command = [sys.executable, "-c", HANGS, uuid(0)]
    pipe, environment = subprocess.PIPE, {**os.environ, **gpu_node.environment}
    with subprocess.Popen(command, env=environment, text=True, stdin=pipe, stdout=pipe, bufsize=1) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def told(within_s: float) -> str:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(f"{within_s}\n")
            return process.stdout.readline().strip()

        assert told(30) == "1"
        gpu_node.set("nvml_hangs", 1)
        first = told(0.2)
        assert first.startswith("transient 2 the NVIDIA driver does not answer; see whether nvidia-smi hangs")
        assert {told(600) for _ in range(20)} == {first}
        gpu_node.clear("nvml_hangs")
        wait_until(lambda: told(30) == "1", "it answers again")
        process.stdin.close()
