"""A call as a value, and what all the verbs' modules share."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Generic, TypeVar

from timeslice.errors import StaleCommandError
from timeslice.locks.keys import GroupKeys
from timeslice.locks.loader import Script, load

T = TypeVar("T")
Arg = str | int

CALL_DEADLINE_S = 10.0  # of a call that is no wait, where nobody says otherwise
_NUMBER = re.compile(r"-?[0-9]{1,18}")


@dataclass(frozen=True)
class Call(Generic[T]):
    """One script call. Safe to send twice: every verb answers a repeat like the first."""

    script: Script
    keys: tuple[str, ...]
    args: tuple[Arg, ...]
    parse: Callable[[list[Any]], T]
    deadline_s: float | None = None  # how long a driver goes on asking when there is no answer; None: its patience


def text(value: Any) -> str:
    """A reply element as str, whatever ``decode_responses`` was and whoever wrote it."""
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def number(value: str) -> int:
    """A stored whole number; 0 for what is none."""
    return int(value) if _NUMBER.fullmatch(value) else 0


def when(ms: int) -> str:
    """A server time for people, in UTC."""
    return datetime.fromtimestamp(ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def in_words(value: Any) -> str:
    """A reason as a script tells or stores it, with its times (@ and milliseconds) in words."""
    return re.sub(r"@([0-9]{1,14})(?![0-9])(?:\.[0-9]+)?", lambda m: when(int(m[1])), text(value))


def new_request_id() -> str:
    """Identity of a request that can't be known by what it asks for; made with the call, so a repeat carries it too."""
    return secrets.token_hex(10)


def make_call(name: str, group: GroupKeys, args: Sequence[Arg], parse: Callable[[list[Any]], T]) -> Call[T]:
    return Call(load(name), group.all, tuple(args), parse)


def check_fresh(group: GroupKeys, swap: int, reply: list[Any]) -> None:
    if text(reply[0]) == "stale":
        raise StaleCommandError(
            f"group {group.name}: swap {swap} is no longer ours; another coordinator or swap took its place",
            group=group.name,
            token=int(reply[1]),
        )
