"""Writes docs/reference/cli.md from the commands' own help. ``--check`` only says whether it is stale."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import click

from timeslice.cli.main import main

PAGE = Path(__file__).parent.parent / "docs" / "reference" / "cli.md"
HEAD = """\
# The command `timeslice`

<!-- Written by scripts/docs from the commands themselves. Change the help text there. -->

Options that stand before the command (`--url`, `--prefix`) win over the environment.
"""


def walk(command: click.Command, context: click.Context) -> Iterator[tuple[str, str]]:
    """Each command's full name and its help as a user sees it."""
    yield context.command_path, command.get_help(context)
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            if below is None or below.hidden:
                continue
            with click.Context(below, info_name=name, parent=context, max_content_width=100) as inner:
                yield from walk(below, inner)


def render() -> str:
    """The page."""
    with click.Context(main, info_name="timeslice", max_content_width=100, terminal_width=100) as context:
        parts = [f"## {name}\n\n```text\n{help_text.rstrip()}\n```\n" for name, help_text in walk(main, context)]
    lines = "\n".join([HEAD, *parts]).splitlines()
    return "\n".join(line.rstrip() for line in lines) + "\n"


if __name__ == "__main__":
    page = render()
    if sys.argv[1:] == ["--check"]:
        if not PAGE.exists() or PAGE.read_text() != page:
            sys.exit(f"{PAGE} is stale; run: ./scripts/docs")
    elif sys.argv[1:]:
        sys.exit("usage: scripts/docs [--check]")
    else:
        PAGE.parent.mkdir(parents=True, exist_ok=True)
        PAGE.write_text(page)
