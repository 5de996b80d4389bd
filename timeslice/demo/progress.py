"""Live progress: a moving picture on a terminal, plain lines elsewhere. All of it goes to standard error."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

_PLAIN_EVERY_S = 5.0
_STUCK_S = 3.0  # a wait this long deserves a reason
_BARS = "▁▂▃▄▅▆▇█"


class Watch:
    """Follows a job's log."""

    def __init__(self, job: str, path: Path, steps: int) -> None:
        self.job = job
        self.steps = steps
        self.rewards: list[float] = []
        self.where = "starting"
        self.group = ""
        self.since = time.monotonic()
        self._path = path
        self._read = 0

    def look(self) -> None:
        """Take in what was written since the last look."""
        with self._path.open("rb") as file:
            file.seek(self._read)
            text = file.read()
        whole = text.rfind(b"\n") + 1
        self._read += whole
        for line in text[:whole].splitlines():
            self._take(json.loads(line))

    def _take(self, entry: dict[str, Any]) -> None:
        kind = entry["kind"]
        if kind == "asks":
            self._now(f"waits for the {entry['group']}", entry)
        elif kind == "enters":
            self._now(f"inside the {entry['group']} ({entry['phase']})", entry)
        elif kind == "body" and entry["phase"] == "generate":
            self._now("verification", entry)
        elif kind == "starves":
            self._now("verification of a batch", entry)
        elif kind == "reward":
            self.rewards.append(entry["reward"])
        elif kind in {"begins", "ends"}:
            self._now("done" if kind == "ends" else "starting", entry)

    def _now(self, where: str, entry: dict[str, Any]) -> None:
        self.where, self.group, self.since = where, entry.get("group", ""), entry["at"]

    @property
    def stuck_for_s(self) -> float:
        """How long it has waited for a group; 0 if it does not wait."""
        return time.monotonic() - self.since if self.where.startswith("waits") else 0.0

    def line(self) -> str:
        shown = "".join(_BARS[min(int(reward * len(_BARS)), len(_BARS) - 1)] for reward in self.rewards[-24:])
        reward = f"reward {self.rewards[-1]:.2f} {shown}" if self.rewards else "reward -"
        return f"job {self.job}: step {len(self.rewards)}/{self.steps}, {reward}, {self.where}"


class Progress:
    """Where the demo says what it does."""

    def __init__(self, why: Callable[[str], str]) -> None:
        self._why = why  # why a group does not grant, from its status
        self._console = Console(stderr=True, highlight=False)
        self._live = Live(console=self._console, refresh_per_second=5, transient=True)
        self._spoke = 0.0

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

    def show(self, title: str, watches: Sequence[Watch]) -> None:
        """The state of a run. Called a few times a second."""
        lines = []
        for watch in watches:
            watch.look()
            line = watch.line()
            if watch.stuck_for_s > _STUCK_S:
                line += f" for {watch.stuck_for_s:.0f} s: {self._why(watch.group)}"
            lines.append(line)
        if self._console.is_terminal:
            self._live.update(Group(Text(title, "bold"), *(Text(f"  {line}") for line in lines)))
        elif time.monotonic() - self._spoke > _PLAIN_EVERY_S:
            self._spoke = time.monotonic()
            self.say(f"{title}: " + "; ".join(lines))
