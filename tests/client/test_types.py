"""What the types say to who uses the package."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

CONSUMER = Path(__file__).parent / "consumer.py"  # checked with the rest of this project, too
ROOT = Path(__file__).parent.parent.parent


# Each line that ends in a kind of error is a mistake.
MISTAKES = """\
import timeslice

timeslice.hodl("trainers")  # attr-defined
timeslice.hold("trainers", timout=5)  # call-overload
timeslice.hold("trainers", timeout="5")  # call-overload
timeslice.hold("trainers", on_lost=5)  # call-overload


@timeslice.hold("trainers")
def train(step: int) -> str:
    return str(step)


train("three")  # arg-type
with timeslice.hold("trainers") as lease:
    lease.fencing_tokn  # attr-defined
    lease.fencing_token.upper()  # attr-defined
with timeslice.hold("trainers", "samplers") as (one, two, three):  # misc
    pass
"""


def checked(program: Path, cache: Path) -> list[str]:
    """What mypy --strict finds in a file, as somebody has it who installed the package."""
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--cache-dir", str(cache)]
    command += ["--follow-imports=silent", "--warn-unreachable", "--no-error-summary", str(program)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert not done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
def test_a_users_program_has_its_types(tmp_path: Path) -> None:
    """mypy --strict sees leases, not Any, in every form of a hold, and decorators keep signatures; mistakes are found,
    misspelt names of the package among them."""
    cache, program = tmp_path / "cache", tmp_path / "mistakes.py"
    assert checked(CONSUMER, cache) == []
    program.write_text(MISTAKES)
    lines = enumerate(MISTAKES.splitlines(), 1)
    expected = {(number, kind[1]) for number, line in lines if (kind := re.search(r"  # ([a-z-]+)$", line))}
    found = [re.fullmatch(r".*?:(\d+): error: .*\[([a-z-]+)\]", line) for line in checked(program, cache)]
    assert {(int(each[1]), each[2]) for each in found if each} == expected
