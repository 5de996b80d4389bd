"""Whether a job may be sent work: the answer for a router, a probe or a health monitor, from pictures of groups.

Ready is a job that holds the group and whose state is on all of its devices. All else says what a monitor should make
of it: `suspended` lives and comes back by itself, `absent` does not.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from timeslice.locks.view import GroupView, WaiterView, name_ranks

State = Literal["ready", "suspended", "restoring", "waiting", "idle", "faulted", "absent", "unknown"]

# What a job is in several groups: the first of these that it is in one of them.
_WORST_FIRST: tuple[State, ...] = ("faulted", "unknown", "restoring", "suspended", "waiting", "idle", "ready")

_NO_GROUP = "there is no such group: the name is misspelt, or nobody has served or held it yet"
_NOTHING = "holds nothing, waits for nothing and has no state there"

LOOKS = 3  # at leases that are others each time, before a job is told not to keep them


@dataclass(frozen=True)
class GroupReadiness:
    """A job in one group. ``residency`` is empty where no agent moves state: there the hold is all."""

    group: str
    state: State
    phase: str = ""
    residency: str = ""
    reason: str = ""  # why it is not ready
    lease: str = ""  # which one it holds; what it is outlives no lease

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
    lease = f"{view.state.get('lease_id')} {view.number('token')}" if view.holder == job else ""
    return GroupReadiness(view.name, state, _phase(view, job), residency, reason, lease)


def in_one(job: str, group: str, view: GroupView | None) -> Readiness:
    """A job in the group that was asked about. One that is not there tells nothing of who lives."""
    found = in_group(view, job) if view and view.exists else GroupReadiness(group, "unknown", reason=_NO_GROUP)
    return Readiness(job, found.state, found.reason, (found,))


def in_all(job: str, names: Sequence[str]) -> Generator[str, GroupView | None, Readiness]:
    """A job in all groups. Each yield asks for a fresh picture of a group: None if it can't be read.

    They are read one after the other, and who takes them by turns would seem to hold all. So it is ready only if all
    are read again and show the same leases: then it held each of them at the moment between.
    """
    found, unread = yield from _read(job, names)
    for _ in range(LOOKS):
        before = {each.group: each.lease for each in found}
        told = in_groups(job, found, unread)
        if not told.ready or len(names) == 1:
            return told
        found, unread = yield from _read(job, names)
        changed = [each.group for each in found if each.lease != before.get(each.group)]
        if not changed:
            return in_groups(job, found, unread)
    return in_groups(job, [_passing(each) if each.group in changed else each for each in found], unread)


def _read(job: str, names: Sequence[str]) -> Generator[str, GroupView | None, tuple[list[GroupReadiness], list[str]]]:
    found, unread = [], []
    for name in names:
        view = yield name
        if view is None:
            unread.append(name)
        else:
            found.append(in_group(view, job))
    return found, unread


def _passing(found: GroupReadiness) -> GroupReadiness:
    if found.state != "ready":
        return found
    return replace(found, state="waiting", reason="came and went while its other groups were looked at")


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
    waits = _request(view, job)
    if residency == "faulted":
        return "faulted", "where its device state is can't be told; see: timeslice doctor"
    if residency == "unknown" and not held:
        return "unknown", "nobody can see whether it is on the devices; see: timeslice doctor"
    if held and view.state.get("confirmed") == "1" and not view.swap and residency in {"resident", "unknown", ""}:
        if broken := _gang_is_not_whole(view):
            return "waiting", broken
        if job in view.jobs and view.jobs[job].needs_weights:
            return "restoring", "its weights were discarded while it slept, and have not been synced since"
        return "ready", ""
    # Who holds or waits gives signs of life itself. For all others their nodes' agents speak.
    if not (held or waits) and (silent := _silent(view, job)):
        return "unknown", silent
    if residency == "restoring" or (view.swap and view.state.get("swap_job") == job):
        return "restoring", f"its state is being brought in{_step(view)}"
    if residency in {"suspending", "suspended"}:
        return "suspended", _obstacle(view, job, waits)
    if held or waits:
        return "waiting", _obstacle(view, job, waits)
    if residency == "resident" or _nodes(view, job):
        return "idle", _obstacle(view, job, waits)
    return "absent", _NOTHING


def _gang_is_not_whole(view: GroupView) -> str:
    """Why the gang that holds is not at work with all of its ranks, or ''."""
    if view.state.get("ending"):
        return "gang: one of its ranks has died or given up, which ends the hold of all"
    # Of a rank without a host the server has lost who it is, and not that it was inside.
    late = [party.rank for party in view.parties if party.state == "arrived" and party.host != "-"]
    have = "has" if len(late) == 1 else "have"
    return f"gang: it was granted, and {name_ranks(late)} {have} not begun" if late else ""


def _request(view: GroupView, job: str) -> WaiterView | None:
    """What it waits with; a gang that forms only if nothing of the job is further."""
    return next((each for each in (*view.queue, *view.forming) if each.job == job and each.alive), None)


def _obstacle(view: GroupView, job: str, waits: WaiterView | None) -> str:
    if waits in view.forming and view.holder != job:
        return waits.forms
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
    waits = _request(view, job)
    return waits.label if waits else ""


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
