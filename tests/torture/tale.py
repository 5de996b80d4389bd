"""Writes histories by hand: each call is a line, a tenth of a second after the one before."""

from __future__ import annotations

from typing import Any, Literal

from timeslice.torture.checks.story import SECOND
from timeslice.torture.history import (
    Asked,
    Born,
    Calm,
    Checked,
    Cramped,
    Died,
    Ended,
    Entered,
    Fault,
    GaveUp,
    Healed,
    Left,
    Line,
    Lost,
    Moved,
    OnDevice,
    Silent,
    Surveyed,
    Told,
    Took,
)

G = "g"
N = "n1"


class Tale:
    """Jobs are named by letters; the process of job ``a`` is ``a.1``, unless ``who`` says otherwise."""

    def __init__(self, *, lock_only: bool = False) -> None:
        self.lines: list[Line] = []
        self.now = 100 * SECOND
        self.lock_only = lock_only
        self.token = 1000
        self._requests: dict[str, int] = {}
        self._begun: dict[str, int] = {}  # who -> the last request that was entered
        self._entries = 0
        self._faults = 0
        self._held: dict[str, int] = {}
        for job in "abc":
            self.born(f"{job}.1", "job", job=job, node=N)
        self.born("agent.1", "agent", node=N)

    def add(self, line: Line) -> None:
        self.lines.append(line)

    def wait(self, seconds: float) -> None:
        self.now += int(seconds * SECOND)

    def _stamp(self, who: str) -> dict[str, Any]:
        self.now += SECOND // 10
        return {"at": self.now, "who": who}

    def _of(self, who: str) -> dict[str, Any]:
        job = who[0]
        return {**self._stamp(who), "job": job, "group": G, "request": f"{who}/{self._requests.get(who, 0)}"}

    def born(self, label: str, role: Literal["job", "agent", "coordinator", "server"], **more: Any) -> None:
        self.add(Born(**self._stamp("run"), label=label, role=role, **more))

    def died(self, label: str, code: int, *, meant: bool = False, seen_s: float = 0.0) -> None:
        """``seen_s``: how long before it was seen to run; 0 if that is not known."""
        said = self._stamp("run")
        ran = said["at"] - int(seen_s * SECOND) if seen_s else 0
        self.add(Died(**said, label=label, code=code, meant=meant, ran=ran))

    def asks(self, who: str, *, ranks: int = 1) -> None:
        self._requests[who] = self._requests.get(who, 0) + 1
        self.add(Asked(**self._of(who), node=N, lock_only=self.lock_only, ranks=ranks))

    def enters(self, who: str, token: int | None = None, how: str = "") -> None:
        """Asked for just before, if it was not; its grant was told."""
        if self._requests.get(who, 0) == self._begun.get(who, 0):
            self.asks(who)
        self._begun[who] = self._requests[who]
        self.token = self.token + 1 if token is None else token
        self._held[who] = self.token
        self.add(Entered(**self._of(who), token=self.token, how=how))

    def starts_over(self) -> None:
        """What is told from here on is another server's stream."""
        self._entries = 0

    def granted(self, waiter: str, token: int | None = None, **more: str) -> None:
        self.token = self.token + 1 if token is None else token
        self.told("LeaseGranted", waiter, token=str(self.token), **more)

    def yields(self, waiter: str) -> None:
        """What was granted last."""
        self.told("LeaseYielded", waiter, token=str(self.token))

    def leaves(self, who: str) -> None:
        self.add(Left(**self._of(who), token=self._held[who]))

    def loses(self, who: str) -> None:
        self.add(Lost(**self._of(who), token=self._held[who]))

    def gives_up(self, who: str) -> None:
        self.add(GaveUp(**self._of(who), error="AcquireTimeoutError"))

    def checks(self, who: str, expected: str, found: str) -> None:
        self.add(Checked(**self._of(who), expected=expected, found=found))

    def moves(self, job: str, *steps: str, node: str = N) -> None:
        """Each ``step stage``; a step alone is its begin and its end."""
        for step in steps:
            name, _, stage = step.partition(" ")
            for each in [stage] if stage else ["begin", "done"]:
                self.add(Moved(**self._stamp("agent.1"), node=node, group=G, job=job, step=name, stage=each))  # type: ignore[arg-type]

    def measured(self, *jobs: str) -> None:
        self.add(OnDevice(**self._stamp("agent.1"), node=N, group=G, jobs=jobs))

    def surveyed(
        self,
        by: str = "",
        *,
        own: int = 0,
        node: str = N,
        lasts_s: float = 0.02,
        found: dict[str, int] | None = None,
        **more: int,
    ) -> None:
        """By the body that ``by`` has begun last, or by the run; it took ``lasts_s``."""
        said = self._stamp(by or "survey")
        request = f"{by}/{self._requests[by]}" if by else ""
        since = said["at"] - int(lasts_s * SECOND)
        self.add(
            Surveyed(**said, node=node, group=G, since=since, found={**(found or {}), **more}, request=request, own=own)
        )

    def cramped(self, who: str) -> None:
        self.add(Cramped(**self._of(who), error="DeviceFullError"))

    def silent(self, seconds: float) -> None:
        """The node was, until now."""
        said = self._stamp("heartbeats")
        self.add(Silent(**said, node=N, group=G, since=said["at"] - int(seconds * SECOND)))

    def fault(self, harm: str, label: str = "", *, kills: tuple[str, ...] = ()) -> int:
        self._faults += 1
        self.add(Fault(**self._stamp("run"), id=self._faults, harm=harm, label=label, kills=kills))
        self.add(Took(**self._stamp("run"), id=self._faults))
        return self._faults

    def heals(self, fault: int) -> None:
        self.add(Healed(**self._stamp("run"), id=fault))

    def told(self, kind: str, waiter: str = "", **fields: str) -> None:
        """The waiter's job is its first letter."""
        self._entries += 1
        said = {"waiter": waiter, "job": waiter[:1], **fields}
        self.add(Told(**self._stamp("events"), group=G, entry=f"{10**6}-{self._entries}", type=kind, fields=said))

    def calm(self, seconds: float) -> None:
        self.add(Calm(**self._stamp("run"), seconds=seconds))

    def ends(self) -> None:
        self.add(Ended(**self._stamp("run")))
