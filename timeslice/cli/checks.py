"""What ``timeslice doctor`` makes of the server and of this installation. Pure; `facts` reads.

How the servers stand together is looked at in `checks_servers`, groups and daemons in `checks_groups`, what the
current user may do in `access`.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from timeslice.addresses import Address, is_loopback
from timeslice.cli.checks_servers import together
from timeslice.cli.facts import Facts
from timeslice.cli.finding import Finding
from timeslice.cli.output import seconds, size
from timeslice.locks.suitable import OLDEST, POLICY

SKEW_S = 1.0
NEARLY_FULL = 0.9


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


def command_line(given_url: str | None) -> list[Finding]:
    """A password in the command line is a password told to everybody who may run ``ps`` here."""
    if given_url is None or not re.search(r"://[^/@]*:[^@]+@|[?&]\w*password=.", given_url):
        return []
    return [
        Finding(
            "warning",
            "password",
            "the password of Redis stands on the command line, where every user of this machine can read it",
            "set TIMESLICE_PASSWORD (or TIMESLICE_URL) in the environment and leave it out of --url",
        )
    ]


def server(facts: Facts) -> list[Finding]:
    """Address, encryption, version, eviction, memory, persistence, replicas, slots, clock."""
    findings = [Finding("ok", "server", f"{facts.address.shown} answers"), *_encryption(facts.address)]
    if facts.denied:
        findings.append(
            Finding(
                "info",
                "rights",
                f"this user may not send {', '.join(facts.denied)}, so what they would tell was not looked at",
                "run doctor as an operator or viewer (timeslice acl) to see all",
            )
        )
    for where, info in facts.infos.items():
        found = [_version(info), _eviction(info), *_memory(info), _persistence(info), *_replication(info)]
        named = len(facts.infos) > 1
        findings += [replace(each, what=f"{where}: {each.what}") for each in found] if named else found
    findings += together(facts)
    findings += _clock(facts.skew_s)
    return findings


def _encryption(address: Address) -> list[Finding]:
    far = [host for host, _ in address.hosts if not is_loopback(host)]
    if address.tls or not far:
        return []
    return [
        Finding(
            "info",
            "encryption",
            f"the connection to {far[0]} is not encrypted: whoever can listen in between reads passwords and names",
            "on a network that you don't trust use rediss:// (TLS)",
        )
    ]


def _version(info: Mapping[str, Any]) -> Finding:
    version = str(info.get("redis_version", "0.0"))
    name = f"Valkey {info['valkey_version']}" if "valkey_version" in info else f"Redis {version}"
    if tuple(int(part) for part in version.split(".")[:2] if part.isdigit()) >= OLDEST:
        return Finding("ok", "version", name)
    return Finding("error", "version", f"{name} is too old", "upgrade to Redis 7.0 or newer, or Valkey")


def _eviction(info: Mapping[str, Any]) -> Finding:
    policy, limit = str(info.get("maxmemory_policy", "unknown")), int(info.get("maxmemory", 0))
    if policy == POLICY:
        return Finding("ok", "eviction", f"{policy}, maxmemory {size(limit) if limit else 'not limited'}")
    return Finding(
        "error",
        "eviction",
        f"maxmemory-policy is {policy}: the server may evict leases when it is full",
        f"run: redis-cli CONFIG SET maxmemory-policy {POLICY}, and put it into redis.conf",
    )


def _memory(info: Mapping[str, Any]) -> list[Finding]:
    used, limit = int(info.get("used_memory", 0)), int(info.get("maxmemory", 0))
    if not limit or used <= NEARLY_FULL * limit:
        return []
    full = "so no job can queue" if used >= limit else "and at the limit no job can queue"
    return [
        Finding(
            "error",
            "memory",
            f"{size(used)} of {size(limit)} used, {full} (yields and renewals go on)",
            "raise maxmemory or remove other data",
        )
    ]


def _persistence(info: Mapping[str, Any]) -> Finding:
    if not int(info.get("aof_enabled", 0)):
        return Finding(
            "warning",
            "persistence",
            "the append-only file is off: a restart of the server forgets pauses, settings, and holders of "
            "lock-only groups (tokens still rise, and agents still keep two jobs off one device)",
            "for production set appendonly yes; with `timeslice up` use --data DIR",
        )
    for what in ("aof_last_write_status", "aof_last_bgrewrite_status"):
        if info.get(what, "ok") != "ok":
            step = "write" if "write_" in what else "rewrite"
            return Finding(
                "error",
                "persistence",
                f"the last {step} of the append-only file failed: what happens now may be forgotten at a restart",
                "look for a full or failing disk in the server's log",
            )
    return Finding("ok", "persistence", "append-only file")


def _replication(info: Mapping[str, Any]) -> list[Finding]:
    if info.get("role") == "slave":
        return [
            Finding(
                "error",
                "replication",
                f"this server is a replica of {info.get('master_host')}:{info.get('master_port')} and takes no writes",
                "use the master's address, or redis+sentinel:// so that it is found by itself",
            )
        ]
    replicas = int(info.get("connected_slaves", 0))
    # INFO tells this only where both min-replicas settings are above 0.
    if not replicas or "min_slaves_good_slaves" in info:
        return []
    return [
        Finding(
            "warning",
            "replication",
            f"{replicas} {'replica follows' if replicas == 1 else 'replicas follow'} asynchronously and "
            f"{'is not' if replicas == 1 else 'none is'} waited for: a failover may lose the last moments "
            "(grants, yields, places in the queue); tokens still rise and agents still keep two jobs off one device, "
            "but a lock-only group may have two holders until the first one's next renewal",
            "set min-replicas-to-write 1 and min-replicas-max-lag 2, which bounds what a cut-off master can take",
        )
    ]


def _clock(skew_s: float | None) -> list[Finding]:
    if skew_s is None:
        return []
    if abs(skew_s) <= SKEW_S:
        return [Finding("ok", "clock", f"within {seconds(SKEW_S)} of the server's")]
    ahead = "ahead of" if skew_s > 0 else "behind"
    return [
        Finding(
            "warning",
            "clock",
            f"this host is {seconds(abs(skew_s))} {ahead} the server; leases go by the server's clock, "
            "but times in logs will not match",
            "set up NTP on both",
        )
    ]
