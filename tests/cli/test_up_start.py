"""`timeslice up` while it comes up: how long it waits, and a stop that comes at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tests.cli.conftest import eventually
from timeslice.agent.discovery.environment import FIRST_BUDGET_S, GRACE_S
from timeslice.up import READY_S, Worker


def test_it_waits_for_the_first_look_at_all_processes() -> None:
    """On a machine with very many of them the agent may look for so long before it serves: that is no failure."""
    assert READY_S > FIRST_BUDGET_S + GRACE_S


def test_a_part_that_is_stopped_before_its_loop_is_there_ends() -> None:
    """Ctrl-C just when the thread was started: nobody has to wait in vain for it to hear of that."""

    async def serve(ready: Callable[[], None], stop: asyncio.Event) -> None:
        ready()
        await stop.wait()

    worker = Worker("part", serve)
    worker.stop()
    worker.start()
    eventually(lambda: not worker.running)
    assert worker.failure is None
