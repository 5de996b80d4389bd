"""What ``timeslice doctor`` looks at. `gather` reads; all the checks are pure."""

from __future__ import annotations

import importlib.metadata
import time
from dataclasses import dataclass
from typing import Any, Literal

from timeslice.addresses import redact_url
from timeslice.cli.output import seconds, size
from timeslice.cli.report import for_long
from timeslice.cli.session import Session
from timeslice.locks.scripts import text
from timeslice.locks.suitable import OLDEST, POLICY
from timeslice.locks.view import GroupView

SKEW_S = 1.0


@dataclass(frozen=True)
class Finding:
    """One thing looked at. ``do`` is empty when all is well."""

    level: Literal["ok", "warning", "error"]
    check: str
    what: str
    do: str = ""


@dataclass(frozen=True)
class Facts:
    """All that was read from the server."""

    where: str
    info: dict[str, Any]
    skew_s: float  # this host's clock minus the server's
    coordinators: dict[str, float]  # name -> seconds that its sign of life still counts; negative: over
    views: list[GroupView]


def gather(session: Session) -> Facts:
    """Read everything once."""
    client = session.driver.client

    def clock() -> float:
        before = time.time()
        at, micros = client.time()
        return (before + time.time()) / 2 - (at + micros / 1e6)

    skew = session.ask(clock)
    deadlines = session.ask(lambda: client.zrange(session.keys.coordinators, 0, -1, withscores=True))
    now_ms = (time.time() - skew) * 1000
    return Facts(
        where=redact_url(session.url),
        info=session.ask(client.info),
        skew_s=skew,
        coordinators={text(name): (deadline - now_ms) / 1000 for name, deadline in deadlines},
        views=session.views(),
    )


def installation() -> Finding:
    """Whether ``import timeslice`` means this package."""
    try:
        other = importlib.metadata.version("timeslice")
    except importlib.metadata.PackageNotFoundError:
        return Finding("ok", "installation", f"timeslice-rl {importlib.metadata.version('timeslice-rl')}")
    return Finding(
        "error",
        "installation",
        f"another distribution, timeslice {other}, is installed beside timeslice-rl; both own `import timeslice`, "
        "and whichever was installed last shadows the other",
        "run: pip uninstall timeslice timeslice-rl, then pip install timeslice-rl "
        "(llm-d's client: use timeslice.TimeSliceOrchestratorClient instead)",
    )


def server(facts: Facts) -> list[Finding]:
    """Address, version, eviction, memory, persistence, clock."""
    info = facts.info
    findings = [Finding("ok", "server", f"{facts.where} answers")]
    version = str(info.get("redis_version", "0.0"))
    name = f"Valkey {info['valkey_version']}" if "valkey_version" in info else f"Redis {version}"
    if tuple(int(part) for part in version.split(".")[:2] if part.isdigit()) >= OLDEST:
        findings.append(Finding("ok", "version", name))
    else:
        findings.append(Finding("error", "version", f"{name} is too old", "upgrade to Redis 7.0 or newer, or Valkey"))
    policy, limit = str(info.get("maxmemory_policy", "unknown")), int(info.get("maxmemory", 0))
    if policy == POLICY:
        findings.append(Finding("ok", "eviction", f"{policy}, maxmemory {size(limit) if limit else 'not limited'}"))
    else:
        findings.append(
            Finding(
                "error",
                "eviction",
                f"maxmemory-policy is {policy}: the server may evict leases when it is full",
                f"run: redis-cli CONFIG SET maxmemory-policy {POLICY}, and put it into redis.conf",
            )
        )
    used = int(info.get("used_memory", 0))
    if limit and used > 0.9 * limit:
        findings.append(
            Finding("error", "memory", f"{size(used)} of {size(limit)} used", "raise maxmemory or remove other data")
        )
    findings.append(_persistence(info))
    if abs(facts.skew_s) <= SKEW_S:
        findings.append(Finding("ok", "clock", f"within {seconds(SKEW_S)} of the server's"))
    else:
        ahead = "ahead of" if facts.skew_s > 0 else "behind"
        findings.append(
            Finding(
                "warning",
                "clock",
                f"this host is {seconds(abs(facts.skew_s))} {ahead} the server; leases go by the server's clock, "
                "but times in logs will not match",
                "set up NTP on both",
            )
        )
    return findings


def _persistence(info: dict[str, Any]) -> Finding:
    if not int(info.get("aof_enabled", 0)):
        return Finding(
            "warning",
            "persistence",
            "the append-only file is off: a restart of the server forgets queues, settings and holders of "
            "lock-only groups (tokens still rise, and agents still keep two jobs off one device)",
            "for production set appendonly yes; with `timeslice up` use --data DIR",
        )
    if info.get("aof_last_write_status", "ok") != "ok":
        return Finding("error", "persistence", "the last write of the append-only file failed", "look for a full disk")
    return Finding("ok", "persistence", "append-only file")


def coordinators(facts: Facts) -> list[Finding]:
    """Somebody has to drive the swaps of served groups."""
    alive = sorted(name for name, left in facts.coordinators.items() if left >= 0)
    served = [view.name for view in facts.views if view.mode == "served"]
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
    return [Finding("ok", "coordinator", "none runs, and none is needed: no group is served by agents")]


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
    ("the device state of job", "end that job's processes, then it goes on; details: timeslice status {group}"),
    ("deferred", "it is tried again by itself; details: timeslice status {group}"),
    ("node ", "start that node's agent again; if the machine is gone for good: timeslice node forget NODE"),
)


def remedy(reason: str, group: str) -> str:
    """What to do about a blocked group."""
    for start, advice in _REMEDIES:
        if reason.startswith(start):
            return advice.format(group=group)
    return f"details: timeslice status {group}"
