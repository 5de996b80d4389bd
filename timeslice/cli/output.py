"""How results look: tables for people, JSON for programs. Only results go to stdout."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import click

from timeslice.errors import duration, printable

SCHEMA = 1  # of every JSON document; docs/reference/json.md

F = TypeVar("F", bound=Callable[..., Any])

seconds = duration

_LARGEST = 2**63  # bytes that a signed 64-bit number holds


def json_option(command: F) -> F:
    """The option ``--json``, passed as ``as_json``."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON (docs/reference/json.md).")(command)


def print_json(document: Mapping[str, Any], *, line: bool = False) -> None:
    """Print one document with its schema number; ``line`` keeps it on one line."""
    click.echo(json.dumps({"schema": SCHEMA, **document}, indent=None if line else 2))
    sys.stdout.flush()


def note(message: str) -> None:
    """Tell people something that is no result."""
    click.echo(printable(message), err=True)


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, empty: str) -> None:
    """A table on stdout: drawn on a terminal, else aligned columns of which nothing is cut off.

    Without rows ``empty`` goes to stderr: a script then reads nothing.
    """
    cells = [[clean(cell) for cell in row] for row in rows]
    if not cells:
        note(empty)
    elif sys.stdout.isatty():
        _draw(columns, cells)
    else:
        widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
        for row in ([name.upper() for name in columns], *cells):
            line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            click.echo(line.rstrip())


def _draw(columns: Sequence[str], cells: list[list[str]]) -> None:
    from rich.cells import cell_len
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(soft_wrap=False, highlight=False)
    room = console.width - 2 * (len(columns) - 1)
    whole = [[name.upper(), *column] for name, *column in zip(columns, *cells, strict=True)]
    natural = [max(map(cell_len, column)) for column in whole]
    words = [max(cell_len(word) for cell in column for word in cell.split(" ")) for column in whole]
    narrow = [max(word, min(width, _NARROW)) for word, width in zip(words, natural, strict=True)]
    if sum(narrow) > room:
        _draw_fields(columns, cells)
        return
    widths = natural
    while sum(widths) > room:  # the widest gives way
        cap = max(width for width, least in zip(widths, narrow, strict=True) if width > least)
        widths = [max(least, min(width, cap - 1)) for width, least in zip(widths, narrow, strict=True)]
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for name, width in zip(columns, widths, strict=True):
        table.add_column(name.upper(), width=width)
    for row in cells:
        table.add_row(*(Text(cell, style=_STYLES.get(cell.split(" ", 1)[0], "")) for cell in row))
    console.print(table)


def _draw_fields(columns: Sequence[str], cells: list[list[str]]) -> None:
    """For a terminal that is too narrow for the columns: a line for each cell, and nothing is left out."""
    for at, row in enumerate(cells):
        if at:
            click.echo()
        print_fields(dict(zip(columns, row, strict=True)))


_NARROW = 16  # columns of sentences are folded down to this; words are never broken

_STYLES = {
    "blocked": "bold red",
    "faulted": "bold red",
    "unknown": "bold red",
    "error": "bold red",
    "unreachable": "bold red",
    "warning": "yellow",
    "paused": "yellow",
    "swapping": "cyan",
    "held": "green",
    "ok": "green",
    "alive": "green",
}


def print_fields(fields: Mapping[str, object]) -> None:
    """Names and values, one a line."""
    width = max(map(len, fields))
    for name, value in fields.items():
        click.echo(f"{name.ljust(width)}  {clean(value)}")


def clean(value: object) -> str:
    """One line of text that can't steer a terminal: names and labels come from other people's programs."""
    text = "-" if value is None or value == "" else str(value)
    return "".join(each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in text)


def size(value: int) -> str:
    """Bytes for people."""
    amount = float(value)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.4g} {unit}"
        amount /= 1024
    return f"{amount:.4g} TiB"


class Seconds(click.FloatRange):
    """A duration: a type of click options. Unlike FloatRange it takes no ``nan`` and no ``inf``."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        found: float = super().convert(value, param, ctx)
        if not math.isfinite(found):
            self.fail(f"{value!r} is no number of seconds", param, ctx)
        return found


def parse_size(text: str) -> int:
    """Bytes of ``256M``, ``1.5GiB`` or ``4096``: a type of click options."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(?:i?B)?|B)?", text.strip(), flags=re.IGNORECASE)
    if not match:
        raise click.BadParameter(f"{text!r} is no size; write for example 256M or 1.5GiB")
    amount = float(match[1]) * 1024 ** " KMGT".index((match[2] or " ").upper())
    if amount >= _LARGEST:
        raise click.BadParameter(f"{text!r} is more than any machine has")
    return int(amount)


def parse_device_size(text: str) -> int:
    """Size of an emulated device: a type of click options. Warns of one that this machine can't fill."""
    import psutil

    found, memory = parse_size(text), psutil.virtual_memory().total
    if not found:
        raise click.BadParameter("a device needs some memory; write for example 256M")
    if found > memory:
        note(f"warning: an emulated device of {size(found)} can't be filled: this machine has {size(memory)} of memory")
    return found
