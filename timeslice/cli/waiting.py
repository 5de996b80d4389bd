"""What a person who waits for groups at a shell is told meanwhile."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from timeslice.cli.output import note
from timeslice.cli.report import why_it_waits
from timeslice.cli.session import Session
from timeslice.errors import TimeSliceError
from timeslice.locks.view import GroupView

_FIRST_S = 3.0  # a wait that is shorter needs no word
_NEXT_S = 60.0
_END_S = 1.0  # a question to a server that hangs keeps nobody


@contextmanager
def told_why(session: Session, job: str, groups: Sequence[str]) -> Iterator[None]:
    """Say on stderr why this process still waits for ``groups`` in the name of ``job``, now and then, until the end."""
    over = threading.Event()
    teller = threading.Thread(target=_tell, args=(session, job, groups, over), daemon=True, name="timeslice-waiting")
    teller.start()
    try:
        yield
    finally:
        over.set()
        teller.join(_END_S)


def _tell(session: Session, job: str, groups: Sequence[str], over: threading.Event) -> None:
    pause = _FIRST_S
    while not over.wait(pause):
        pause = _NEXT_S
        try:
            views = [session.driver.view(session.keys.group(group)) for group in groups]
        except TimeSliceError:
            continue  # the wait itself meets this, too, and ends by it or goes on
        for view in views:
            for line in _reasons(view, job):
                note(line)


def _reasons(view: GroupView, job: str) -> Iterator[str]:
    for position, waiter in enumerate(view.queue):
        if (waiter.job, waiter.pid) == (job, os.getpid()):
            why = why_it_waits(view, position, waiter)
            yield f"job {job} waits for {view.name}: {why}. More: timeslice queue {view.name}"
