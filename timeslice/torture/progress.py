"""Live progress on standard error: one line that changes on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

from timeslice.torture.run import Progress

_PLAIN_EVERY_S = 10.0


class Screen:
    """Where a run says what it does."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._live = Live(console=self._console, refresh_per_second=5, transient=True)
        self._spoke = time.monotonic()

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._console.is_terminal:
            self._live.stop()

    def say(self, text: str) -> None:
        """A line that stays."""
        self._console.print(Text(text), soft_wrap=True)

    def show(self, progress: Progress) -> None:
        """The state of the run. Called many times a second."""
        if self._console.is_terminal:
            self._live.update(Text(line(progress)))
        elif time.monotonic() - self._spoke > _PLAIN_EVERY_S:
            self._spoke = time.monotonic()
            self.say(line(progress))


def line(progress: Progress) -> str:
    """One line for people."""
    grants, swaps = progress.events.get("LeaseGranted", 0), progress.events.get("SwapFinished", 0)
    last = f", last {progress.last}" if progress.last else ""
    return (
        f"{progress.phase}: {progress.elapsed_s:.0f} of {progress.seconds:g} s, {progress.faults} faults{last}, "
        f"{grants} grants, {swaps} swaps"
    )
