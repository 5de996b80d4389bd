"""How a backend is written down for an agent: ``name`` or ``name:key=value,key=value``.

A value may hold anything but a comma.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from timeslice.errors import UsageError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


def parse_spec(spec: str) -> tuple[str, dict[str, str]]:
    """Name and options. UsageError saying what is wrong; nothing is passed over."""
    name, colon, rest = spec.partition(":")
    if not _NAME.fullmatch(name):
        raise UsageError(f"backend {spec!r}: it has no name; write NAME or NAME:KEY=VALUE,KEY=VALUE")
    options: dict[str, str] = {}
    for pair in rest.split(",") if colon else ():
        key, equals, value = pair.partition("=")
        if not equals or not _KEY.fullmatch(key):
            hint = "; a value can't hold a comma, put what needs one into a script"
            raise UsageError(f"backend {spec!r}: {pair!r} is no option, write KEY=VALUE{hint if options else ''}")
        if key in options:
            raise UsageError(f"backend {spec!r}: option {key} is given twice")
        options[key] = value
    return name, options


def parse_specs(group: str, specs: Sequence[str]) -> dict[str, dict[str, str]]:
    """Name -> options, in the order of preference. UsageError for two of one name that differ."""
    found: dict[str, dict[str, str]] = {}
    for spec in specs:
        name, options = parse_spec(spec)
        if found.setdefault(name, options) != options:
            raise UsageError(f"group {group}: backend {name} is given twice, with other options; give it once")
    return found
