"""What a person sees on a terminal, however narrow it is."""

from __future__ import annotations

import os
import pty
from pathlib import Path

import pytest

from tests.cli.conftest import Cli, World
from timeslice.locks import scripts
from timeslice.locks.scripts import Observed


def shown(cli: Cli, *args: str, columns: int, typed: bytes = b"", code: int = 0) -> str:
    """What the command writes to a terminal of that width, on which a person has ``typed``."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "COLUMNS": str(columns), "TERM": "xterm"}
    process = cli.start(*args, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    os.write(ours, typed)
    read = b""
    try:
        while some := os.read(ours, 4096):
            read += some
    except OSError:
        pass  # the terminal's other side was closed
    finally:
        os.close(ours)
    assert process.wait(60) == code
    return read.decode()


@pytest.mark.parametrize("columns", [30, 80, *(pytest.param(width, marks=pytest.mark.slow) for width in (100, 250))])
def test_no_column_is_lost_on_a_narrow_terminal(cli: Cli, world: World, columns: int) -> None:
    """Name, agent and fault of a node are what one looks for; 80 columns showed none of them."""
    node = "node-of-the-far-rack"
    world.serve("trainers", node)
    text = shown(cli, "nodes", columns=columns)
    for column in ("node", "agent", "groups", "devices", "host memory", "version", "last fault"):
        assert column in text.lower(), text
    assert node in text
    assert "trainers" in text


@pytest.mark.parametrize("columns", [30, *(pytest.param(width, marks=pytest.mark.slow) for width in (80, 110))])
def test_names_are_whole_on_a_narrow_terminal(cli: Cli, world: World, columns: int) -> None:
    """A name that is cut can't be copied into the next command."""
    name = "trainers-of-a-group-with-a-long-name"
    world.hold_lock_only(name, "job-1")
    text = shown(cli, "status", columns=columns)
    assert name in text
    assert "job-1" in text
    assert "WHY" in text.upper()


@pytest.mark.parametrize("more", [(), ("--json",)])
def test_a_full_disk_is_told_in_one_line(cli: Cli, world: World, more: tuple[str, ...]) -> None:
    """/dev/full takes nothing. The script reads from the exit code that its file is not whole."""
    world.hold_lock_only("licences", "a")
    with Path("/dev/full").open("w") as full:
        process = cli.start("status", *more, stdout=full)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert err == "error: the output can't be written: No space left on device\n"


def test_repair_asks_what_only_a_person_can_know(cli: Cli, world: World) -> None:
    """Whether a job that no agent can see is on a device: a yes lets the group go on, anything else changes nothing."""
    world.serve("trainers")
    keys = world.keys.group("trainers")
    world.driver.run(scripts.own(keys, "c1"))
    seen = [Observed("a", "unknown", why="its process is hidden")]
    world.driver.run(scripts.report(keys, "node-1", world.driver.view(keys).counter, seen))
    text = shown(cli, "repair", "trainers", columns=250, typed=b"n\n", code=6)
    assert "is nothing of it on any of them? [y/N]" in text
    assert "job a may still be on the devices of node node-1: its process is hidden" in text
    assert world.driver.view(keys).jobs["a"].residency == "unknown"
    text = shown(cli, "repair", "trainers", columns=250, typed=b"y\n")
    assert "done: job a is on no device, by the word of" in text
    assert "a" not in world.driver.view(keys).jobs
