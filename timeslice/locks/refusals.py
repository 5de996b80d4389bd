"""What to do about a server that answers, and refuses: rights that a user lacks, writes that it does not take now."""

from __future__ import annotations

import re

import redis

from timeslice.addresses import Address
from timeslice.locks.permissions import ROLES

_BY_SCRIPT = ("user executing the script can't", "ACL failure in script")  # as Redis says it, and Valkey
_ANSWERS = (
    redis.exceptions.ResponseError,
    redis.exceptions.BusyLoadingError,
    redis.exceptions.ClusterError,
    redis.exceptions.SlotNotCoveredError,
)
_ANSWERS_BY_WORDS = ("the sentinels say", "max number of clients")
# What the answer says -> what to do.
_ADVICE = {
    "NOREPLICAS": "It takes no writes, for fewer replicas are in step than min-replicas-to-write asks for: start them "
    "again, or lower that setting",
    "MISCONF": "It takes no writes, for it could not save its data: look for a full or failing disk in its log",
    "read only replica": "It is a replica: use the master's address, or redis+sentinel://, which finds the master",
    "link with master": "It is a replica that lost its master: use the master's address, or redis+sentinel://",
    "cluster|slot|ttl exhausted": "Servers of it are gone, or a failover is under way: wait; if it lasts, run: "
    "redis-cli --cluster check HOST:PORT",
    "the sentinels say": "A failover is under way, or no replica can take over: wait; if it lasts, ask a sentinel: "
    "redis-cli -p 26379 SENTINEL CKQUORUM NAME",
    "loading": "It reads its data after a start: wait until it has",
    "max number of clients": "Others have all its connections: close some, or raise maxclients",
    "BUSY": "A script of somebody else's runs there for too long: wait, or end it with: redis-cli SCRIPT KILL",
}


def is_no_right(error: BaseException) -> bool:
    """Whether the server knows the user and refuses one command or key, also to a script."""
    return isinstance(error, redis.exceptions.NoPermissionError) or any(each in str(error) for each in _BY_SCRIPT)


def no_right(words: str, address: Address) -> str:
    """What is missing, and which role has it."""
    user = address.username or "default"
    asked = re.search(r"'([^']+)' command", words)
    roles = [
        role for role, rules in ROLES.items() if asked and any(asked[1] in each.commands.split() for each in rules)
    ]
    who = f"Users made for these roles may: {', '.join(roles)}. " if roles else ""
    return (
        f"Redis at {address.shown} refuses this to user {user}, who lacks the right to it ({words}). {who}What each "
        "role needs is printed by: timeslice acl; what this user lacks: timeslice doctor --role ROLE"
    )


def answers(error: BaseException) -> bool:
    """Whether somebody is there who said no."""
    return isinstance(error, _ANSWERS) or any(words in str(error) for words in _ANSWERS_BY_WORDS)


def not_now(words: str, where: str) -> str:
    """What the server says, and what to do."""
    return f"Redis at {where} answers, but refuses what was asked ({words}). {advice(words)}"


def advice(words: str) -> str:
    """What to do about an answer."""
    found = (do for pattern, do in _ADVICE.items() if re.search(pattern, words, re.IGNORECASE))
    return next(found, "Run: timeslice doctor")
