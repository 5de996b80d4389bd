"""What is told once a process, however often it comes up."""

from __future__ import annotations

import logging
import os
import threading

log = logging.getLogger("timeslice")

_said: set[str] = set()
_saying = threading.Lock()


def _start_clean() -> None:
    global _saying  # noqa: PLW0603 - a forked child can't trust the lock it inherited
    _saying = threading.Lock()


os.register_at_fork(after_in_child=_start_clean)


def say_once(message: str) -> None:
    """A warning."""
    if is_first(message):
        log.warning(message)


def is_first(what: str) -> bool:
    """Whether this is asked of ``what`` for the first time."""
    with _saying:
        if what in _said:
            return False
        _said.add(what)
        return True
