"""Writes docs/reference/cli.md from the commands' own help, and python.md from the public docstrings.

``--check`` only says whether they are stale.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import get_origin

import click

import timeslice
from timeslice.cli.main import main

REFERENCE = Path(__file__).parent.parent / "docs" / "reference"
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


PYTHON_HEAD = """\
# The Python package `timeslice`

<!-- Written by scripts/docs from the docstrings. Change them there. -->

Everything here is imported from `timeslice` itself; what is not here may change without notice.
Times are seconds.
"""


# Methods that the client's own modules call on each other, and classes that users are handed, never make.
INTERNAL = {
    *("abandon", "orders", "begin_yield", "end_yield", "note_clock", "note_renewal", "renewal", "yield_call"),
    *("yield_later", "yield_name", "inherited", "raise_floor", "give_up", "leave_at_point", "regranted"),
    *("begin_body", "stands_on", "stands_beside", "pause"),
}
HANDED = {
    *("AcquireResult", "AsyncLease", "Grant", "GroupStatus", "Hold", "HoldOptions", "Lease", "OnAccelerators", "Phase"),
    *("Residency", "Server", "Workload", "YieldResult", "Yielded"),
}
# Types without a docstring of their own.
ALIASES = {
    "Mode": (
        'Literal["offload", "discard"]',
        "What becomes of state that leaves a device: kept in host memory, or dropped.",
    ),
    "OnLost": (
        "Callable[[Lease], object] | Callable[[AsyncLease], object]",
        "What ``on_lost=`` takes: called once with the lease that is lost, on a thread of its own.",
    ),
}


def _plain(signature: inspect.Signature) -> inspect.Signature:
    """A model's fields without their bounds, which are nobody's concern who calls it."""
    bare = inspect.Parameter.empty
    return signature.replace(
        parameters=[
            each.replace(annotation=bare) if get_origin(each.annotation) else each
            for each in signature.parameters.values()
        ]
    )


def signature_of(thing: object) -> str:
    """The call as one line, without the types of what comes back in annotations' quotes. Alike on every Python."""
    try:
        return str(_plain(inspect.signature(thing))).replace("''", '""').replace("'", "")  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return ""


def members_of(kind: type) -> Iterator[tuple[str, object]]:
    """Public methods and properties with a docstring, those of its own bases in this package included."""
    for name, member in inspect.getmembers(kind):
        home = next((base for base in kind.__mro__ if name in vars(base)), object)
        documented = inspect.isfunction(member) or isinstance(member, property)
        if (
            not name.startswith("_")
            and name not in INTERNAL
            and documented
            and home.__module__.startswith("timeslice")
            and member.__doc__
        ):
            yield name, member


def render_python() -> str:
    """The page."""
    parts = [PYTHON_HEAD]
    for name in sorted(timeslice.__all__, key=str.lower):
        thing = getattr(timeslice, name)
        if name.startswith("__"):
            continue
        if alias := ALIASES.get(name):
            parts.append(f"## {name}\n\n```text\n{name} = {alias[0]}\n```\n\n{alias[1]}\n")
            continue
        is_error = inspect.isclass(thing) and issubclass(thing, Exception)
        heading = f"## {name}\n\n"
        if not is_error and name not in HANDED:
            heading += f"```text\n{name}{signature_of(thing)}\n```\n\n"
        parts.append(heading + (inspect.getdoc(thing) or "").strip() + "\n")
        if inspect.isclass(thing) and not is_error:
            for member_name, member in members_of(thing):
                call = (
                    ""
                    if isinstance(member, property)
                    else signature_of(member).replace("(self, ", "(").replace("(self)", "()")
                )
                parts.append(
                    f"### {name}.{member_name}\n\n```text\n{member_name}{call}\n```\n\n{inspect.getdoc(member)}\n"
                )
    return "\n".join(parts)


PAGES = {"cli.md": render, "python.md": render_python}


if __name__ == "__main__":
    if sys.argv[1:] not in ([], ["--check"]):
        sys.exit("usage: scripts/docs [--check]")
    for file, make in PAGES.items():
        target, page = REFERENCE / file, make()
        if sys.argv[1:]:
            if not target.exists() or target.read_text() != page:
                sys.exit(f"{target} is stale; run: ./scripts/docs")
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(page)
