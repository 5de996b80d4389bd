"""The table of what each role needs, compared with what the sources send."""

from __future__ import annotations

import pytest

from tests.security.sources import VERBS, commands_of_verb, plain_commands
from timeslice.locks.permissions import ROLES

# Who calls which verb; tests/security/test_under_acl.py sends each as its first caller here.
CALLS = {
    "client": {"acquire", "join", "point", "phase", "renew", "yield", "cancel", "register", "waits", "nudge", "look"},
    "agent": {
        "alone/take_node",
        "alone/leave_node",
        "heartbeat",
        "leave",
        "accepted",
        "ack",
        "report",
        "register",
        "look",
    },
    "coordinator": {"alone/clock", "own", "disown", "plan", "step", "poke", "promote", "settle", "look"},
    "viewer": {"look"},
    "operator": {
        *("pause", "configure", "delete", "cancel", "yield", "forget", "revoke", "repair", "evict", "drain"),
        "look",
    },
}
# Whose code sends commands without a script.
SENDS = {
    "client": ("client",),
    "agent": ("agent", "web.py"),
    "coordinator": ("coordinator", "web.py"),
    "viewer": tuple(
        f"cli/{name}.py"
        for name in ("status", "events", "jobs", "doctor", "checks", "facts", "access", "bundle", "session", "report")
    ),
    "operator": ("cli",),
}
# What the drivers send for them: scripts, waits, INFO, and what redis-py asks a cluster.
CONNECT = {"cluster|slots", "command", "ping"}
SCRIPTS = {"eval", "evalsha", "eval_ro", "evalsha_ro"}
DRIVER = {
    "client": {*CONNECT, *SCRIPTS, "xread"},
    "agent": {*CONNECT, *SCRIPTS, "xread", "info", "xgroup|create"},
    "coordinator": {*CONNECT, *SCRIPTS, "xread", "info"},
    "viewer": {*CONNECT, "eval_ro", "evalsha_ro", "info"},
    "operator": {*CONNECT, *SCRIPTS, "info"},
}

# Of no role: with it passwords can be read. `doctor` uses it where a user has it anyway.
OPTIONAL = {"config_get"}


def test_every_verb_is_somebodys() -> None:
    """A new script shows up here, and with it the commands that its callers need."""
    assert set.union(*CALLS.values()) == set(VERBS)


@pytest.mark.parametrize("role", ROLES)
def test_the_table_has_what_the_sources_send_and_nothing_more(role: str) -> None:
    """A command that a script or a module begins or ceases to send must be entered or taken out."""
    allowed = {command for rule in ROLES[role] for command in rule.commands.split()}
    verbs = set[str]().union(*(commands_of_verb(verb) for verb in CALLS[role]))
    assert allowed == verbs | (plain_commands(*SENDS[role]) - OPTIONAL) | DRIVER[role]
