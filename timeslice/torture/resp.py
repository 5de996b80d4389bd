"""Where messages of the Redis protocol end: as much of it as a proxy must know to drop one reply of two."""

from __future__ import annotations

_SIZED = b"$=!"  # a length, then so many bytes
_LISTS = b"*~>"  # a count, then so many messages
_PAIRS = b"%|"  # a count, then twice as many messages
_END = b"\r\n"


def end_of_message(data: bytes, start: int = 0) -> int | None:
    """Index after the message that begins at ``start``; None while it is not all there."""
    line = data.find(_END, start)
    if line < 0:
        return None
    kind, end = data[start], line + len(_END)
    if kind in _SIZED:
        size = int(data[start + 1 : line])
        if size >= 0:
            end += size + len(_END)
        return end if end <= len(data) else None
    inner = 0
    if kind in _LISTS or kind in _PAIRS:
        inner = int(data[start + 1 : line]) * (2 if kind in _PAIRS else 1)
    for _ in range(inner):
        after = end_of_message(data, end)
        if after is None:
            return None
        end = after
    return end_of_message(data, end) if kind == b"|"[0] else end  # an attribute stands before its message


def messages_in(data: bytes) -> int | None:
    """How many messages ``data`` is; None while the last one is not all there."""
    count = at = 0
    while at < len(data):
        after = end_of_message(data, at)
        if after is None:
            return None
        count, at = count + 1, after
    return count
