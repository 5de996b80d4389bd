"""What the examples share: processes of jobs, a stack for them, and the numbers.

An example starts itself once for each job, with `--job` and what the job is to do. It asks by one line of text, which
is a command and its arguments; the job answers by one line of JSON. What a job answers about a run is when it ``began``
and ``ended`` and its ``bodies``: stretches on the device, each with when it was ``entered`` and ``left``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from itertools import combinations
from pathlib import Path
from typing import Any

Runs = Mapping[str, Mapping[str, Any]]  # job -> what it answered


class Job:
    """A process of a job, seen by who compares."""

    def __init__(
        self, example: str, name: str, folder: Path, url: str, *given: object, environment: Mapping[str, str]
    ) -> None:
        self.name = name
        folder.mkdir()
        self._errors = folder / "stderr"
        command = [sys.executable, example, "--job", str(folder), *map(str, given)]
        with self._errors.open("wb") as errors:
            self._process = subprocess.Popen(
                command,
                env={**os.environ, "TIMESLICE_JOB": name, "TIMESLICE_URL": url, **environment},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                bufsize=1,
                start_new_session=True,  # Ctrl-C in the terminal is the example's to handle
            )

    def ask(self, *words: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(" ".join(map(str, words)) + "\n")

    def answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            said = self._errors.read_text(errors="replace")[-3000:]
            raise SystemExit(f"job {self.name} ended with status {self._process.wait()}:\n{said}")
        return json.loads(line)

    def end(self) -> None:
        """Nothing of it is on the device afterwards."""
        self._process.kill()
        self._process.wait()


def serve(commands: Mapping[str, Callable[..., Any]]) -> None:
    """The job's side of it: do what is asked, until nobody can ask any more."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a framework prints is not for the one who asks
    for line in sys.stdin:
        command, *words = line.split()
        answers.write(json.dumps(commands[command](*words)) + "\n")
        answers.flush()


@contextmanager
def stack(group: str) -> Iterator[tuple[Any, Path]]:
    """A server, coordinator and agent of the example's own, for jobs that move their state themselves; and a folder."""
    from timeslice.up import LocalStack, private_environment

    with (
        tempfile.TemporaryDirectory(prefix="ts-") as name,
        private_environment(Path(name)),
        LocalStack({group: 0}) as local,
    ):
        yield local, Path(name)


def events_of(url: str, group: str) -> list[Any]:
    """All events of the group so far."""
    from timeslice.events import decode
    from timeslice.locks.drivers import SyncDriver
    from timeslice.locks.keys import Keys
    from timeslice.locks.scripts import text

    driver = SyncDriver(url)
    try:
        entries: Any = driver.client.xrange(Keys().group(group).events)
    finally:
        driver.close()
    return [decode(group, text(key), {text(k): text(v) for k, v in fields.items()}) for key, fields in entries]


def seconds(run: Mapping[str, Any]) -> float:
    return float(run["ended"] - run["began"])


def overlaps(runs: Runs) -> int:
    """How often two jobs were on the device at once, by their own clocks."""
    return sum(
        one["entered"] < other["left"] and other["entered"] < one["left"]
        for first, second in combinations(runs.values(), 2)
        for one in first["bodies"]
        for other in second["bodies"]
    )


def measured(alone: Runs, sliced: Runs, events: list[Any]) -> dict[str, Any]:
    """The numbers that every comparison has: each job by itself, one after the other, and all by turns."""
    from timeslice.demo.measure import bytes_moved

    alone_s = sum(map(seconds, alone.values()))
    sliced_s = max(run["ended"] for run in sliced.values()) - min(run["began"] for run in sliced.values())
    return {
        "device": "cpu, emulated",
        "jobs": len(alone),
        "overlaps": overlaps(sliced),
        "swaps": sum(event.name == "SwapFinished" for event in events),
        "bytes_moved": bytes_moved(events),
        "alone_s": round(alone_s, 3),
        "sliced_s": round(sliced_s, 3),
        "gain": round(alone_s / sliced_s, 4),
    }


def versions(*packages: str) -> dict[str, str]:
    return {"python": platform.python_version(), **{name: version(name) for name in ("timeslice-rl", *packages)}}


def end_on_signals() -> None:
    """Ctrl-C and a plain kill end as everything else does: nothing is left behind."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda got, _: sys.exit(128 + got))


def new_file(text: str) -> Path:
    """The value of ``--json``, looked at before anything runs: minutes of work shall not be lost to a wrong name."""
    path = Path(text)
    folder = path.absolute().parent
    if path.is_dir() or not folder.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text} can't be written; nothing was run")
    return path
