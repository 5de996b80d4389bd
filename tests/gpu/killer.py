"""A tool that kills who called it, at a chosen call: an agent that dies with the tool at work, or right behind it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tests.gpu.node import Node

_SCRIPT = """#!/bin/sh
[ -f {folder}/at ] && read -r when number words < {folder}/at
case "$*" in
*"${{words:-none}}"*)
    number_of_this=1
    while ! mkdir "{folder}/call-$number_of_this" 2> /dev/null; do number_of_this=$((number_of_this + 1)); done
    if [ "$number_of_this" = "$number" ]; then
        if [ "$when" = after ]; then {tool} "$@"; kill -9 $PPID; exit 0; fi
        kill -9 $PPID
    fi
esac
exec {tool} "$@"
"""


@dataclass(frozen=True)
class Killer:
    """``tool`` is cuda-checkpoint; without a point it only passes on."""

    folder: Path
    tool: Path

    @classmethod
    def make(cls, folder: Path, node: Node) -> Killer:
        folder.mkdir()
        made = cls(folder, folder / "cuda-checkpoint")
        made.tool.write_text(_SCRIPT.format(folder=folder, tool=node.tool))
        made.tool.chmod(0o755)
        return made

    def at(self, when: str, words: str, number: int = 1) -> None:
        """From now on: ``before`` or ``after`` the number-th call with these words."""
        for call in self.folder.glob("call-*"):
            call.rmdir()
        draft = self.folder / "at.new"
        draft.write_text(f"{when} {number} {words}\n")
        draft.replace(self.folder / "at")

    def never(self) -> None:
        (self.folder / "at").unlink()
