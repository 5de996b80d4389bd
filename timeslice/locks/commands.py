"""What drivers send and what comes back, as values."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from timeslice.locks.flows import Entries, Wait
from timeslice.locks.scripts import Call, text

Command = Sequence[str | int]

# The longest wait at once: how soon a connection that died silently is noticed. With the margin that its socket has, it
# is well below the time in which an agent must take an order.
BLOCK_S = 3.0


def entries_of(reply: Any) -> Entries:
    """XREAD's answer for one stream: [(id, {field: value})]; of redis-py's clients, or as the server sent it."""
    found: Entries = []
    for _, items in reply or []:
        for entry_id, fields in items:
            pairs = fields.items() if isinstance(fields, dict) else zip(fields[::2], fields[1::2], strict=True)
            found.append((text(entry_id), {text(k): text(v) for k, v in pairs}))
    return found


def script_command(call: Call[Any], *, whole: bool) -> Command:
    """EVALSHA, or EVAL when the server does not know the script (which also teaches it)."""
    verb, body = ("EVAL", call.script.source) if whole else ("EVALSHA", call.script.sha)
    verb += "_RO" if call.script.reads_only else ""
    return [verb, body, len(call.keys), *call.keys, *call.args]


def read_command(wait: Wait, until: float) -> Command:
    """XREAD for what is left of the wait, or its longest piece; 0 would mean for ever."""
    left_ms = int(min(until - time.monotonic(), BLOCK_S) * 1000)
    return ["XREAD", "BLOCK", max(left_ms, 1), "STREAMS", wait.key, wait.after]


def first_error(replies: list[Any]) -> list[Any]:
    for reply in replies:
        if isinstance(reply, Exception):
            raise reply
    return replies
