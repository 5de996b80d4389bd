"""``timeslice observe``: real programs on the emulated device, and on a stand-in for a real one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tests.cli.conftest import TIMESLICE
from tests.gpu.fixtures import gpu_node
from tests.gpu.node import Node, uuid
from tests.observe.worker import SIZE
from timeslice.arena import Device
from timeslice.cli.main import main
from timeslice.cli.observe import _active
from timeslice.observe.series import Sample, analyse

__all__ = ["gpu_node"]

ROOT = Path(__file__).parent.parent.parent
BUSY_S, IDLE_S = 0.6, 0.9

Worker = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Worker]:
    """Start a program that is busy and idle by turns on an emulated device."""
    device, started = Device.create(tmp_path / "device", 2 * SIZE), list[subprocess.Popen[str]]()

    def start(*words: str, idle_s: float = IDLE_S) -> subprocess.Popen[str]:
        line = [sys.executable, "-m", "tests.observe.worker", device.path, str(BUSY_S), str(idle_s), *words]
        process = subprocess.Popen(line, stdout=subprocess.PIPE, text=True, cwd=ROOT, start_new_session=True)
        started.append(process)
        with suppress(PermissionError):  # other tests take turns with it on the CPU, and that is no pause of its own
            os.setpriority(os.PRIO_PGRP, process.pid, -15)
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        return process

    yield start
    for process in started:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
    device.destroy(force=True)


def _started(command: list[str], lines: int, **options: Any) -> subprocess.Popen[str]:
    """The command, after it has said so many lines."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)
    assert process.stderr is not None
    for _ in range(lines):
        assert "observ" in process.stderr.readline()
    return process


def observe(*words: str) -> Result:
    return CliRunner().invoke(main, ["observe", *words])


@pytest.mark.parametrize("words", [(), pytest.param(("child",), marks=pytest.mark.slow)], ids=["itself", "its-child"])
def test_the_loop_of_a_program_is_told(worker: Worker, words: tuple[str, ...]) -> None:
    """Period, active part, memory, and that the activity of an emulated device is only the CPU's, said so."""
    process = worker(*words)
    result = observe("--pid", str(process.pid), "--seconds", "10", "--gap", "0.3", "--json")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert (told["pid"], told["device"], told["activity"]) == (process.pid, "emulated", "cpu")
    assert told["period_s"] == pytest.approx(BUSY_S + IDLE_S, rel=0.4)
    assert 0.3 < told["idle_share"] < 0.85
    assert (told["device_bytes"], told["idle_device_bytes"]) == (SIZE, SIZE)
    assert "wrap these in timeslice.hold(...)" in told["advice"][0]
    assert process.poll() is None


@pytest.mark.slow
def test_people_are_told_what_was_measured_and_what_to_do(worker: Worker) -> None:
    """The table, and behind it the advice; progress goes to stderr."""
    result = observe("--pid", str(worker().pid), "--seconds", "12", "--gap", "0.3")
    assert result.exit_code == 0, result.output
    assert "CPU use of the processes, as a stand-in" in result.stdout
    assert "4 MiB at most" in result.stdout
    assert "timeslice.hold" in result.stdout
    assert "observing process" in result.stderr
    assert "observed 10 s of 12 s" in result.stderr


@pytest.mark.slow
def test_what_was_seen_counts_when_it_ends_early(worker: Worker) -> None:
    """The program ends, or Ctrl-C ends the command: it says so and analyses what there is."""
    process = worker()
    command = [TIMESLICE, "observe", "--pid", str(process.pid), "--seconds", "600", "--json"]
    running = _started(command, 2)
    running.send_signal(signal.SIGINT)
    stdout, stderr = running.communicate(timeout=60)
    assert running.returncode == 0, stderr
    assert 9 < json.loads(stdout)["observed_s"] < 60
    assert "ended early" in stderr
    running = _started(command, 2)
    process.kill()
    stdout, stderr = running.communicate(timeout=60)
    assert running.returncode == 0, stderr
    assert f"process {process.pid} has ended; what was seen until then counts" in stderr
    assert json.loads(stdout)["device_bytes"] == SIZE


