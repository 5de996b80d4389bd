"""The look at all processes of a machine, when one of them can't be looked into."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.agent.rig import Rig, until
from tests.agent.workers import Starts, agent_on, found, starts, watched
from timeslice.agent.discovery import environment
from timeslice.agent.discovery.environment import Scanner
from timeslice.agent.proof import examine

__all__ = ["starts"]


class Stuck:
    """As a process whose memory can't be read, for its lock is held: whoever looks into it waits. It is the one with
    this number, or that shows this job, so that nobody looks into it before it is known to be stuck."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pid, self.job, self.looks, self._ends = 0, "", 0, threading.Event()

        def wait_for_it(pid: int, *rest: Any) -> Any:
            found = examine(pid, *rest)
            if pid == self.pid or (found.shown and self.job in found.shown.jobs):
                self.looks += 1
                assert self._ends.wait(60)
            return found

        monkeypatch.setattr(environment, "examine", wait_for_it)
        monkeypatch.setattr(environment, "BUDGET_S", 0.2)
        monkeypatch.setattr(environment, "FIRST_BUDGET_S", 2.0)  # enough to come to it on a machine that is busy
        monkeypatch.setattr(environment, "GRACE_S", 0.2)

    def end(self) -> None:
        self._ends.set()


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stuck]:
    made = Stuck(monkeypatch)
    yield made
    made.end()


async def test_a_look_that_hangs_ends_for_who_waits_and_names_the_process(stuck: Stuck) -> None:
    """No second look begins beside it, and when it has ended everybody is known."""
    stuck.pid = os.getpid()
    scanner = Scanner()
    for _ in range(3):
        with pytest.raises(TimeoutError, match=f"looking into process {stuck.pid} has taken"):
            await scanner.look(fresh_s=0)
    assert stuck.looks == 1
    stuck.end()

    async def knows() -> bool:
        try:
            return os.getpid() in (await scanner.look(fresh_s=0)).lines
        except TimeoutError:  # the thread has not gone on yet
            return False

    assert await until(knows, "it has looked")


async def test_the_agent_goes_on_while_a_look_hangs(
    rig: Rig, starts: Starts, stuck: Stuck, clean_environment: Path
) -> None:
    """Its heartbeats and orders do not wait for it, a rival gets in, and what it could not look into it takes later."""
    async with agent_on(rig, clean_environment, "g", ttl_s=4.5):  # each look takes a while of it
        first = starts(JOB="a", GROUPS="g")
        first.do("load")
        await found(rig, first.pid)
        stuck.job = "c"
        late = starts(JOB="c", GROUPS="g")
        late.do("load")
        await until(lambda: stuck.looks, "it hangs")
        await rig.acquire("b")
        swap = await rig.plan("a", into="b")
        assert (await rig.order(rig.command(swap, "prepare", "a", into="b")))["step"] == "prepared"
        await rig.step("prepare", "commit")
        assert (await rig.order(rig.command(swap, "commit", "a", into="b")))["step"] == "done"
        assert (await rig.view()).nodes[rig.node].alive
        assert late.pid not in watched(rig)
        stuck.end()
        await found(rig, late.pid, job="c")
        assert stuck.looks == 1


def test_processes_that_ended_are_forgotten() -> None:
    """F05: what is known of the machine's processes is known of those that live, however many there were."""
    scanner = Scanner()
    processes = [subprocess.Popen(["/bin/sleep", "600"]) for _ in range(3)]
    pids = {process.pid for process in processes}
    known = scanner._scan()
    assert pids <= known.lines.keys()
    for process in processes:
        process.kill()
        process.wait()
    later = scanner._scan()
    for kept in (later.lines, dict(later.looked), dict(scanner._known)):
        assert pids.isdisjoint(each if isinstance(each, int) else each[0] for each in kept)
