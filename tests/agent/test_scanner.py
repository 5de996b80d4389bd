"""The look at all processes of a machine, when one of them can't be looked into."""

from __future__ import annotations

import os
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
    """As a process whose memory can't be read, for its lock is held: whoever looks into it waits."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pid, self.looks, self._ends = 0, 0, threading.Event()

        def wait_for_it(pid: int, *rest: Any) -> Any:
            if pid == self.pid:
                self.looks += 1
                assert self._ends.wait(60)
            return examine(pid, *rest)

        monkeypatch.setattr(environment, "examine", wait_for_it)
        monkeypatch.setattr(environment, "BUDGET_S", 0.2)
        monkeypatch.setattr(environment, "FIRST_BUDGET_S", 0.2)
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
    stuck.pid = os.getppid()
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
    async with agent_on(rig, clean_environment, "g"):
        first = starts(JOB="a", GROUPS="g")
        first.do("load")
        await found(rig, first.pid)
        late = starts(JOB="c", GROUPS="g")
        stuck.pid = late.pid
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
