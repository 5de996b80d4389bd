"""Makes this process one that can't start threads for a while, as under a container's limit of processes.

Patched from outside, like mutants and kill points. For root the kernel has no such limit of one process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

from timeslice.torture.backend import met_file

_STARTERS = ("_start_new_thread", "_start_joinable_thread")  # as Python has called it


def threads_file(knobs: Path, name: str) -> Path:
    """While it is there, a process of that name in the form ``threads`` starts none."""
    return knobs / f"{name}.threads"


def refuse_threads(file: Path) -> None:
    """From now on, while that file is there."""
    for name in _STARTERS:
        if start := vars(threading).get(name):
            vars(threading)[name] = _refusing(start, file)


def _refusing(start: Callable[..., Any], file: Path) -> Callable[..., Any]:
    @wraps(start)
    def refused(*args: Any, **options: Any) -> Any:
        if file.exists():
            met_file(file).touch()
            raise RuntimeError("can't start new thread")
        return start(*args, **options)

    return refused
