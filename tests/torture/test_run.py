"""Whole torture runs, through the command."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.conftest import NeedsTool
from timeslice.cli.main import main
from timeslice.torture.clock import PIDS
from timeslice.torture.schedule import KINDS

LINE = [sys.executable, "-m", "timeslice", "torture"]
DEADLINE_S = 220.0


def torture(folder: Path, *arguments: str) -> tuple[int, dict[str, Any], str]:
    """Exit code, report and messages of a run."""
    report = folder / "report.json"
    done = subprocess.run(
        [*LINE, "--json", str(report), "--keep", str(folder / "history"), *arguments],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    told: dict[str, Any] = json.loads(report.read_text()) if report.exists() else {}
    return done.returncode, told, done.stderr


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("seed", [1, 2])
def test_standalone(seed: int, tmp_path: Path) -> None:
    """Under faults of every kind nothing that was promised breaks, and the jobs go on."""
    code, told, messages = torture(tmp_path, "--seconds", "20", "--seed", str(seed))
    assert (code, told.get("violations")) == (0, []), messages
    assert told["device"] == "emulated"
    assert told["faults"] >= 3  # of eight that it tries; some do not come about on a busy machine
    assert told["grants"] >= 5
    assert told["swaps"] >= 1
    assert told["bytes_moved"] > 0
    assert sum(told["faults_by_kind"].values()) == told["faults"]
    assert told["grown"]["keys"]["last"] > 0
    assert Path(told["history"]).is_file()


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("topology", ["sentinel", "cluster"])
def test_many_servers(topology: str, tmp_path: Path, needs_tool: NeedsTool) -> None:
    """The same over servers that fail over to each other."""
    needs_tool("redis-server")
    code, told, messages = torture(tmp_path, "--seconds", "15", "--seed", "1", "--topology", topology)
    assert (code, told.get("violations")) == (0, []), messages
    assert told["topology"] == topology
    assert told["faults"] >= 2
    assert told["grants"] >= 5
    assert told["swaps"] >= 1


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_interrupted_and_judged_again(tmp_path: Path) -> None:
    """Ctrl-C ends a run with a report of what there is, which says so; the saved history is judged to the same end."""
    report = tmp_path / "report.json"
    arguments = ["--seconds", "60", "--seed", "5", "--faults", "kill-job", "--json", str(report)]
    with subprocess.Popen(
        [*LINE, *arguments, "--keep", str(tmp_path / "history")], stderr=subprocess.PIPE, text=True
    ) as run:
        _await_fault(tmp_path / "history" / "parts" / "run.jsonl")
        run.send_signal(signal.SIGINT)
        _, messages = run.communicate(timeout=120)
    assert run.returncode == 130, messages
    assert "interrupted" in messages
    assert "INCOMPLETE" in messages
    told = json.loads(report.read_text())
    assert (told["interrupted"], told["complete"]) == (True, False)
    assert 0 < told["seconds"] < 60
    kinds = {"kill-job": told["faults"]} if told["faults"] else {}  # the first may not have been read back yet
    assert (told["faults_by_kind"], told["violations"]) == (kinds, [])
    again = tmp_path / "again.json"
    subprocess.run([*LINE, "--check", str(tmp_path / "history"), "--json", str(again)], check=True, timeout=120)
    assert json.loads(again.read_text()) == told


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_terminated_while_it_starts(tmp_path: Path) -> None:
    """A cancelled run that did nothing yet does not look like one that passed, and leaves nothing behind."""
    report, history = tmp_path / "report.json", tmp_path / "history"
    arguments = ["--json", str(report), "--keep", str(history)]
    with subprocess.Popen([*LINE, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
        _await_line(history / "parts" / "run.jsonl", '"role":"agent"')
        run.send_signal(signal.SIGTERM)
        shown, messages = run.communicate(timeout=120)
    assert run.returncode == 130, messages
    assert "interrupted" in shown
    told = json.loads(report.read_text())
    assert (told["interrupted"], told["complete"], told["seconds"]) == (True, False, 0)
    assert not _processes_with(str(tmp_path))


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_nothing_outlives_a_killed_run(tmp_path: Path) -> None:
    """Whatever a run started, stopped processes and mounts included, is gone soon after a kill -9 of the run."""
    arguments = ["--seconds", "60", "--seed", "5", "--faults", "stop-job", "--keep", str(tmp_path / "history")]
    with subprocess.Popen([*LINE, *arguments], stderr=subprocess.DEVNULL) as run:
        _await_fault(tmp_path / "history" / "parts" / "run.jsonl")
        started = _processes_with(str(tmp_path))
        (work,) = {found[0] for line in started if (found := re.search(r"/[^\s\"]*/tst-\w+", line))}
        servers = (Path(work) / PIDS).read_text().split()
        assert _left_of(work, servers)
        run.kill()
        run.wait()
    until = time.monotonic() + 60
    while left := _processes_with(str(tmp_path)) | _left_of(work, servers):
        assert time.monotonic() < until, left
        time.sleep(0.05)


def test_refusals(tmp_path: Path) -> None:
    """A wrong name of a fault, a folder that is in use and a file that is no history are told at once."""
    code, _, messages = torture(tmp_path, "--faults", "boom")
    assert code == 2
    assert "no such kind of fault: boom" in messages
    (tmp_path / "history").mkdir()
    (tmp_path / "history" / "old").touch()
    code, _, messages = torture(tmp_path)
    assert code == 2
    assert "is not empty" in messages
    done = CliRunner().invoke(main, ["torture", "--check", str(tmp_path / "history" / "old")])
    assert done.exit_code == 2
    assert "has no history of a torture run" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--check", ".", "--faults", "boom"], "--check takes none of: --faults"),
        (["--swaps", "100", "--topology", "cluster", "--seconds", "9"], "--swaps takes none of: --topology, --seconds"),
        (["--swaps", "5"], "5 is not in the range x>=80"),
        (["--faults", ""], "no such kind of fault"),
    ],
)
def test_options_that_would_do_nothing_are_refused(arguments: list[str], message: str) -> None:
    """What can't be done as it was asked is refused, not left out."""
    done = CliRunner().invoke(main, ["torture", *arguments])
    assert (done.exit_code, message in done.output) == (2, True), done.output


def test_the_help_names_every_kind_of_fault() -> None:
    """Who narrows a run down finds the words for it."""
    shown = CliRunner().invoke(main, ["torture", "--help"]).output.partition("Kinds of faults:")[2]
    assert set(KINDS) <= set(re.split(r"[\s;]+", shown.partition("Needs:")[0]))


def _left_of(work: str, servers: list[str]) -> set[str]:
    """What there is of a run on this machine, beside its processes."""
    mounts = {line for line in Path("/proc/self/mounts").read_text().splitlines() if work in line}
    shared = {each.name for each in Path("/dev/shm").iterdir() if any(each.name.endswith(f"_{pid}") for pid in servers)}
    return mounts | shared | ({work} if Path(work).exists() else set())


def _await_fault(part: Path) -> None:
    _await_line(part, '"kind":"fault"')


def _await_line(part: Path, word: str) -> None:
    until = time.monotonic() + 60
    while not (part.exists() and word in part.read_text()):
        assert time.monotonic() < until, f"no line with {word} came"
        time.sleep(0.05)


def _processes_with(word: str) -> set[str]:
    """Command lines of living processes that name ``word``, and ours aside."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue  # it has just ended
            if word in line:
                found.add(f"{entry.name}: {line}")
    return found
