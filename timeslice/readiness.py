"""Whether a job may be sent work: the answer for a router, a probe or a health monitor, from pictures of groups.

Ready is a job that holds the group and whose state is on all of its devices. All else says what a monitor should make
of it: `suspended` lives and comes back by itself, `absent` does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from timeslice.locks.view import GroupView

State = Literal["ready", "suspended", "restoring", "waiting", "idle", "faulted", "absent", "unknown"]

# What a job is in several groups: the first of these that it is in one of them.
_WORST_FIRST: tuple[State, ...] = ("faulted", "unknown", "restoring", "suspended", "waiting", "idle", "ready")

_NOTHING = "holds nothing, waits for nothing and has no state there"


@dataclass(frozen=True)
class GroupReadiness:
    """A job in one group. ``residency`` is empty where no agent moves state: there the hold is all."""

    group: str
    state: State
    phase: str = ""
    residency: str = ""
    reason: str = ""  # why it is not ready

    def document(self) -> dict[str, Any]:
        return {
            "group": self.group,
            "ready": self.state == "ready",
            "state": self.state,
            "phase": self.phase,
            "residency": self.residency,
            "reason": self.reason,
        }


@dataclass(frozen=True)
class Readiness:
    """A job in all groups that were asked about. ``unread``: groups that could not be read, and may know it too."""

    job: str
    state: State
    reason: str
    groups: tuple[GroupReadiness, ...] = ()
    unread: tuple[str, ...] = ()

    @property
    def ready(self) -> bool:
        return self.state == "ready"

    def document(self) -> dict[str, Any]:
        """The JSON document, but for its schema number."""
        return {
            "job": self.job,
            "ready": self.ready,
            "state": self.state,
            "reason": self.reason,
            "groups": [each.document() for each in self.groups],
            "unread": list(self.unread),
        }


def in_group(view: GroupView, job: str) -> GroupReadiness:
    """A job in one group, which may not know it."""
    stored = view.jobs.get(job)
    residency = (stored.residency if stored else "absent") if view.mode == "served" else ""
    state, reason = _judge(view, job, residency)
    return GroupReadiness(view.name, state, _phase(view, job), residency, reason)


def in_one(job: str, found: GroupReadiness) -> Readiness:
    """A job in the group that was asked about."""
    return Readiness(job, found.state, found.reason, (found,))


def in_groups(job: str, groups: Sequence[GroupReadiness], unread: Sequence[str] = ()) -> Readiness:
    """A job in all groups that know it: ready if it is in every one of them."""
    known = tuple(each for each in groups if each.state != "absent")
    if known:
        worst = min(known, key=lambda each: _WORST_FIRST.index(each.state))
        reason = f"{worst.group}: {worst.reason}" if worst.reason else ""
        return Readiness(job, worst.state, reason, known, tuple(unread))
    if unread:
        return Readiness(job, "unknown", f"may not or can't read {', '.join(unread)}", (), tuple(unread))
    return Readiness(job, "absent", f"no group knows job {job}: it {_NOTHING}")


def _judge(view: GroupView, job: str, residency: str) -> tuple[State, str]:
    held = view.holder == job
    waits = any(waiter.job == job and waiter.alive for waiter in view.queue)
    if residency == "faulted":
        return "faulted", "where its device state is can't be told; see: timeslice doctor"
    if held and view.state.get("confirmed") == "1" and not view.swap and residency in {"resident", ""}:
        if job in view.jobs and view.jobs[job].needs_weights:
            return "restoring", "its weights were discarded while it slept, and have not been synced since"
        return "ready", ""
    # Who holds or waits gives signs of life itself. For all others their nodes' agents speak.
    if not (held or waits) and (silent := _silent(view, job)):
        return "unknown", silent
    if residency == "restoring" or (view.swap and view.state.get("swap_job") == job):
        return "restoring", f"its state is being brought in{_step(view)}"
    if residency in {"suspending", "suspended"}:
        return "suspended", _obstacle(view, job, waits=waits)
    if held or waits:
        return "waiting", _obstacle(view, job, waits=waits)
    if residency == "resident" or _nodes(view, job):
        return "idle", _obstacle(view, job, waits=waits)
    return "absent", _NOTHING


def _obstacle(view: GroupView, job: str, *, waits: bool) -> str:
    if view.swap:
        return f"state is being moved for {view.state.get('swap_job') or 'nobody'}{_step(view)}"
    if view.holder == job:
        return "was granted it a moment ago and has not begun"
    if view.holder:
        label = view.state.get("label")
        return f"job {view.holder} holds it{f' ({label})' if label else ''}"
    if view.phase in {"blocked", "paused"}:
        return f"{view.phase}: {view.reason}"
    return "is about to be granted it" if waits else "does not ask for it"


def _step(view: GroupView) -> str:
    step = view.state.get("swap_step", "")
    return f" ({step})" if view.swap and step else ""


def _phase(view: GroupView, job: str) -> str:
    """What it does in its hold; else what it says it does off the devices; else what it waits for."""
    if view.holder == job:
        return view.state.get("label", "")
    if job in view.jobs and (told := view.jobs[job].phase):
        return told
    return next((waiter.label for waiter in view.queue if waiter.job == job and waiter.alive), "")


def _nodes(view: GroupView, job: str) -> set[str]:
    """Where it has state or processes, by what agents and clients have told."""
    registered = (target.split("/") for target in view.targets)
    return {member.node for member in view.members if member.job == job} | {
        parts[1] for parts in registered if len(parts) == 3 and parts[0] == job
    }


def _silent(view: GroupView, job: str) -> str:
    """Which of its nodes nobody has heard of for too long, or ''."""
    away = [node for node in view.nodes.values() if not node.alive and node.node in _nodes(view, job)]
    told = ", ".join(f"node {node.node} has been unreachable for {node.heartbeat_age_s:.0f} s" for node in away)
    return f"{told}; what it has of the job may be gone" if told else ""
