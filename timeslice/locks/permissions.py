"""What each role needs of a Redis server: its commands, and the keys that it may use them on. For ``timeslice acl``.

Scripts run with the rights of their caller, and every script of a group names all of the group's keys. So who may
call one may also write those keys by hand: a group is the boundary between tenants, the rights within one are not.
tests/security compares this table with what the sources send, and runs the system under it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from timeslice.locks.keys import GroupKeys, Keys

# Commands that the scripts of the verbs call.
_STATE = "expire hdel hget hmget hset persist time xadd zadd zrange"
_QUEUE = f"{_STATE} hexists hgetall hincrby zrangebyscore zrem zremrangebyrank zremrangebyscore zscore"
_CALL, _LOOK = "eval evalsha", "eval_ro evalsha_ro"
_CONNECT = "cluster|slots command ping"  # whoever knows a cluster's address asks it who has which keys


@dataclass(frozen=True)
class Rule:
    """Commands, and the kinds of keys that they may be used on: kind -> access (R, W, RW)."""

    commands: str
    keys: Mapping[str, str] = field(default_factory=dict)


# Kinds of keys: "group" is all of a group but its settings; the others stand in `patterns`.
_SCRIPTS = Rule(_CALL, {"group": "RW", "config": "RW"})
ROLES: Mapping[str, tuple[Rule, ...]] = {
    "client": (
        Rule(
            f"{_QUEUE} {_LOOK} {_CONNECT} del hlen info xread xrevrange zcard zrank",
            {"group": "RW", "config": "R"},
        ),
        _SCRIPTS,
        Rule("sadd smembers", {"groups": "RW"}),
        Rule("expire xadd xread xrevrange", {"channels": "RW"}),
    ),
    "agent": (
        Rule(f"{_QUEUE} {_LOOK} {_CONNECT} hkeys hlen info", {"group": "RW", "config": "R"}),
        _SCRIPTS,
        Rule("sadd smembers srem", {"groups": "RW", "nodes": "W"}),
        Rule(
            f"{_CALL} del expire hdel hget hgetall hmget hset xack xdel xgroup|create xreadgroup",
            {"commands": "RW", "record": "RW"},
        ),
        Rule("expire xadd xread", {"channels": "RW"}),
    ),
    "coordinator": (
        Rule(f"{_QUEUE} {_LOOK} {_CONNECT} info xread xrevrange", {"group": "RW", "config": "R"}),
        _SCRIPTS,
        Rule("smembers srem", {"groups": "RW"}),
        Rule(f"{_LOOK} zadd zcount zrem zremrangebyscore zscore", {"coordinators": "RW"}),
        Rule("xadd", {"commands": "W"}),
    ),
    "viewer": (
        Rule(
            f"{_LOOK} {_CONNECT} acl|whoami cluster|info hget hgetall info smembers time xrange xrevrange zrange",
            {"group": "R", "config": "R", "groups": "R", "nodes": "R", "coordinators": "R", "record": "R"},
        ),
    ),
    "operator": (
        Rule(
            f"{_QUEUE} {_LOOK} {_CALL} {_CONNECT} acl|whoami cluster|info del exists hkeys info pexpire xrange "
            "xrevrange zcard zcount",
            {"group": "RW", "config": "RW"},
        ),
        Rule("sadd smembers srem", {"groups": "RW", "nodes": "RW"}),
        Rule("zrange", {"coordinators": "R"}),
        Rule("hget hgetall xadd", {"commands": "W", "record": "R"}),
    ),
}


def user_rules(role: str, keys: Keys, groups: Sequence[str] = (), nodes: Sequence[str] = ()) -> list[str]:
    """The words of ``ACL SETUSER`` for a role, without the password. No groups or nodes named: all of them."""
    known = patterns(keys, groups, nodes)
    words: list[str] = []
    for number, rule in enumerate(ROLES[role]):
        named = [
            ("~" if access == "RW" else f"%{access}~") + pattern
            for kind, access in rule.keys.items()
            for pattern in known[kind]
        ]
        told = [*named, *(f"+{command}" for command in sorted(rule.commands.split()))]
        # The first is the user's own. Each further one stands for itself, none of its commands on another's keys; the
        # server splits it into words once more.
        words += told if number == 0 else [f"({' '.join(map(quoted, told))})"]
    return words


def patterns(keys: Keys, groups: Sequence[str] = (), nodes: Sequence[str] = ()) -> dict[str, list[str]]:
    """Each kind of key as patterns. An asterisk stands in them for any name."""
    ours = [_group(keys, name) for name in groups or (_ANY,)]
    at = [_glob(keys.commands(name)) for name in nodes or (_ANY,)]
    records = [_glob(keys.node_state(name)) for name in nodes or (_ANY,)]
    return {
        "group": [pattern for group in ours for pattern in group if not pattern.endswith(":config")],
        "config": [pattern for group in ours for pattern in group if pattern.endswith(":config")],
        "groups": [_glob(keys.groups)],
        "nodes": [_glob(keys.nodes)],
        "coordinators": [_glob(keys.coordinators)],
        "commands": at,
        "record": records,
        "channels": [_glob(keys.channel(_ANY, f"{name}/{_ANY}")) for name in groups or (_ANY,)],
    }


_ANY = "0any0"  # a valid name, replaced by * once the rest is quoted


def _group(keys: Keys, name: str) -> list[str]:
    group: GroupKeys = keys.group(name)
    return [_glob(key) + ("*" if key.endswith(":grant:") else "") for key in group.all]


def _glob(key: str) -> str:
    """A pattern that matches this key alone: what the prefix may hold of glob characters is quoted."""
    return re.sub(r"[*?\[\]\\^]", r"\\\g<0>", key).replace(_ANY, "*")


def quoted(word: str) -> str:
    """A word as redis-cli, an aclfile and the rules in brackets read it: a prefix may hold quotes and backslashes."""
    return '"' + re.sub(r'(["\\])', r"\\\1", word) + '"' if re.search(r'["\'\\]', word) else word
