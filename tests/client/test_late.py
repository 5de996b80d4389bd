"""Holds of a thread that outlives the main thread, with nothing of timeslice used before."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

from tests.client.world import ROOT, World

PROGRAM = """
    import threading
    {early}

    def late():
        threading.main_thread().join()
        {late}

    threading.Thread(target=late).start()
"""
HOLD = 'import timeslice\n    with timeslice.hold("g", job="a", lock_only=True, timeout=60): print("inside")'
ASYNC = """import asyncio
    async def work():
        async with timeslice.hold("g", job="a", lock_only=True, timeout=60): print("inside")
    asyncio.run(work())"""
WORKLOAD = 'timeslice.register_workload("g", on_suspend=print, on_restore=print, job="a").close(); print("inside")'


def run(late: str, *, early: str = "import timeslice") -> tuple[str, str]:
    """What it prints and the last line of what it complains of."""
    program = textwrap.dedent(PROGRAM).format(early=early, late=textwrap.dedent(late))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=ROOT)
    return done.stdout, (done.stderr.splitlines() or [""])[-1]


@pytest.mark.parametrize("late", [HOLD, ASYNC, WORKLOAD], ids=["hold", "async", "workload"])
def test_the_first_hold_may_come_from_a_thread_that_outlives_the_main_one(world: World, late: str) -> None:
    """Python loads some modules no more by then: they are there already."""
    if late == WORKLOAD:
        world.serve("g", node=os.environ["TIMESLICE_NODE"])
    assert run(late) == ("inside\n", "")
    assert world.holder() == ""


def test_a_late_event_loop_that_can_not_look_up_names_says_so(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python forbids it the threads that it looks names up on; the error says what to do."""
    monkeypatch.setenv("TIMESLICE_URL", "redis://localhost:1")
    out, complaint = run(ASYNC)
    assert out == ""
    assert complaint.startswith("timeslice.errors.UsageError: the main thread has ended, and Python then lets no event")


def test_what_is_first_imported_too_late_says_where_to_import_it(world: World) -> None:
    """One error of ours instead of one from the middle of another package."""
    _, complaint = run(HOLD, early="")
    assert complaint.startswith("ImportError: timeslice can't be loaded any more: the main thread has ended.")
