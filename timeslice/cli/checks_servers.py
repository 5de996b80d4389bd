"""What ``timeslice doctor`` makes of how the servers stand together: writes, replicas, sentinels, cluster. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from timeslice.cli.facts import SLOTS, Facts, is_whole
from timeslice.cli.finding import Finding
from timeslice.locks.refusals import advice
from timeslice.locks.suitable import POLICY

LONGEST_MS = 5000  # in which a dead server must be noticed: well below a lease


def together(facts: Facts) -> list[Finding]:
    """All of them."""
    return [*_writes(facts), *_replicas(facts), *_sentinels(facts), *_cluster(facts), *_synced(facts)]


def _writes(facts: Facts) -> Iterator[Finding]:
    told = dict(facts.servers.takes_writes)
    for where, info in facts.infos.items():
        # INFO tells it only where both min-replicas settings are above 0.
        if where not in told and int(info.get("min_slaves_good_slaves", 1)) == 0:
            told[where] = "NOREPLICAS: no replica is in step, and min-replicas-to-write asks for at least one"
    if told and not any(told.values()):
        yield Finding("ok", "writes", "taken")
    for where, words in told.items():
        if words and facts.infos.get(where, {}).get("role") != "slave":  # which is told already
            yield Finding("error", "writes", f"{where} refuses every write ({words.rstrip('.')})", advice(words))


def _replicas(facts: Facts) -> Iterator[Finding]:
    logs = any(int(info.get("aof_enabled", 0)) for info in facts.infos.values())
    for where, info in facts.servers.replicas.items():
        if isinstance(info, str):
            yield Finding("info", "replica", f"{where} was not looked at: {info}")
            continue
        if (policy := str(info.get("maxmemory_policy", POLICY))) != POLICY:
            yield Finding(
                "warning",
                "replica",
                f"{where} has maxmemory-policy {policy}: as master it may evict leases",
                f"run there: redis-cli CONFIG SET maxmemory-policy {POLICY}, and put it into its redis.conf",
            )
        if logs and not int(info.get("aof_enabled", 0)):
            yield Finding(
                "warning",
                "replica",
                f"{where} has no append-only file, as its master has: after a failover a restart forgets everything",
                "set appendonly yes there too",
            )


def _sentinels(facts: Facts) -> Iterator[Finding]:
    name = facts.address.master
    for where, state in facts.servers.sentinels.items():
        if isinstance(state, str):
            yield Finding(
                "warning",
                "sentinel",
                f"{where} does not answer ({state.rstrip('.')}): without a majority of them nothing fails over",
                "start it again, or take it out of the URL",
            )
        elif not state:
            yield Finding(
                "warning", "sentinel", f"{where} does not watch {name}", "correct its configuration or the URL"
            )
        elif (late_ms := int(state.get("down-after-milliseconds", 0))) > LONGEST_MS:
            yield Finding(
                "warning",
                "sentinel",
                f"{where} notices a dead master only after {late_ms} ms: holders may lose their leases meanwhile",
                f"run there: redis-cli SENTINEL SET {name} down-after-milliseconds {LONGEST_MS}",
            )


def _cluster(facts: Facts) -> Iterator[Finding]:
    cluster = facts.cluster
    enabled = any(int(info.get("cluster_enabled", 0)) for info in facts.infos.values())
    if enabled and facts.address.kind != "cluster":
        yield Finding(
            "error",
            "cluster",
            "this server is a node of a cluster: only groups whose slot it has can be used through it",
            "use redis+cluster://HOST:PORT,HOST:PORT (rediss+cluster:// with TLS)",
        )
    if not cluster:
        return
    if not is_whole(cluster):
        covered = cluster.get("cluster_slots_ok") or 0
        yield Finding(
            "error",
            "cluster",
            f"state {cluster.get('cluster_state', 'unknown')}, {covered} of {SLOTS} slots are served: groups in the "
            "others can't be used",
            "run: redis-cli --cluster check HOST:PORT, then --cluster fix; see that every shard has a master",
        )
        return
    yield Finding("ok", "cluster", f"all {SLOTS} slots are served")
    if alone := [where for where, info in facts.infos.items() if not int(info.get("connected_slaves", 1))]:
        yield Finding(
            "warning",
            "shards",
            f"no replica follows {', '.join(alone)}: when such a server dies, its groups stand still until it is back",
            "give each master a replica: redis-cli --cluster add-node HOST:PORT HOST:PORT --cluster-slave",
        )
    for where, late_ms in _told(facts.servers.settings, "cluster-node-timeout"):
        if late_ms.isdigit() and int(late_ms) > LONGEST_MS:
            yield Finding(
                "warning",
                "shards",
                f"{where} notices a dead master only after {late_ms} ms: holders may lose their leases meanwhile",
                f"run on each server: redis-cli CONFIG SET cluster-node-timeout {LONGEST_MS}",
            )


def _synced(facts: Facts) -> Iterator[Finding]:
    for where, mode in _told(facts.servers.settings, "appendfsync"):
        if mode == "no" and int(facts.infos.get(where, {}).get("aof_enabled", 0)):
            yield Finding(
                "warning",
                "appendfsync",
                f"{where} leaves it to the system when its file is written: a crash of the machine forgets half a "
                "minute",
                "set appendfsync everysec, or always",
            )


def _told(settings: Mapping[str, Mapping[str, Any]], name: str) -> Iterator[tuple[str, str]]:
    return ((where, told[name]) for where, told in settings.items() if name in told)
