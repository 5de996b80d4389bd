"""What the current Redis user may do, compared with what each role needs.

``ACL DRYRUN`` would tell, but who may call that needs no telling. A script may ask for its own caller
(``redis.acl_check_cmd``), touches nothing, and is the one thing that every role may run.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from timeslice.addresses import parse_url
from timeslice.cli.finding import Finding
from timeslice.cli.session import Session
from timeslice.errors import ServerUnsuitableError
from timeslice.locks.faults import is_denial
from timeslice.locks.keys import Keys
from timeslice.locks.permissions import ROLES, patterns
from timeslice.locks.scripts import text
from timeslice.settings import default_node

_SHOWN = 4  # of what is missing
_GROUPS = 8  # at most so many are tried
_SAMPLE = "any"  # where no group is known
_SEPARATOR = "\n"
# ARGV: command and arguments, separated. Reply: the places of those that are not allowed.
_ASK = f"""
local refused = {{}}
for place, line in ipairs(ARGV) do
  local words = {{}}
  for word in string.gmatch(line, '[^{_SEPARATOR.encode("unicode_escape").decode()}]+') do
    words[#words + 1] = word
  end
  local known, allowed = pcall(redis.acl_check_cmd, unpack(words))
  if known and not allowed then
    refused[#refused + 1] = place
  end
end
return refused
"""
# What stands before and after the key, where it is not simply the first argument.
_SHAPES = {
    "eval": (("return 1", "1"), ()),
    "eval_ro": (("return 1", "1"), ()),
    "evalsha": (("0" * 40, "1"), ()),
    "evalsha_ro": (("0" * 40, "1"), ()),
    "xread": (("STREAMS",), ("0",)),
    "xreadgroup": (("GROUP", "agent", "n", "STREAMS"), (">",)),
    "xgroup|create": ((), ("agent", "0")),
}
_WRITES = frozenset(
    [
        "del",
        "eval",
        "evalsha",
        "expire",
        "hdel",
        "hincrby",
        "hset",
        "persist",
        "pexpire",
        "sadd",
        "srem",
        "xack",
        "xadd",
        "xdel",
        "xgroup|create",
        "xreadgroup",
        "zadd",
        "zrem",
        "zremrangebyrank",
        "zremrangebyscore",
    ]
)
_KEYLESS = frozenset({"command", "exec", "info", "multi", "ping", "time", "unwatch"})


@dataclass(frozen=True)
class Need:
    command: str
    key: str

    @property
    def line(self) -> str:
        """As ``_ASK`` takes it."""
        before, after = _SHAPES.get(self.command, ((), ()))
        return _SEPARATOR.join((*self.command.split("|"), *before, *([self.key] if self.key else ()), *after))

    def __str__(self) -> str:
        return f"{self.command.replace('|', ' ').upper()} {self.key}".rstrip()


def access(
    session: Session, listed: Sequence[str], role: str | None = None, named: Sequence[str] = ()
) -> list[Finding]:
    """Which roles the current user can act as, and in which groups: those ``named``, all of them, else any ``listed``.

    With a ``role``, only that one; an error says what it lacks.
    """
    user = _whoami(session)
    groups = list(named or listed)[:_GROUPS] or [_SAMPLE]
    able: dict[str, list[str]] = {}
    lacking: dict[str, list[Need]] = {}
    for each in [role] if role else ROLES:
        lacks = {group: missing(session, each, group) for group in groups}
        fit = [group for group, needs in lacks.items() if not needs]
        if fit and not (named and len(fit) < len(groups)):
            able[each] = fit
        else:
            lacking[each] = next(needs for needs in lacks.values() if needs)
    if able:
        roles = (each if len(fit) == len(groups) else f"{each} (of {', '.join(fit)})" for each, fit in able.items())
        return [Finding("ok", "access", f"user {user} may act as {', '.join(roles)}")]
    nearest = min(lacking, key=lambda each: len(lacking[each]))
    lacks_ = lacking[nearest]
    words = ", ".join(map(str, lacks_[:_SHOWN])) + (f" and {len(lacks_) - _SHOWN} more" if len(lacks_) > _SHOWN else "")
    return [
        Finding(
            "error",
            "access",
            f"user {user} may not act as {role or 'any role'}; as {nearest} it lacks: {words}",
            f"give it the rules that `timeslice acl` prints for {nearest}; if it is meant for some groups only, name "
            "them with --group",
        )
    ]


def _whoami(session: Session) -> str:
    try:
        return text(session.ask(session.driver.client.acl_whoami))
    except ServerUnsuitableError:
        return parse_url(session.url).username or "default"


def missing(session: Session, role: str, group: str) -> list[Need]:
    """What the current user lacks of a role in one group."""
    needs = list(dict.fromkeys(_needs(role, session.keys, group)))
    key = session.keys.group(group).state  # not touched: it tells a cluster where to ask
    verb = "EVAL_RO" if role == "viewer" else "EVAL"

    def ask() -> Any:
        return session.driver.client.execute_command(verb, _ASK, 1, key, *(need.line for need in needs))  # type: ignore[no-untyped-call]

    try:
        return [needs[place - 1] for place in session.ask(ask)]
    except ServerUnsuitableError as error:
        if not is_denial(error):
            raise
        return [Need(verb.lower(), ""), *needs]


def _needs(role: str, keys: Keys, group: str) -> Iterator[Need]:
    known = patterns(keys, (group,), (default_node(),))
    for rule in ROLES[role]:
        for command in rule.commands.split():
            if command in _KEYLESS or command.startswith(("acl|", "cluster|")):
                yield Need(command, "")
                continue
            for kind, right in rule.keys.items():
                if right == ("R" if command in _WRITES else "W"):
                    continue
                for pattern in known[kind]:
                    yield Need(command, re.sub(r"\\(.)", r"\1", pattern).replace("*", "x"))
