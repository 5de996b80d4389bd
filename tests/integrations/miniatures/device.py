"""Devices that two jobs can't use at once: whoever tries fails."""

from __future__ import annotations

import fcntl
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

TRAINERS, SAMPLERS = "trainers", "samplers"


def say(*words: object) -> None:
    print(*words, flush=True)


def hear() -> str:
    return sys.stdin.readline()


@contextmanager
def use(*pools: str) -> Iterator[None]:
    """Compute on the devices of some pools. BlockingIOError when another process does."""
    with ExitStack() as files:
        for pool in pools:
            file = files.enter_context((Path(os.environ["TEST_DEVICES"]) / pool).open("a"))
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
