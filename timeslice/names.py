"""Rules for the names people choose: groups, jobs, nodes and the key prefix.

Checked before a byte is sent, because names end up in Redis keys, file names and metric labels.
"""

from __future__ import annotations

import re

from timeslice.errors import InvalidNameError

MAX_LENGTH = 63  # the Kubernetes label-value rule, so that a name fits wherever a label does

_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
# Braces would move a key's hash tag, and with it the key to another cluster slot than its group's.
_PREFIX = re.compile(r"[!-z|~]{1,63}")


def check_name(kind: str, value: str) -> str:
    """Return ``value`` if it may name a ``kind`` (group, job, node), else raise InvalidNameError."""
    if isinstance(value, str) and _NAME.fullmatch(value):
        return value
    raise InvalidNameError(
        f"{value!r} can't name a {kind}: use 1 to {MAX_LENGTH} of the letters A-Z a-z, the digits 0-9 "
        "and . _ -, with a letter or digit first and last",
        group=value if kind == "group" else None,
        job=value if kind == "job" else None,
        node=value if kind == "node" else None,
    )


def is_name(value: str) -> bool:
    """Whether it may name a group, job or node. For what others have written."""
    return bool(_NAME.fullmatch(value))


def check_prefix(value: str) -> str:
    """Return ``value`` when it may start every Redis key, else raise InvalidNameError."""
    if isinstance(value, str) and _PREFIX.fullmatch(value):
        return value
    raise InvalidNameError(
        f"{value!r} can't be the key prefix: use 1 to {MAX_LENGTH} printable ASCII characters "
        "without spaces and braces, for example 'ts'"
    )


def sanitise_name(text: str, *, fallback: str, room: int = MAX_LENGTH) -> str:
    """Turn free text, such as a host name, into a valid name of at most ``room`` characters."""
    kept = re.sub(r"[^A-Za-z0-9._-]", "-", text).lstrip("._-")
    return kept[:room].rstrip("._-") or fallback
