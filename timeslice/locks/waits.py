"""Why a wait goes on, in one sentence: for people at a shell and for the log of a job."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from timeslice.errors import duration
from timeslice.locks.view import GroupView, WaiterView
from timeslice.models import Plan


def notice(view: GroupView, waiter: str) -> str | None:
    """What to say of this waiter, or of its gang; None if it does not wait now."""
    for position, found in enumerate(view.queue):
        if found.waiter == waiter:
            return _notice(view, found, why_it_waits(view, position, found))
    return next((_notice(view, gang, gang.forms) for gang in view.forming if gang.waiter == waiter), None)


def _notice(view: GroupView, waiter: WaiterView, why: str) -> str:
    return f"job {waiter.job} waits for {view.name}: {why}. More: timeslice queue {view.name}"


def why_it_waits(view: GroupView, position: int, waiter: WaiterView) -> str:
    """One sentence that answers it. The most particular reason wins."""
    if not waiter.alive:
        return "gave no sign of life; the next check of the queue removes it"
    if waiter.deferred == "silent":
        return "did not answer when its turn came; keeps its place and is asked again"
    if waiter.deferred:
        return f"deferred: {waiter.deferred}"
    if view.holder:
        phase = view.state.get("label")
        what = f" ({phase})" if phase else ""
        return f"job {view.holder} holds it for {duration(elapsed(view, 'granted_at_ms'))} now{what}{_behind(position)}"
    if paused := view.state.get("paused"):
        return f"the group is {paused}; to go on: timeslice resume {view.name}"
    if drains := view.state.get("drains"):
        return f"the group is drained: {drains}; to go on: timeslice node undrain NODE"
    if view.phase == "blocked":
        return f"blocked: {view.reason}"
    if view.swap:
        if view.state.get("swap_waiter") == waiter.waiter:
            return f"its turn; {moving(view)}"
        return f"{moving(view)}{_behind(position)}"
    return f"is about to be granted{_behind(position)}"


def _behind(position: int) -> str:
    return f"; {position} before it" if position else ""


def elapsed(view: GroupView, since: str) -> float:
    """Seconds since a time of the server's clock."""
    at = view.number(since)
    return max(view.now_ms - at, 0) / 1000 if at else 0.0


def plan_of(view: GroupView) -> Plan | None:
    """What the current swap will do; None before its coordinator decided, or if the plan can't be read."""
    try:
        return Plan.model_validate_json(view.state.get("plan") or "")
    except ValidationError:
        return None


def swap(view: GroupView) -> dict[str, Any] | None:
    """What is being moved, or None."""
    if not view.swap:
        return None
    plan = plan_of(view)
    return {
        "swap": view.swap,
        "job": view.state.get("swap_job", ""),
        "waiter": view.state.get("swap_waiter", ""),
        "step": view.state.get("swap_step", ""),
        "since_s": elapsed(view, "swap_since_ms"),
        "left_s": (view.number("swap_deadline_ms") - view.now_ms) / 1000,
        "out": list(plan.out) if plan else [],
        "into": plan.into if plan else None,
        "nodes": [
            {
                "node": node.node,
                "step": node.step if node.swap == view.swap else "",
                "kind": node.kind if node.swap == view.swap else "",
                "error": node.error if node.swap == view.swap else "",
            }
            for node in view.nodes.values()
        ],
    }


def moving(view: GroupView) -> str:
    """The swap in one sentence, or ''."""
    found = swap(view)
    if found is None:
        return ""
    parts = [f"out: {', '.join(found['out'])}"] if found["out"] else []
    if found["into"]:
        parts.append(f"in: {found['into']}")
    steps = [f"{each['node']} {each['step']}" for each in found["nodes"] if each["step"]]
    step = "not planned yet" if found["step"] == "new" else found["step"]
    return "; ".join([f"swap for {found['job'] or 'nobody'}, {step}, {duration(found['since_s'])}", *parts, *steps])
