"""What ``timeslice doctor`` reads of each server: whether it takes writes, its settings, replicas and sentinels."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import redis

from timeslice.addresses import Address, parse_url
from timeslice.cli.session import Session
from timeslice.errors import ServerUnsuitableError
from timeslice.locks.connection import connect, disconnect
from timeslice.locks.faults import SERVER_ERRORS, is_denial
from timeslice.locks.scripts import text

_SETTINGS = ("appendfsync", "cluster-node-timeout")
_WAITER = "doctor"  # nobody's: waiters' names are longer
_SHARDS = 1000  # so many names are tried to find one for each shard
_REPLY_S = 1.0
# Asked first, so that a user without the right leaves no line in the server's log of refusals.
_MAY = """
local function may(...)
  local known, allowed = pcall(redis.acl_check_cmd, ...)
  return known and allowed and 1 or 0
end
return {may('CONFIG', 'GET', 'appendfsync'), may('PERSIST', KEYS[1])}
"""
_REFUSED = ("NOREPLICAS", "MISCONF", "read only")


@dataclass(frozen=True)
class ServerFacts:
    """By server (host:port, or the URL of a single one). A text in place of a mapping: why it could not be read."""

    takes_writes: Mapping[str, str] = field(default_factory=dict)  # what it says against them, or ''
    settings: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # CONFIG GET
    replicas: Mapping[str, Mapping[str, Any] | str] = field(default_factory=dict)  # INFO
    sentinels: Mapping[str, Mapping[str, Any] | str] = field(default_factory=dict)  # what it knows of the master


def read_servers(session: Session, infos: Mapping[str, Mapping[str, Any]], groups: Iterable[str]) -> ServerFacts:
    """``groups``: those that this user may look at. What it may not do or read is left out."""
    address = parse_url(session.url)
    takes_writes, settings = {}, {}
    moved = address.kind != "cluster" and any(int(info.get("cluster_enabled", 0)) for info in infos.values())
    for where, key, target in [] if moved else _masters(session, address, [*groups, "any"]):
        may_configure, may_write = _rights(session, key, target)
        if may_configure:
            settings[where] = _settings(session, target)
        if may_write:
            takes_writes[where] = session.ask(lambda: _try_write(session, key, target))  # noqa: B023 - called at once
    return ServerFacts(
        takes_writes, settings, _replicas(address, infos), _sentinels(session, address.master) if address.master else {}
    )


def _masters(session: Session, address: Address, groups: list[str]) -> list[tuple[str, str, dict[str, Any]]]:
    """Each master's name, a key that is nobody's and lives there, and how redis-py is told to ask that master."""
    client: Any = session.driver.client

    def key(group: str) -> str:
        return session.keys.group(group).grant(_WAITER)

    if address.kind != "cluster":
        return [(address.shown, key(groups[0]), {})]
    found: dict[str, tuple[str, str, dict[str, Any]]] = {}
    for group in [*groups, *(f"any{number}" for number in range(_SHARDS))]:
        node = client.get_node_from_key(key(group))
        name = f"{node.host}:{node.port}"
        found.setdefault(name, (name, key(group), {"target_nodes": node}))
        if len(found) == len(client.get_primaries()):
            break
    return list(found.values())


def _rights(session: Session, key: str, target: dict[str, Any]) -> tuple[bool, bool]:
    """Whether this user may read settings, and write."""
    client: Any = session.driver.client
    try:
        told = session.ask(lambda: client.execute_command("EVAL_RO", _MAY, 1, key, **target))
    except ServerUnsuitableError as error:
        if not is_denial(error):
            raise
        return False, False
    return bool(told[0]), bool(told[1])


def _settings(session: Session, target: dict[str, Any]) -> dict[str, str]:
    client: Any = session.driver.client
    found: dict[str, str] = {}
    for name in _SETTINGS:
        told = session.ask(lambda: client.config_get(name, **target))  # noqa: B023 - called at once
        found |= {text(key): text(value) for key, value in told.items()}
    return found


def _try_write(session: Session, key: str, target: dict[str, Any]) -> str:
    """What the server says to a write that changes nothing: the key does not exist. '' if it takes it."""
    client: Any = session.driver.client
    try:
        client.execute_command("PERSIST", key, **target)
    except redis.exceptions.ResponseError as error:
        if not any(words in str(error) for words in _REFUSED):
            raise
        return str(error)
    return ""


def _replicas(address: Address, infos: Mapping[str, Mapping[str, Any]]) -> dict[str, Mapping[str, Any] | str]:
    """INFO of each replica that its master names, with the credentials for the master."""
    options = tuple(each for each in address.options if not each[0].startswith("sentinel_"))
    found: dict[str, Mapping[str, Any] | str] = {}
    for info in infos.values():
        for number in range(int(info.get("connected_slaves", 0))):
            told = info.get(f"slave{number}", {})
            if not isinstance(told, Mapping) or "ip" not in told:
                continue
            host = (text(told["ip"]), int(told["port"]))
            if not host[1]:
                found[f"{host[0]}, replica {number + 1}"] = "it listens on no port"
                continue
            one = replace(address, kind="standalone", hosts=(host,), socket="", master="", db=None, options=options)
            client = connect(one.url, reply_s=_REPLY_S)
            try:
                found[f"{host[0]}:{host[1]}"] = client.info()
            except SERVER_ERRORS as error:
                found[f"{host[0]}:{host[1]}"] = str(error)
            finally:
                disconnect(client)
    return found


def _sentinels(session: Session, master: str) -> dict[str, Mapping[str, Any] | str]:
    client: Any = session.driver.client
    found: dict[str, Mapping[str, Any] | str] = {}
    for sentinel in client.connection_pool.sentinel_manager.sentinels:
        place = sentinel.connection_pool.connection_kwargs
        where = f"{place['host']}:{place['port']}"
        try:
            found[where] = sentinel.sentinel_masters().get(master, {})
        except SERVER_ERRORS as error:
            found[where] = str(error)
    return found
