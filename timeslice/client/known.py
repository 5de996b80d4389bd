"""Whether a group that no agent serves is a mistake: it is if agents serve others, and else it is one to wait for."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from typing import Any

from timeslice.client.steps import Steps
from timeslice.errors import ServerUnsuitableError, UnknownGroupError
from timeslice.locks.keys import Keys
from timeslice.locks.scripts import text
from timeslice.names import is_name


def served_groups(pipe: Callable[[Sequence[tuple[str, ...]]], Any], keys: Keys) -> Steps[list[str]]:
    """The groups that agents serve now. ``pipe`` sends plain commands."""
    (members,) = yield pipe([("SMEMBERS", keys.groups)])
    names = sorted(filter(is_name, map(text, members)))
    counts: list[int] = []
    if names:
        try:
            counts = yield pipe([("ZCARD", keys.group(name).nodes) for name in names])
        except ServerUnsuitableError:
            names = []  # some are others', and not for us to look at
    return [name for name, count in zip(names, counts, strict=True) if count]


def ensure_known(pipe: Callable[[Sequence[tuple[str, ...]]], Any], keys: Keys, group: str) -> Steps[None]:
    """UnknownGroupError for a name that must be a mistake: agents serve others, and never served this one."""
    (mode,) = yield pipe([("HGET", keys.group(group).state, "mode")])
    served = yield from served_groups(pipe, keys)
    if served and group not in served and text(mode or "") != "served":
        raise unknown(group, served, "")


def unknown(group: str, served: Sequence[str], hint: str) -> UnknownGroupError:
    """The error, with the nearest names. ``hint``: what else the caller may have meant."""
    near = difflib.get_close_matches(group, served, n=3, cutoff=0.4) or served[:5]
    return UnknownGroupError(
        f"no agent serves group {group!r}; served are: {', '.join(near)}. Check the name, or add it to an agent with "
        f"--group{hint}.",
        group=group,
    )
