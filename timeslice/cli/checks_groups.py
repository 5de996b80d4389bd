"""What ``timeslice doctor`` makes of coordinators, agents and groups. Pure."""

from __future__ import annotations

from collections.abc import Mapping

import timeslice
from timeslice.cli.facts import COORDINATORS, Facts
from timeslice.cli.finding import Finding
from timeslice.cli.output import seconds, size
from timeslice.cli.report import for_long, frozen
from timeslice.cli.session import parse_json
from timeslice.locks.view import GroupView


def coordinators(facts: Facts) -> list[Finding]:
    """Somebody has to drive the swaps of served groups."""
    if COORDINATORS in facts.denied:
        return [Finding("info", "coordinator", "not looked at: this user may not read which ones are alive")]
    alive = sorted(name for name, left in facts.coordinators.items() if left >= 0)
    served = [view.name for view in facts.views if view.mode == "served"]
    if len(alive) == 1 and served:
        return [
            Finding(
                "info",
                "coordinator",
                f"{alive[0]} is alive, and the only one: when it stops, nothing is swapped until it is back",
                "run a second one, on another machine",
            )
        ]
    if alive:
        return [Finding("ok", "coordinator", f"{', '.join(alive)} alive")]
    if served:
        return [
            Finding(
                "error",
                "coordinator",
                f"none is alive, so nothing can be swapped in {', '.join(served)}",
                "start one: timeslice coordinator",
            )
        ]
    if facts.unseen:
        return [
            Finding("info", "coordinator", "none runs; whether one is needed was not looked at: some groups are hidden")
        ]
    return [Finding("ok", "coordinator", "none runs, and none is needed: no group is served by agents")]


def agents(facts: Facts) -> list[Finding]:
    """Every node's agent: when it was last heard, its version, what it complains of."""
    findings = []
    for node, record in sorted(facts.nodes.items()):
        found = _agent(node, record, facts.now_ms)
        findings += found or [Finding("ok", f"node {node}", f"agent {record.get('version', 'of unknown version')}")]
    return findings


def _agent(node: str, record: Mapping[str, str], now_ms: int) -> list[Finding]:
    where = f"node {node}"
    until_ms = _whole(record.get("instance_until_ms"))
    if until_ms < now_ms:
        silent_s = (now_ms - _whole(record.get("heartbeat_at_ms"))) / 1000
        heard = f"was last heard {seconds(silent_s)} ago" if record else "has not been heard for a day"
        what = f"its agent {'was stopped and ' if record and not until_ms else ''}{heard}"
        return [
            Finding(
                "warning",
                where,
                what,
                f"start it again; if the machine is gone for good: timeslice node forget {node}",
            )
        ]
    findings = []
    if record.get("version") != timeslice.__version__:
        findings.append(
            Finding(
                "warning",
                where,
                f"its agent has version {record.get('version')}, this command {timeslice.__version__}",
                "run the same version everywhere; agents and coordinators first, then the jobs",
            )
        )
    for level, field, remedy in (
        ("warning", "complaints", "see the agent's log on that node"),
        ("error", "overdue", "look at that node; never kill a checkpoint tool in mid-operation, its job would be lost"),
    ):
        told = parse_json(record.get(field, ""))
        for group, complaints in sorted(told.items()) if isinstance(told, dict) else ():
            for complaint in complaints if isinstance(complaints, list) else [complaints]:
                what = f"overdue: {complaint}" if field == "overdue" else str(complaint)
                findings.append(Finding(level, where, f"group {group}: {what}", remedy))  # type: ignore[arg-type]
    return findings


def _whole(number: str | None) -> int:
    return int(number) if number and number.isdigit() else 0


def group(view: GroupView) -> list[Finding]:
    """Agents, block, and jobs that use a device without holding."""
    where = f"group {view.name}"
    findings = [
        Finding(
            "error",
            where,
            f"node {node.node} is unreachable for {seconds(node.heartbeat_age_s)}",
            f"start its agent again; if the machine is gone for good: timeslice node forget {node.node}",
        )
        for node in view.nodes.values()
        if not node.alive
    ]
    if view.phase == "blocked":
        findings.append(
            Finding("error", where, f"blocked{for_long(view)}: {view.reason}", remedy(view.reason, view.name))
        )
    elif view.mode == "served" and not view.nodes:
        findings.append(Finding("error", where, "no agent serves it", remedy("no agent serves", view.name)))
    findings += [
        Finding(
            "warning",
            where,
            f"job {member.job} uses {size(member.device_bytes)} on node {member.node} without holding {view.name}",
            "put first loads, saves and evaluations of that job into a hold too",
        )
        for member in view.members
        if member.unheld
    ]
    findings += [
        Finding(
            "warning",
            where,
            str(each),
            f"what that backend is for: docs/platform-engineers.md; jobs: timeslice status {view.name}",
        )
        for each in frozen(view)
    ]
    findings += [
        Finding(
            "warning",
            where,
            f"job {waiter.job} is deferred: {waiter.deferred}",
            f"it is tried again by itself; details: timeslice status {view.name}",
        )
        for waiter in view.queue
        if waiter.deferred and waiter.deferred != "silent"
    ]
    if not findings:
        nodes = "lock-only" if view.mode == "lock" else f"{len(view.nodes)} of {len(view.nodes)} nodes alive"
        findings.append(Finding("ok", where, f"{view.phase}, {nodes}"))
    return findings


# Start of a reason -> what to do. {group} is put in.
_REMEDIES = (
    ("no agent serves", "start one on the node with the devices: timeslice agent --group {group}"),
    ("no coordinator", "start one: timeslice coordinator"),
    ("data was lost", "wait: agents and holders report back within one lease, then it goes on by itself"),
    (
        "the device state of job",
        "end that job's processes, or let its state be looked at again: timeslice repair {group}; then it goes on",
    ),
    ("deferred", "it is tried again by itself; details: timeslice status {group}"),
    ("node ", "start that node's agent again; if the machine is gone for good: timeslice node forget NODE"),
)


def remedy(reason: str, group: str) -> str:
    """What to do about a blocked group."""
    if "has not yet told what is on its devices" in reason:
        return "wait a few seconds; if it lasts, see the log of that node's agent"
    for start, advice in _REMEDIES:
        if reason.startswith(start):
            return advice.format(group=group)
    if "may still be on the devices" in reason:
        return f"end its processes; or, if you looked and nothing of it is there: timeslice repair {group} --out JOB"
    if "could not be moved off the device" in reason:
        return f"see that reason; to try again: timeslice repair {group}; or end that job's processes"
    if "which may not know before" in reason:
        return "wait: the one it was taken from must have noticed first, then it goes on by itself"
    return f"details: timeslice status {group}"
