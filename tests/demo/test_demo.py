"""The demo from end to end: real server, coordinator, agent, devices and processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from timeslice.cli.main import main
from timeslice.demo.grpo import Work
from timeslice.demo.measure import faults
from timeslice.demo.run import Options, StatePath, run_demo
from timeslice.events import SwapFinished

SMALL = Work(modulus=3, width=512, prompts=8, samples=4, minibatches=2, replayed=4)
STEPS = 6


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the demo puts what it needs: a short path, for sockets have a limit."""
    with tempfile.TemporaryDirectory(prefix="d") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr("tempfile.tempdir", None)
        yield Path(folder)


def mounts(folder: Path) -> list[str]:
    return [line for line in Path("/proc/self/mounts").read_text().splitlines() if str(folder) in line]


def processes(folder: Path, module: str = "") -> list[int]:
    """Processes that name the folder in their command line, or have a file of it open; those that run the module."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_text()
            files = [str(link.readlink()) for link in (entry / "fd").iterdir()]
        except OSError:
            continue
        if entry.name != str(os.getpid()) and str(folder) in " ".join([words, *files]) and module in words:
            found.append(int(entry.name))
    return found


def await_true(what: str, check: Callable[[], object], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


@pytest.mark.parametrize(
    "path", [*(pytest.param(way, marks=pytest.mark.slow) for way in ("channel", "checkpoint")), "both"]
)
def test_slicing_changes_nothing_but_the_order(path: StatePath, temporary: Path) -> None:
    """Whichever way the state moves: swaps happen, nobody overlaps, tokens rise, every bit of the result is equal."""
    before = dict(os.environ)
    outcome = run_demo(Options(SMALL, seed=1, path=path, latency_s=0.1, steps=STEPS))
    report = outcome.report
    assert faults(report) == []
    assert report["device"] == "emulated"
    assert report["swaps"] > 0
    assert report["bytes_moved"] >= 4 * min(outcome.sliced.jobs["a"].bytes.values())
    assert report["rewards"]["a"] != report["rewards"]["b"]
    assert len(report["rewards"]["a"]["sliced"]) == STEPS
    assert report["alone"]["jobs"].keys() == report["sliced"]["jobs"].keys() == {"a", "b"}
    assert report["swaps_alone"] == 0  # a job that is alone has nothing to pay
    assert any(isinstance(event, SwapFinished) for event in outcome.events)
    assert dict(os.environ) == before
    assert list(temporary.iterdir()) == []
    assert mounts(temporary) == []


def test_samplers_that_run_ahead_share_the_trainers_only(temporary: Path) -> None:
    """Asynchronous: only the trainers swap, the state there moves by turns, and every bit of the result is equal."""
    outcome = run_demo(Options(SMALL, seed=1, latency_s=0.1, steps=STEPS, mode="async", staleness=2))
    report = outcome.report
    assert faults(report) == []
    assert (report["mode"], report["staleness"], report["groups"]) == ("async", 2, ["trainers"])
    assert {body.group for body in outcome.sliced.bodies} == {"trainers"}
    assert report["swaps"] > 0
    assert report["device_bytes"].keys() == {"trainers"}
    assert list(temporary.iterdir()) == []


def demo(*arguments: str, cwd: Path, temporary: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [str(Path(sys.executable).with_name("timeslice")), "demo", "--fast", *arguments],
        env={**os.environ, "TMPDIR": str(temporary)},
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_the_command_writes_numbers_picture_and_events(tmp_path: Path, temporary: Path) -> None:
    """`timeslice demo --json --events` leaves what it promises, and exactly that."""
    arguments = ("--steps", "2", "--verifier-latency", "0.1", "--json", "demo.json", "--events", "events.jsonl")
    work = tmp_path / "work"
    work.mkdir()
    with demo(*arguments, cwd=work, temporary=temporary) as running:
        out, err = running.communicate(timeout=100)
    assert running.returncode == 0, err
    assert sorted(path.name for path in work.iterdir()) == ["demo.json", "demo.png", "demo.svg", "events.jsonl"]
    report = json.loads((work / "demo.json").read_text())
    for key in ("gain", "gain_bound", "body_inflation", "bytes_moved", "verifier_latency_s", "versions", "seeds"):
        assert key in report
    assert report["steps"] == 2
    page = (Path(__file__).parents[2] / "docs" / "reference" / "demo.md").read_text()
    assert [key for key in report if f"`{key}`" not in page] == []  # documented, all of them
    events = [json.loads(line) for line in (work / "events.jsonl").read_text().splitlines()]
    assert {"LeaseGranted", "SwapFinished", "JobSuspended"} <= {event["event"] for event in events}
    assert {event["schema"] for event in events} == {1}
    assert "emulated" in out
    assert "by turns" in err


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_an_interrupted_demo_leaves_nothing(number: signal.Signals, tmp_path: Path, temporary: Path) -> None:
    """Ctrl-C or a plain kill in the middle of a run: no process, no mount, no file is left."""
    with demo("--verifier-latency", "0.3", cwd=tmp_path, temporary=temporary) as running:
        try:
            await_true("no job was started", lambda: any(temporary.glob("*/*/*.jsonl")))
            assert mounts(temporary) or os.getuid()
            running.send_signal(number)
            running.wait(60)
            assert running.returncode != 0
        finally:
            running.kill()
    await_true("processes were left", lambda: not processes(temporary), 20)
    assert mounts(temporary) == []
    assert list(temporary.iterdir()) == []


def test_a_job_that_dies_fails_the_demo(tmp_path: Path, temporary: Path) -> None:
    """With a job killed in the middle, the demo says which, ends with an error, and cleans up."""
    with demo("--verifier-latency", "0.3", cwd=tmp_path, temporary=temporary) as running:
        try:
            os.kill(first_job(temporary), signal.SIGKILL)
            _, err = running.communicate(timeout=60)
        finally:
            running.kill()
    assert running.returncode == 1
    assert "job-a ended with status -9" in err
    assert mounts(temporary) == []
    assert list(temporary.iterdir()) == []


def first_job(folder: Path) -> int:
    """The first process of a job that is seen; the same look may miss it a moment later, while it starts."""
    seen: list[int] = []

    def looks() -> list[int]:
        seen.extend(job_processes(folder))
        return seen

    await_true("no job was started", looks)
    return seen[0]


def job_processes(folder: Path) -> list[int]:
    return processes(folder, "timeslice.demo.job")


def test_a_wrong_folder_is_said_before_anything_runs(tmp_path: Path, temporary: Path) -> None:
    """A minute of work is not lost to a typing error."""
    with demo("--json", "no/such/demo.json", cwd=tmp_path, temporary=temporary) as running:
        _, err = running.communicate(timeout=60)
    assert running.returncode == 2
    assert "the folder of no/such/demo.json does not exist" in err
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--json", "demo.json"), "can't write demo.png (Is a directory)"),
        (("--events", "/proc/version"), "can't write /proc/version"),
        (("--json", "x", "--events", "x"), "one file can't take two results"),
        (("--json", "demo.svg"), "one file can't take two results"),
    ],
    ids=["picture", "events", "same", "the picture's name"],
)
def test_what_can_not_be_written_is_said_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], said: str
) -> None:
    """Every file that the run would write is tried first."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo.png").mkdir()
    result = CliRunner().invoke(main, ["demo", *arguments])
    assert result.exit_code == 2
    assert said in result.stderr
    assert "nothing was run" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["demo.png"]
