"""Help, and the page generated from it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from tests.cli.conftest import Cli, World
from timeslice.cli.main import COMMANDS, main
from timeslice.events import KINDS, Event
from timeslice.models import GroupConfig

ROOT = Path(__file__).parent.parent.parent


def commands(
    command: click.Command = main, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Every command with its path."""
    yield path, command
    if isinstance(command, click.Group):
        with click.Context(command) as context:
            for name in command.list_commands(context):
                below = command.get_command(context, name)
                assert below is not None
                yield from commands(below, (*path, name))


ALL = list(commands())


@pytest.mark.parametrize(("path", "command"), ALL, ids=[" ".join(path) or "timeslice" for path, _ in ALL])
def test_every_command_has_help_an_example_and_described_options(path: tuple[str, ...], command: click.Command) -> None:
    """A user who types --help learns what it does, sees it used, and what each option means."""
    assert command.help
    assert "Example" in (command.epilog or "")
    assert " ".join(("timeslice", *path)) in (command.epilog or "")
    for option in command.params:
        if isinstance(option, click.Option):
            assert option.help, f"{option.name} has no help"


@pytest.mark.parametrize("name", COMMANDS)
def test_the_line_in_the_list_is_the_commands_own(name: str) -> None:
    """The list of commands, which loads none of them, does not say something else than they do."""
    with click.Context(main) as context:
        command = main.get_command(context, name)
    assert command is not None
    assert (command.help or "").startswith(COMMANDS[name][1])


def test_help_loads_nothing_heavy() -> None:
    """`timeslice --help` and completion answer at once: no Redis, no pydantic, no tables."""
    code = (
        "import sys\nfrom click.testing import CliRunner\nfrom timeslice.cli.main import main\n"
        "assert CliRunner().invoke(main, ['--help']).exit_code == 0\n"
        "print(*sorted({m.split('.')[0] for m in sys.modules}))"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert set(loaded.stdout.split()).isdisjoint({"redis", "pydantic", "rich", "numpy", "asyncio"})


def test_the_reference_page_is_as_the_commands_are() -> None:
    """docs/reference/cli.md is generated; `scripts/docs --check` fails when it is stale."""
    check = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "docs.py"), "--check"], capture_output=True, text=True, check=False
    )
    assert check.returncode == 0, check.stderr


def test_every_command_is_on_the_reference_page() -> None:
    """No command is left out of the documentation."""
    page = (ROOT / "docs" / "reference" / "cli.md").read_text()
    headings = {line.removeprefix("## ") for line in page.splitlines() if line.startswith("## ")}
    assert headings == {" ".join(("timeslice", *path)) for path, _ in ALL}


def fields_of(document: object) -> set[str]:
    """Every field name anywhere in a document."""
    if isinstance(document, dict):
        return set(document) | {name for value in document.values() for name in fields_of(value)}
    if isinstance(document, list):
        return {name for value in document for name in fields_of(value)}
    return set()


def test_the_schema_page_names_every_field_that_is_printed(cli: Cli, world: World) -> None:
    """docs/reference/json.md knows every field of every document of a busy group."""
    page = set(re.findall(r"\w+", (ROOT / "docs" / "reference" / "json.md").read_text()))
    world.serve("trainers")
    world.swap("trainers", out="a", into="b")
    world.hold_lock_only("samplers", "a")
    for command in (
        ("status",),
        ("queue", "trainers"),
        ("groups",),
        ("nodes",),
        ("jobs",),
        ("ready", "a"),
        ("doctor",),
    ):
        printed = fields_of(json.loads(cli(*command, "--json").stdout))
        assert printed - page - set(GroupConfig.model_fields) == set(), command


def test_the_schema_page_names_every_kind_of_event_and_its_fields() -> None:
    """The table of events is complete."""
    page = (ROOT / "docs" / "reference" / "json.md").read_text()
    for name, kind in KINDS.items():
        row = next(line for line in page.splitlines() if line.startswith("|") and f"`{name}`" in line.split("|")[1])
        assert set(re.findall(r"`(\w+)`", row.split("|")[2])) == set(kind.model_fields) - set(Event.model_fields), name


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ("status --url redis://h", "timeslice --url URL status ..."),
        ("node forget n --prefix x", "timeslice --prefix TEXT node forget ..."),
    ],
)
def test_a_global_option_behind_the_command_is_sent_to_its_place(words: str, hint: str) -> None:
    """A usage error with the right order."""
    result = CliRunner().invoke(main, words.split())
    assert result.exit_code == 2
    assert f"Put it before the command: {hint}" in result.stderr


def test_an_option_of_a_command_before_it_is_sent_to_its_place() -> None:
    """The other way round."""
    result = CliRunner().invoke(main, ["--json", "status"])
    assert result.exit_code == 2
    assert "stand behind it: timeslice COMMAND --json ..." in result.stderr


@pytest.mark.parametrize(("typed", "meant"), [("staus", "status"), ("quue", "queue"), ("evnts", "events")])
def test_a_command_that_is_misspelt_is_guessed(typed: str, meant: str) -> None:
    """As groups are."""
    result = CliRunner().invoke(main, [typed])
    assert result.exit_code == 2
    assert f"No such command '{typed}'. Did you mean {meant}" in result.stderr


def test_the_demo_says_what_to_install_and_how_in_a_checkout() -> None:
    """What a stranger has before anything is published is the checkout."""
    code = "import sys; sys.modules['numpy'] = None; from timeslice.cli.main import main; main()"
    line = [sys.executable, "-c", code, "demo", "--fast"]
    done = subprocess.run(line, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2
    assert "the demo needs numpy; run: pip install 'timeslice-rl[demo]', or in a checkout: pip install '.[demo]'" in (
        done.stderr
    )


def test_acl_says_what_it_did_not_use_and_how_to_give_a_password() -> None:
    """A node means nothing to a client's user; nobody has to encode."""
    result = CliRunner().invoke(main, ["acl", "--node", "n1", "--role", "client"])
    assert "--node n1 was not used" in result.stderr
    assert "TIMESLICE_USERNAME and TIMESLICE_PASSWORD" in result.stderr
    assert "percent-encoded" in result.stderr
    assert "not used" not in CliRunner().invoke(main, ["acl", "--node", "n1"]).stderr
