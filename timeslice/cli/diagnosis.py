"""What is in a group's way that nobody may put right by a guess, and what an operator does about it. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from timeslice.cli import report
from timeslice.cli.outcome import processes
from timeslice.cli.output import seconds

if TYPE_CHECKING:
    from collections.abc import Iterator

    from timeslice.locks.view import GroupView


@dataclass(frozen=True)
class Finding:
    """One thing in the way. ``next_step``: what an operator does."""

    what: str
    next_step: str


def findings(view: GroupView) -> list[Finding]:
    """In the order in which to look at them. Empty: the group goes on, or has nothing to do."""
    return [
        *_nodes(view),
        *_coordinator(view),
        *_jobs(view),
        *_swap(view),
        *_eviction(view),
        *_holder(view),
        *_pauses(view),
    ]


def _nodes(view: GroupView) -> Iterator[Finding]:
    if view.mode == "served" and not view.nodes:
        yield Finding("no agent serves it", f"start one: timeslice agent --group {view.name}")
    for node in view.nodes.values():
        if node.alive:
            continue
        jobs = sorted(member.job for member in view.members if member.node == node.node)
        on_it = f" and has state of job {', '.join(jobs)}" if jobs else ""
        lose = "".join(f" --lose {job}" for job in jobs)
        yield Finding(
            f"node {node.node} is unreachable for {seconds(node.heartbeat_age_s)}{on_it}",
            f"start its agent; or, if the machine is gone for good: timeslice node forget {node.node}{lose}",
        )
    for name in view.state.get("unheard", "").split():
        if name in view.nodes and view.nodes[name].alive:
            yield Finding(f"node {name} joined and has not yet told what is on its devices", "wait for its report")


def _jobs(view: GroupView) -> Iterator[Finding]:
    for job in view.jobs.values():
        for member in view.members:
            if member.job == job.job and member.state == "unknown":
                yield Finding(
                    f"job {job.job} may still be on the devices of node {member.node}: {member.why}",
                    f"end its processes there; or, if you looked and nothing of it is on any device of {view.name}: "
                    f"timeslice repair {view.name} --out {job.job}",
                )
        if job.residency != "faulted":
            continue
        where = processes(view, job.job) or "see: timeslice jobs"
        way_out = f"end its processes ({where})"
        if nodes := _stood_in_for(view, job.job):
            way_out = (
                f"have its workload register with the gateway of {', '.join(nodes)} again, and say good-bye if it has "
                "ended; if nothing can speak for it, see `node forget` in the operations manual"
            )
        yield Finding(f"the device state of job {job.job} is unknown", way_out)


def _stood_in_for(view: GroupView, job: str) -> list[str]:
    """Nodes where processes of gateways stand in for a workload of the job: to end those tells nothing of it."""
    nodes = set()
    for name, record in view.targets.items():
        of, _, at = name.partition("/")
        if of == job and '"backend":"channel"' in record:
            nodes.add(at.partition("/")[0])
    return sorted(nodes)


def _coordinator(view: GroupView) -> Iterator[Finding]:
    needed = view.swap or view.queue or view.resident or view.state.get("evict")
    if view.mode == "served" and needed and not report.coordinator(view):
        yield Finding(f"no coordinator drives its swap{'' if view.swap else 's'}", "start one: timeslice coordinator")


def _swap(view: GroupView) -> Iterator[Finding]:
    if not view.swap or not report.coordinator(view):
        return
    hanging = [node for node in view.nodes.values() if node.swap == view.swap and node.step.startswith("begun")]
    for node in hanging:
        late = view.now_ms > view.number("swap_deadline_ms")
        yield Finding(
            f"node {node.node} is in the middle of a swap ({node.step}{', overdue' if late else ''})",
            "wait; if it hangs, see its agent's log, or end the processes that it moves: timeslice jobs"
            if late
            else "wait",
        )
    if not hanging:
        yield Finding(f"a swap is under way ({report.moving(view)})", "wait")


def _eviction(view: GroupView) -> Iterator[Finding]:
    if (job := view.state.get("evict")) and not view.swap and (reason := view.evict_reason):
        yield Finding(f"job {job} could not be moved off the device: {reason}", "end its processes: timeslice jobs")


def _holder(view: GroupView) -> Iterator[Finding]:
    if view.holder and view.queue:
        held = seconds(report.elapsed(view, "granted_at_ms"))
        yield Finding(
            f"job {view.holder} holds it for {held}, and lives",
            f"wait until it yields, or take it away: timeslice revoke {view.name} --job {view.holder}",
        )


def _pauses(view: GroupView) -> Iterator[Finding]:
    if paused := view.state.get("paused"):
        yield Finding(f"it is {paused}", f"go on: timeslice resume {view.name}")
    if drains := view.state.get("drains"):
        yield Finding(f"it is drained: {drains}", "end that when the maintenance is over: timeslice node undrain NODE")
