"""What became of an order to move a job off the device: waiting for it, and the words for it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from timeslice.cli import exits, report
from timeslice.cli.output import note

if TYPE_CHECKING:
    from timeslice.cli.session import Session
    from timeslice.locks.view import GroupView

POLL_S = 0.2
OUT = frozenset({"absent", "gone", "suspended"})


@dataclass(frozen=True)
class Outcome:
    """``out``: no node has the job's state on its device. ``failed``: tried and undone. ``pending``: not yet known."""

    group: str
    job: str
    state: Literal["out", "failed", "pending"]
    reason: str = ""
    nodes: tuple[tuple[str, str], ...] = ()  # node, what it last told of the job

    @property
    def exit_code(self) -> int:
        return {"out": exits.DONE, "failed": exits.FAILED, "pending": exits.TIMED_OUT}[self.state]

    def document(self) -> dict[str, Any]:
        """For ``--json``."""
        nodes = [{"node": node, "residency": state} for node, state in self.nodes]
        return {"group": self.group, "job": self.job, "state": self.state, "reason": self.reason, "nodes": nodes}

    def __str__(self) -> str:
        where = ", ".join(f"{state} on {node}" for node, state in self.nodes) or "nothing of it on any node"
        if self.state == "out":
            return f"job {self.job} is off the device of {self.group}: {where}"
        if self.state == "failed":
            return f"job {self.job} could not be moved off the device of {self.group}: {self.reason}"
        return f"job {self.job} is not off the device of {self.group} yet: {self.reason}"


def judge(view: GroupView, job: str) -> Outcome:
    """What the group says now. An order that is done was proved by every node, whoever was let in since."""
    state = view.state
    pending = state.get("evict") == job or bool(state.get("evict_how"))
    nodes = tuple((member.node, member.state) for member in view.members if member.job == job)
    if view.evict_reason and (pending or (job in view.resident and view.holder != job)):
        return Outcome(view.name, job, "failed", view.evict_reason, nodes)
    if pending:
        return Outcome(view.name, job, "pending", view.reason or _progress(view) or "it is about to be moved", nodes)
    return Outcome(view.name, job, "out", "", nodes)


def wait_for(session: Session, group: str, job: str, seconds: float) -> Outcome:
    """Look until it is decided, at most for ``seconds``, and tell what it waits for."""
    try:
        return _wait_for(session, group, job, seconds)
    except KeyboardInterrupt:
        note(
            f"interrupted: the order stands, and job {job} is moved off the device of {group} without this command; "
            f"see: timeslice status {group}"
        )
        raise


def _wait_for(session: Session, group: str, job: str, seconds: float) -> Outcome:
    until, told = time.monotonic() + seconds, ""
    while True:
        found = judge(session.view(group), job)
        if found.state != "pending" or time.monotonic() >= until:
            return found
        if found.reason != told:
            told = found.reason
            note(f"{group}: {told}")
        time.sleep(POLL_S)


def what_next(view: GroupView, outcome: Outcome) -> str:
    """What an operator can do about it, or ''."""
    if outcome.state == "out":
        return "; ".join(str(each) for each in report.frozen(view) if each.job == outcome.job)
    where = processes(view, outcome.job)
    named = f" ({where})" if where else ""
    if outcome.state == "failed":
        return f"End its processes{named}, or see what its nodes say: timeslice nodes"
    if not report.coordinator(view):
        return "No coordinator is there to carry it out. Start one: timeslice coordinator; then it goes on by itself"
    return (
        f"It goes on by itself; see: timeslice status {outcome.group}. The last resort is to end its processes{named}"
    )


def processes(view: GroupView, job: str) -> str:
    """Where a job's registered processes run, for people, or ''."""
    found = sorted(field.split("/", 1)[1] for field in view.targets if field.startswith(f"{job}/"))
    return ", ".join(at.replace("/", " process ") for at in found)


def _progress(view: GroupView) -> str:
    """The swap without its age, so that it is told once a step."""
    step = view.state.get("swap_step", "")
    return f"moving, {'not planned yet' if step == 'new' else step}" if report.moving(view) else ""
