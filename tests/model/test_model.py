"""The protocol as Promela models, explored completely by spin, and mutants that it must find. See README.md."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.conftest import NeedsTool

HERE = Path(__file__).parent
DEPTH = 100_000  # steps of one run; a search that is cut off fails
MEMORY_MB = 3500

ONE_JOB = "ONE JOB ON A DEVICE"
OUT = "OUT MEANS OUT"
GOES_ON = "IT GOES ON"
LEASES = "NO BODY WITHOUT ITS LEASES"

CALM = ("CRASHES=0", "DEATHS=0", "CHANGES=0")
CHANGE = ("CRASHES=0", "DEATHS=0", "CHANGES=1")
SPACES = {
    "clients die, processes change": ("residency", "CRASHES=0", "DEATHS=1", "CHANGES=1"),
    "agents die, processes change": ("residency", "CRASHES=1", "DEATHS=0", "CHANGES=1"),
    "agents and clients die": ("residency", "CRASHES=1", "DEATHS=1", "CHANGES=0"),
    "looks take time": ("residency", "SLOW_LOOKS", *CALM),
    "a workload without a hold": ("residency", "DOOR", "CRASHES=1", "DEATHS=0", "CHANGES=1"),
    "orders are lost": ("orders",),
}
WAYS = {  # the rule that is left out: model, its macros, the promise that breaks
    "the last grant is enough": ("leases", ("WAY1",), LEASES),
    "whether to register is decided when it asks": ("residency", ("WAY2", *CALM), ONE_JOB),
    "who can't be watched is ignored": ("residency", ("WAY3", *CALM), ONE_JOB),
    "who takes a title is forgotten": ("residency", ("WAY4", *CHANGE), ONE_JOB),
    "a registration for a node that nobody serves counts": ("residency", ("WAY5", *CALM), ONE_JOB),
    "a process in a time namespace is taken for dead": ("residency", ("WAY6", *CALM), ONE_JOB),
    "two programs have one job id": ("residency", ("WAY7", *CALM), ONE_JOB),
    "who never held is said to be out unasked": ("residency", ("WAY8", "DOOR", *CALM), OUT),
    "it says that it is out while it uses the device": ("residency", ("WAY9", *CALM), ONE_JOB),
    "a look ends the process that it asks": ("residency", ("WAY10", *CALM), ONE_JOB),
    "a begun step is not ordered again": ("orders", ("WAY11",), GOES_ON),
    "absence of evidence is out": ("residency", ("WAY0", *CALM), ONE_JOB),
    "an end of an earlier turn is evidence": ("residency", ("OLD_ENDS", *CHANGE), ONE_JOB),
    "a registration of an earlier turn is evidence": ("residency", ("OLD_WORDS", *CHANGE), ONE_JOB),
    "a node joins while the job is suspended elsewhere": ("residency", ("SAVED_IS_OUT", *CHANGE), ONE_JOB),
    "a look is news after a grant or a move": ("residency", ("LATE_LOOKS", "SLOW_LOOKS", *CALM), ONE_JOB),
    "a look is news after the turn it fell into": ("residency", ("ENDS_KEEP_LOOKS", "SLOW_LOOKS", *CALM), ONE_JOB),
    "groups are taken crosswise": ("leases", ("CROSSED",), GOES_ON),
    "what is left of a hold is kept": ("leases", ("KEPT",), GOES_ON),
}


class Spin:
    """Explores one model with some macros, in a folder of its own. ``broken``: the promise that does not hold."""

    def __init__(self, needs_tool: NeedsTool, folder: Path, model: str, *macros: str, speed: str = "-O0") -> None:
        self._spin, self._folder = needs_tool("spin"), folder
        self._source, self._macros = HERE / f"{model}.pml", [f"-D{macro}" for macro in macros]
        self._call(self._spin, *self._macros, "-a", str(self._source))
        flags = (speed, "-w", "-DSAFETY", "-DNOREDUCE", f"-DMEMLIM={MEMORY_MB}")
        self._call(needs_tool("cc"), *flags, "-o", "pan", "pan.c")
        bounds = " ".join((model, *macros, f"depth {DEPTH}"))
        self.output = f"{bounds}\n{self._call('./pan', f'-m{DEPTH}', '-w24')}"
        self.broken = self._find_promise() if "errors: 1" in self.output else ""

    def _find_promise(self) -> str:
        """Follow the trail to the assertion that failed: its line names the promise."""
        told = self._call(self._spin, *self._macros, "-t", "-k", f"{self._source.name}.trail", str(self._source))
        line = re.search(r":(\d+), Error: assertion violated", told)
        assert line, told
        promise = re.search(r"/\* ([A-Z ]+) \*/", self._source.read_text().splitlines()[int(line[1]) - 1])
        assert promise, told
        return promise[1]

    def _call(self, *command: str) -> str:
        done = subprocess.run(command, cwd=self._folder, capture_output=True, text=True, check=False)
        assert "syntax error" not in done.stdout, done.stdout
        return done.stdout + done.stderr


def check_whole(found: Spin) -> None:
    """Everything was looked at, and nothing was found."""
    print(found.output)
    assert re.search(r"errors: 0\b", found.output), found.broken or found.output
    for cut in ("not completed", "too small", "out of memory", "truncated"):
        assert cut not in found.output


def test_no_body_starts_without_all_its_leases(needs_tool: NeedsTool, tmp_path: Path) -> None:
    """Two jobs hold two groups; leases end and clients die at any moment: every body that starts has both leases, and
    everybody who lives comes to an end."""
    check_whole(Spin(needs_tool, tmp_path, "leases"))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("space", SPACES)
def test_the_protocol_keeps_its_promises_whatever_happens(needs_tool: NeedsTool, tmp_path: Path, space: str) -> None:
    """Never two jobs' state on a node's devices, "out" is true whenever it is said, and every run goes on once its
    questions are answered: in every order of what may happen within these bounds."""
    model, *macros = SPACES[space]
    check_whole(Spin(needs_tool, tmp_path, model, *macros, speed="-O2"))


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("way", WAYS)
def test_each_rule_is_needed(needs_tool: NeedsTool, tmp_path: Path, way: str) -> None:
    """With one rule left out, the search finds a run that breaks the promise which the rule is there for."""
    model, macros, promise = WAYS[way]
    found = Spin(needs_tool, tmp_path, model, *macros)
    assert found.broken == promise, found.output
