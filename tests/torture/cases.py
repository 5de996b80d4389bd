"""Collects hand-written histories: those that are right, and those that break some."""

from __future__ import annotations

from collections.abc import Callable

from tests.torture.tale import Tale
from timeslice.torture.checker import Report, Terms, check

TERMS = Terms(lease_s=3.0, waiter_ttl_s=15.0, recovery_s=10.0, slack_s=0.5)

Write = Callable[[], Tale]


class Cases:
    """The histories of one file, each by the function that writes it, with the rules that it breaks."""

    def __init__(self) -> None:
        self.all: list[tuple[Write, set[str]]] = []

    def good(self, write: Write) -> Write:
        self.all.append((write, set()))
        return write

    def breaks(self, *rules: str) -> Callable[[Write], Write]:
        def note(write: Write) -> Write:
            self.all.append((write, set(rules)))
            return write

        return note


def name(value: Write | set[str]) -> str:
    """Of a case, in the test's id."""
    if isinstance(value, set):
        return "-".join(sorted(value)) or "right"
    return value.__name__


def judge(tale: Tale) -> Report:
    return check(tale.lines, TERMS)
