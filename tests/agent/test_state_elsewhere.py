"""State that a workload has beside the group's emulated device, such as tensors of a CPU: its own word of it counts."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.jobs import wait_until
from timeslice.agent.devices import unexplained
from timeslice.backends.base import DeviceMemory
from timeslice.locks.drivers import SyncDriver
from timeslice.locks.keys import Keys
from timeslice.locks.scripts import text
from timeslice.up import LocalStack, private_environment

SIZE = 3 << 20
JOB = f"""
import sys
import timeslice

state = {{"on": bytearray(b"7" * {SIZE}), "off": b""}}

def suspend(mode, tags):
    state["off"], state["on"] = bytes(state["on"]), bytearray()
    return {SIZE} if sys.argv[2] == "honest" else 0

def restore(tags):
    state["on"], state["off"] = bytearray(state["off"]), b""
    return {SIZE}

def probe():
    if sys.argv[2] == "keeps":
        return ("suspended" if state["off"] else "resident"), {SIZE}, len(state["off"])
    return ("suspended" if state["off"] else "resident"), len(state["on"]), len(state["off"])

workload = timeslice.register_workload("trainers", on_suspend=suspend, on_restore=restore, probe=probe, job=sys.argv[1])
for _ in sys.stdin:
    with timeslice.hold("trainers", job=sys.argv[1], timeout=60) as lease:
        print(lease.grant.how, state["on"] == b"7" * {SIZE}, flush=True)
"""


@pytest.fixture
def stack() -> Iterator[LocalStack]:
    """All of timeslice with an emulated device that is smaller than the jobs' state, which is not on it."""
    with (
        tempfile.TemporaryDirectory(prefix="e") as name,
        private_environment(Path(name)),
        LocalStack({"trainers": SIZE // 2}) as local,
    ):
        yield local


def start(job: str, kind: str = "honest") -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", JOB, job, kind], stdin=pipe, stdout=pipe, text=True)


def ask(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def hold(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    ask(process)
    return process.stdout.readline().strip()


def failures(stack: LocalStack) -> list[str]:
    """What agents said of steps that failed."""
    driver = SyncDriver(stack.url)
    try:
        entries: Any = driver.client.xrange(Keys().group("trainers").events)
    finally:
        driver.close()
    return [text(fields[b"error"]) for _, fields in entries if fields[b"type"] == b"StepFailed"]


def test_two_such_jobs_take_turns(stack: LocalStack) -> None:
    """Each is moved when the other's turn comes, and finds its state whole; the device's size is no limit to it."""
    with start("a") as first, start("b") as second:
        found = [hold(first), hold(second), hold(first), hold(second)]
        first.kill()
        second.kill()
    # Their state was there before the first hold, so the agent counts them as resident and clears the device first.
    assert found[2:] == ["restored True", "restored True"]
    assert {each.split()[-1] for each in found} == {"True"}


@pytest.mark.slow
def test_one_that_frees_nothing_is_not_believed(stack: LocalStack) -> None:
    """Its own measure says that its memory is still taken: the suspend has failed, and the next job waits."""
    with start("a", "keeps") as keeper, start("b", "keeps") as waiter:
        assert hold(keeper).endswith("True")
        ask(waiter)
        wait_until(lambda: failures(stack) != [], "a suspend failed")
        assert f"only 0 of its {SIZE} bytes were measured free" in failures(stack)[0]
        keeper.kill()
        waiter.kill()


def test_what_holders_do_not_explain_may_be_the_jobs() -> None:
    """No device and an empty one have nothing of it; nor has one all of whose memory others are known to have."""

    def device(free: int, *holders: tuple[int, int]) -> DeviceMemory:
        return DeviceMemory(device="d0", total_bytes=100, free_bytes=free, holders=holders)

    assert not unexplained([], {7})
    assert not unexplained([device(100)], {7})
    assert not unexplained([device(40, (8, 60))], {7})
    assert unexplained([device(40, (8, 50))], {7})
    assert unexplained([device(40, (7, 10), (8, 50))], {7})
    assert unexplained([device(40)], {7})