def test_what_can_not_be_observed_says_why() -> None:
    """No such process (any more); no device on this machine."""
    ended = subprocess.Popen(["/bin/true"])
    ended.wait()
    result = observe("--pid", str(ended.pid))
    assert result.exit_code == 2
    assert f"there is no process {ended.pid}" in result.stderr
    with subprocess.Popen(["/bin/sleep", "600"]) as other:
        result = observe("--pid", str(other.pid))
        other.kill()
    assert result.exit_code == 1
    assert "has nothing on an emulated device, and there is no real one here" in result.stderr


@pytest.mark.parametrize(
    ("stretches", "ignored", "said"),
    [(0, 0, "never"), (0, 3, "only in moments of about 0.5 s"), (1, 0, "1 stretch, typically 2.0 s")],
)
def test_how_often_it_was_active_is_told_in_words(stretches: int, ignored: int, said: str) -> None:
    """Never, too shortly, once."""
    levels = ([0.9] * 8 + [0.0] * 8) * stretches + [0.0, 0.0, 0.9, 0.9, 0.0, 0.0, 0.0, 0.0] * ignored + [0.0] * 8
    samples = [Sample(at_s=n * 0.25, activity=level) for n, level in enumerate([0.0, *levels])]
    assert _active(analyse(samples)) == said


@pytest.mark.skipif(os.geteuid() != 0, reason="needs to become another user")
def test_another_users_process_is_refused(worker: Worker) -> None:
    """Before anything of it is looked at."""
    code = f"""
import os
from timeslice.errors import RefusedError
from timeslice.observe.sampling import Observed
os.setuid(65534)
try:
    Observed({worker().pid})
except RefusedError as error:
    print(error)
"""
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT).stdout
    assert "is another user's; observe it as that user, or as root" in told


@pytest.mark.slow
def test_on_a_real_device_its_utilization_counts(gpu_node: Node, tmp_path: Path) -> None:
    """Over the real pynvml and a stand-in for the driver's library, without a GPU: utilization and bytes are those
    that the driver tells, of an idle process of the same tree; that others are there is said."""
    with subprocess.Popen(["/bin/sh", "-c", "sleep 600 & wait"], start_new_session=True) as tree:
        children = Path(f"/proc/{tree.pid}/task/{tree.pid}/children")
        deadline = time.monotonic() + 20
        while not (found := children.read_text().split()):
            assert time.monotonic() < deadline
        pid = int(found[0])
        gpu_node.write(os.getpid(), "state running", f"context {uuid(0)} 10")
        gpu_node.write(pid, "state running", f"alloc {uuid(0)} 5000", "util 0")
        command = [TIMESLICE, "observe", "--pid", str(tree.pid), "--seconds", "9", "--gap", "0.5", "--json"]
        environment = {**os.environ, **gpu_node.environment}
        environment["PATH"] = os.environ["PATH"]
        running = _started(command, 1, env=environment)
        busy, at = 0, time.monotonic()
        while running.poll() is None:
            wanted = 90 if int((time.monotonic() - at) / 1.0) % 2 else 0
            if wanted != busy:
                busy = wanted
                gpu_node.write(pid, "state running", f"alloc {uuid(0)} 5000", f"util {busy}")
            time.sleep(0.02)
        stdout, stderr = running.communicate(timeout=60)
        os.killpg(tree.pid, signal.SIGKILL)
    assert running.returncode == 0, stderr
    told = json.loads(stdout)
    assert (told["device"], told["activity"], told["shared"]) == ("real", "device", True)
    assert told["device_bytes"] == 5000
    assert told["period_s"] == pytest.approx(2.0, rel=0.4)
    assert told["regular"]
