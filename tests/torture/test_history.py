"""A history that is damaged or lacks its end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tests.torture.tale import Tale
from timeslice.cli.main import main
from timeslice.torture.history import read_so_far
from timeslice.torture.report import FACTS, HISTORY, judge, merge


@pytest.fixture
def history(tmp_path: Path) -> Path:
    """One of a whole run."""
    tale = Tale()
    tale.asks("a.1")
    tale.enters("a.1")
    tale.leaves("a.1")
    tale.calm(5)
    tale.ends()
    path = tmp_path / HISTORY
    path.write_text("".join(f"{line.model_dump_json()}\n" for line in tale.lines))
    return path


def _check(path: Path, *more: str) -> Result:
    return CliRunner().invoke(main, ["torture", "--check", str(path), *more])


def test_a_whole_history_has_no_warning(history: Path) -> None:
    """Nothing is said of a history that has everything. `--json -` prints the report alone; the table is a message."""
    done = _check(history, "--json", "-")
    told = json.loads(done.stdout)
    assert (done.exit_code, told["schema"], told["complete"], told["grants"]) == (0, 1, True, 1)
    assert "grants" in done.stderr
    assert "INCOMPLETE" not in done.stderr


@pytest.mark.parametrize("ending", ["\n", '\n{"at":5,"who"'])
def test_a_history_without_its_end_is_judged_so_far_and_called_incomplete(history: Path, ending: str) -> None:
    """One that was cut, between lines or inside one, is not taken for that of a run that held all its promises."""
    report = history.parent / "report.json"
    history.write_text("\n".join(history.read_text().splitlines()[:-1]) + ending)
    done = _check(history, "--json", str(report))
    assert (done.exit_code, "INCOMPLETE" in done.stderr, "incomplete" in done.stdout) == (0, True, True), done.output
    told = json.loads(report.read_text())
    assert (told["complete"], told["violations"], told["grants"]) == (False, [], 1)


@pytest.mark.parametrize("bad", ["nonsense", '{"kind":"zork"}', '{"kind":"ended"}', "\0", ""])
def test_a_bad_line_is_named(history: Path, bad: str) -> None:
    """What is no history is not judged, and one sentence says where it is wrong."""
    lines = history.read_text().splitlines(keepends=True)
    history.write_text("".join([*lines[:2], f"{bad}\n", *lines[2:]]))
    done = _check(history)
    assert (done.exit_code, done.stdout) == (2, "")
    assert f"{history}, line 3 is no line of a history" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert "http" not in done.stderr


@pytest.mark.parametrize("facts", ["{", "[]"])
def test_damaged_facts_are_told(history: Path, facts: str) -> None:
    """The file beside a history is named when it is no use."""
    (history.parent / FACTS).write_text(facts)
    done = _check(history)
    assert (done.exit_code, str(history.parent / FACTS) in done.stderr) == (2, True), done.output


def test_the_path_of_a_history_is_shown_whole(history: Path) -> None:
    """However long it is, it can be copied from the screen."""
    folder = history.parent / ("long" * 40)
    folder.mkdir()
    history.rename(folder / HISTORY)
    assert f"history: {folder / HISTORY}\n" in _check(folder).stdout


@pytest.mark.parametrize("end", [0, 1, 30])
def test_what_is_written_so_far_is_read(history: Path, end: int) -> None:
    """A line may be seen while it is written: it counts once it is whole, and keeps nobody from the other files."""
    line = history.read_text().splitlines()[0]
    (history.parent / "a.jsonl").write_text(f"{line}\n{line[:end]}")
    lines = list(read_so_far(history.parent))
    assert len(lines) == 1 + len(history.read_text().splitlines())


def test_a_line_that_a_kill_tore_is_no_reason_to_lose_a_run(history: Path) -> None:
    """The parts of a run become a whole history, without the half line of a process that was killed while it wrote."""
    parts = history.parent / "parts"
    parts.mkdir()
    (parts / "run.jsonl").write_bytes(history.read_bytes())
    (parts / "a.1.jsonl").write_text(history.read_text().splitlines()[0][:30])
    merge(history.parent)
    lines, _, complete = judge(history.parent)
    assert (len(lines), complete) == (len(history.read_text().splitlines()), True)
