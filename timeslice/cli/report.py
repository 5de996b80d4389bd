"""A group's picture as documents and sentences: the schema of ``--json``, and the answers to "why does it wait?"."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from timeslice.cli.output import seconds
from timeslice.locks import waits
from timeslice.locks.view import GroupView, NodeView, PartyView, WaiterView, name_ranks

# The log of a job says the same.
elapsed, moving, plan_of, swap, why_it_waits = (
    waits.elapsed,
    waits.moving,
    waits.plan_of,
    waits.swap,
    waits.why_it_waits,
)


def holder(view: GroupView) -> dict[str, Any] | None:
    """Who holds the group, or None."""
    if not view.holder:
        return None
    state = view.state
    return {
        "job": view.holder,
        "lease_id": state.get("lease_id", ""),
        "token": view.number("token"),
        "host": state.get("host", ""),
        "pid": view.number("pid"),
        "job_phase": state.get("label", ""),
        "held_s": elapsed(view, "granted_at_ms"),
        "lease_left_s": (view.number("deadline_ms") - view.now_ms) / 1000,
        "confirmed": state.get("confirmed") == "1",
        "how": state.get("how", ""),
        "swap_s": view.number("swap_ms") / 1000,
        "world": view.world or None,
        "ranks": ranks(view.parties),
    }


def ranks(parties: Sequence[PartyView]) -> list[dict[str, Any]]:
    """The ranks of a gang that arrived."""
    return [
        {
            "rank": each.rank,
            "host": each.host,
            "pid": int(each.pid) if each.pid.isdecimal() else None,
            "state": each.state,
        }
        for each in parties
    ]


def inside(view: GroupView) -> str:
    """Who of the gang that holds is inside, or ''."""
    if not view.world:
        return ""
    left = [each.rank for each in view.parties if each.state == "left"]
    late = [each.rank for each in view.parties if each.state == "arrived"]
    told = [f"{name_ranks(found)} {what}" for found, what in ((late, "not confirmed yet"), (left, "left")) if found]
    return "; ".join([f"gang of {view.world}", *told])


def used_s(view: GroupView, job: str) -> float:
    """Time that a job held the group, the hold that it is in included."""
    stored = view.jobs.get(job)
    return (stored.usage_s if stored else 0.0) + (elapsed(view, "granted_at_ms") if view.holder == job else 0.0)


def since_s(view: GroupView) -> float | None:
    """How long the group has been in its phase; None if it never was in another."""
    return view.since_s if view.number("since_ms") else None


def for_long(view: GroupView) -> str:
    """The same for people, to stand behind the phase."""
    since = since_s(view)
    return "" if since is None else f" for {seconds(since)}"


def why(view: GroupView) -> str:
    """Why the group is in this phase; else what will stop it at the next swap. Or ''."""
    if view.reason or view.mode != "served" or view.phase not in {"idle", "held"}:
        return view.reason
    away = [node for node in view.nodes.values() if not node.alive]
    found = ", ".join(f"node {node.node} unreachable for {seconds(node.heartbeat_age_s)}" for node in away)
    return f"{found}; the next swap waits for it" if found else ""


@dataclass(frozen=True)
class Frozen:
    """Processes of a job on a node that the backend ``process`` stopped, and for which nobody asks."""

    job: str
    node: str
    pids: tuple[int, ...]

    def __str__(self) -> str:
        pids = " ".join(map(str, self.pids)) or "PID..."
        return (
            f"job {self.job} is frozen by the backend process on {self.node}, and nothing of it asks for the group: a "
            "process that held it can't learn that it lost it, nor ask again. Once nobody else is on the device let it "
            f"run on, there, with: kill -CONT {pids}; or end it"
        )


def frozen(view: GroupView) -> list[Frozen]:
    """Jobs that stand still until somebody does something. Who waits is brought back by its turn."""
    asking = {waiter.job for waiter in view.queue if waiter.alive} | {view.holder, view.state.get("swap_job", "")}
    return [
        Frozen(member.job, member.node, _pids(view, member.job, member.node))
        for member in view.members
        if member.backend == "process" and member.state == "suspended" and member.job not in asking
    ]


def _pids(view: GroupView, job: str, node: str) -> tuple[int, ...]:
    start = f"{job}/{node}/"
    found = (field.removeprefix(start) for field in view.targets if field.startswith(start))
    return tuple(sorted(int(pid) for pid in found if pid.isdecimal()))


def node_document(view: GroupView, node: NodeView) -> dict[str, Any]:
    """One node of a group."""
    failed = node.step == "failed"
    return {
        "node": node.node,
        "alive": node.alive,
        # The deadline passed this long ago; None while it is still to come.
        "silent_s": None if node.alive else node.heartbeat_age_s,
        "last_swap": node.swap or None,
        "last_step": node.step,
        "fault": node.kind if failed else "",
        "error": node.error if failed else "",
        "jobs": [
            {
                "job": member.job,
                "residency": member.state,
                "host_bytes": member.host_bytes,
                "device_bytes": member.device_bytes,
                "saved_bytes": member.saved_bytes,
                "backend": member.backend,
                "unheld": member.unheld,
                "why": member.why,
            }
            for member in view.members
            if member.node == node.node
        ],
    }


def waiters(view: GroupView) -> list[dict[str, Any]]:
    """The queue in service order, each with the reason for its wait."""
    return [
        {
            "position": position,
            **_asked(waiter),
            "alive": waiter.alive,
            "deferred": waiter.deferred,
            "why": why_it_waits(view, position, waiter),
        }
        for position, waiter in enumerate(view.queue)
    ]


def forming(view: GroupView) -> list[dict[str, Any]]:
    """Gangs that are not in the queue yet, each with the ranks that it waits for."""
    return [{**_asked(gang), "missing": list(gang.missing), "why": gang.forms} for gang in view.forming]


def _asked(waiter: WaiterView) -> dict[str, Any]:
    return {
        "job": waiter.job,
        "waiter": waiter.waiter,
        "host": waiter.host,
        "pid": waiter.pid,
        "priority": waiter.priority,
        "job_phase": waiter.label,
        "waited_s": waiter.waited_s,
        "world": waiter.world or None,
        "ranks": ranks(waiter.parties),
    }


def complaints(view: GroupView, told: Mapping[str, Sequence[tuple[str, str]]] | None) -> list[tuple[str, str]]:
    """Node and sentence, of the agents that serve the group now."""
    lines = (told or {}).get(view.name, ())
    return [(node, line) for node, line in lines if node in view.nodes and view.nodes[node].alive]


def group_document(
    view: GroupView,
    *,
    emulated: bool | None,
    told: Mapping[str, Sequence[tuple[str, str]]] | None = None,
) -> dict[str, Any]:
    """Everything about a group: the schema of ``status --json`` and ``queue --json``."""
    return {
        "group": view.name,
        "mode": view.mode or "undeclared",
        "emulated": emulated,
        "phase": view.phase,
        "reason": why(view),
        "since_s": since_s(view),
        "paused": bool(view.state.get("paused") or view.state.get("drains")),
        "holder": holder(view),
        "swap": swap(view),
        "residents": list(view.resident),
        "waiters": waiters(view),
        "forming": forming(view),
        "jobs": [
            {
                "job": job.job,
                "residency": job.residency,
                "job_phase": view.state.get("label", "") if view.holder == job.job else job.phase,
                "needs_weights": job.needs_weights,
                "host_bytes": job.host_bytes,
                "usage_s": used_s(view, job.job),
                "last_granted_s": job.last_granted_s or None,
                "token": job.token,
            }
            for job in sorted(view.jobs.values(), key=lambda each: each.job)
        ],
        "frozen": [{"job": each.job, "node": each.node, "pids": list(each.pids)} for each in frozen(view)],
        "nodes": [node_document(view, node) for node in view.nodes.values()],
        "complaints": [{"node": node, "complaint": line} for node, line in complaints(view, told)],
        "coordinator": coordinator(view),
    }


def coordinator(view: GroupView) -> str | None:
    """Who drives the group's swaps now, or None."""
    alive = view.number("owner_deadline_ms") >= view.now_ms
    return (view.state.get("owner") or None) if alive else None
