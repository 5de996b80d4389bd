"""Reads Lua verbs with their includes. A script is known by its SHA-1, as the server knows it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from importlib import resources

_INCLUDE = "-- @include "
# Called so that the server refuses a write, and a user who may not write may call it.
_READS_ONLY = frozenset({"look", "alone/clock"})


@dataclass(frozen=True)
class Script:
    """One verb: what EVALSHA is called with, and what SCRIPT LOAD needs if the server forgot it."""

    name: str
    source: str
    sha: str

    @property
    def reads_only(self) -> bool:
        return self.name in _READS_ONLY


@cache
def load(name: str) -> Script:
    """The script ``lua/<name>.lua``, each include put in once, in the order named."""
    folder = resources.files("timeslice.locks") / "lua"
    lines = []
    for line in (folder / f"{name}.lua").read_text().splitlines():
        if line.startswith(_INCLUDE):
            lines += [(folder / "include" / f"{part}.lua").read_text() for part in line[len(_INCLUDE) :].split()]
        else:
            lines.append(line)
    source = "\n".join(lines) + "\n"
    return Script(name, source, hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest())


def load_all() -> None:
    """Read them all now, for a process that may not be able to open a file later."""
    folder = resources.files("timeslice.locks") / "lua"
    for part in ("", "alone/"):
        for file in (folder / part).iterdir():
            if file.name.endswith(".lua"):
                load(part + file.name.removesuffix(".lua"))
