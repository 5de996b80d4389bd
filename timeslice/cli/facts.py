"""What ``timeslice doctor`` reads from the server, once. What this user may not read is left out and named."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from timeslice.addresses import Address, parse_url
from timeslice.cli.facts_servers import ServerFacts, read_servers
from timeslice.cli.session import Session
from timeslice.errors import ServerUnsuitableError
from timeslice.locks.faults import is_denial
from timeslice.locks.scripts import text
from timeslice.locks.view import GroupView

SLOTS = 16_384  # of a cluster
COORDINATORS = "ZRANGE of the coordinators"
_GROUPS = "SMEMBERS of the groups"
_LOOKING = "looking at group "


@dataclass(frozen=True)
class Facts:
    """All that was read. ``infos`` (INFO by server: several in a cluster) is empty where that is forbidden."""

    address: Address
    infos: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    cluster: Mapping[str, str] = field(default_factory=dict)  # CLUSTER INFO
    skew_s: float | None = None  # this host's clock minus the server's
    now_ms: int = 0  # the server's clock
    coordinators: Mapping[str, float] = field(default_factory=dict)  # name -> seconds until its deadline
    nodes: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # name -> its agent's record
    views: tuple[GroupView, ...] = ()
    servers: ServerFacts = field(default_factory=ServerFacts)
    denied: tuple[str, ...] = ()  # commands that this user may not send

    @property
    def unseen(self) -> bool:
        """Whether there may be groups that this user may not look at."""
        return any(each == _GROUPS or each.startswith(_LOOKING) for each in self.denied)


def gather(session: Session) -> Facts:
    """Read everything once. Raises RedisUnreachableError and ServerUnsuitableError."""
    client: Any = session.driver.client
    address = parse_url(session.url)
    denied: list[str] = []

    def read(what: str, attempt: Callable[[], Any], otherwise: Any) -> Any:
        try:
            return session.ask(attempt)
        except ServerUnsuitableError as error:
            if not is_denial(error):
                raise
            denied.append(what)
            return otherwise

    cluster = read("CLUSTER INFO", lambda: _cluster(client), {}) if address.kind == "cluster" else {}
    if cluster and not is_whole(cluster):
        return Facts(address, cluster=cluster, denied=tuple(denied))  # the rest would not be answered
    skew_s = read("TIME", lambda: _skew(client), None)
    now_ms = int((time.time() - (skew_s or 0.0)) * 1000)
    deadlines = read(COORDINATORS, lambda: client.zrange(session.keys.coordinators, 0, -1, withscores=True), [])
    infos = read("INFO", session.driver.infos, {})
    groups = read(_GROUPS, session.group_names, [])
    nodes = read("SMEMBERS of the nodes", session.node_names, [])
    records = {node: read("HGETALL of nodes", _record(session, node), None) for node in nodes}
    seen = [read(f"{_LOOKING}{name}", _looking(session, name), None) for name in groups]
    views = tuple(view for view in seen if view is not None)
    servers = read_servers(session, infos, [view.name for view in views])
    return Facts(
        address=address,
        infos=infos,
        cluster=cluster,
        skew_s=skew_s,
        now_ms=now_ms,
        coordinators={text(name): (deadline - now_ms) / 1000 for name, deadline in deadlines},
        nodes={node: record for node, record in records.items() if record is not None},
        views=views,
        servers=servers,
        denied=tuple(dict.fromkeys(denied)),
    )


def is_whole(cluster: Mapping[str, str]) -> bool:
    """Whether a cluster says that it is well and serves every slot."""
    return cluster.get("cluster_state") == "ok" and cluster.get("cluster_slots_ok") == str(SLOTS)


def _skew(client: Any) -> float:
    before = time.time()
    at, micros = client.time()
    return (before + time.time()) / 2 - (int(at) + int(micros) / 1e6)


def _record(session: Session, node: str) -> Callable[[], dict[str, str]]:
    key = session.keys.node_state(node)
    client: Any = session.driver.client
    return lambda: {text(name): text(value) for name, value in client.hgetall(key).items()}


def _looking(session: Session, name: str) -> Callable[[], GroupView]:
    return lambda: session.driver.view(session.keys.group(name))


def _cluster(client: Any) -> dict[str, str]:
    return {text(name): text(value) for name, value in client.cluster_info().items()}
