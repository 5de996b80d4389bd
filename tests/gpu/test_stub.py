"""The stand-ins themselves, where a test of the backend could not tell that they do nothing."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator

import pytest

from tests.backends.conftest import MakeNode, make_node
from tests.gpu.node import Node, uuid
from tests.support.jobs import JobProcess, wait_until

__all__ = ["make_node"]

MIB = 1 << 20
Start = Callable[[int], JobProcess]


@pytest.fixture
def node(make_node: MakeNode) -> Node:
    return make_node((8 * MIB, 8 * MIB))


@pytest.fixture
def start() -> Iterator[Start]:
    started: list[JobProcess] = []

    def begin(nbytes: int) -> JobProcess:
        process = JobProcess("tests.gpu.worker")
        started.append(process)
        process.call("allocate", nbytes)
        return process

    yield begin
    for process in started:
        process.end()


def tool(node: Node, process: JobProcess, *words: str) -> str:
    """What the tool says, of whatever kind."""
    command = [str(node.tool), *words, "--pid", str(process.pid)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    return (done.stdout + done.stderr).strip()


def test_a_restore_without_room_spoils_all_later_ones(node: Node, start: Start) -> None:
    """What the backend must never reach: room again does not help."""
    out, small = start(6 * MIB), start(MIB)
    for each in (out, small):
        assert tool(node, each, "--action", "lock") == tool(node, each, "--action", "checkpoint") == ""
    squatter = start(5 * MIB)
    assert tool(node, out, "--action", "restore") == f'Could not restore on process ID {out.pid}: "out of memory"'
    squatter.end()
    later = '"OS call failed or operation not supported on this OS"'
    assert tool(node, out, "--action", "restore") == f"Could not restore on process ID {out.pid}: {later}"
    assert later in tool(node, small, "--action", "restore")


def test_two_calls_on_one_process_are_written_down(node: Node, start: Start) -> None:
    """So that a test can tell that there never were any."""
    process = start(MIB)
    node.set("lock-hangs")
    with subprocess.Popen([str(node.tool), "--action", "lock", "--pid", str(process.pid)]):
        wait_until(lambda: "locking" in node.read(process.pid), "the first one is at work")
        assert tool(node, process, "--get-state") == "running"
        node.clear("lock-hangs")
    assert node.overlaps() == [f"--get-state {process.pid}"]


def test_content_is_out_of_reach_while_it_is_out(node: Node, start: Start) -> None:
    """The bytes leave: the device's file is gone, and what the worker asks for waits until they are back."""
    process = start(MIB)
    digest = process.call("digest")
    (block,) = (node.folder / "memory").iterdir()
    assert tool(node, process, "--toggle") == ""
    assert not block.exists()
    process.ask("digest")
    assert tool(node, process, "--get-state") == "checkpointed"
    assert tool(node, process, "--toggle") == ""
    assert process.answer() == digest


def test_memory_is_limited_and_goes_with_the_process(node: Node, start: Start) -> None:
    """A third does not fit; a process that ended holds nothing."""
    first = start(6 * MIB)
    second = JobProcess("tests.gpu.worker")
    second.ask("allocate", 6 * MIB)
    assert second.process.wait(30) != 0
    second.end()
    assert node.used(uuid(0)) == 6 * MIB
    first.end()
    assert node.used() == 0
