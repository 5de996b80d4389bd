"""The backend against the contract, with real processes and real files."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from timeslice_tmpcopy import TmpcopyBackend, state_file

from timeslice.backends.base import Backend, Context, Job, Selection
from timeslice.backends.conformance import CHECKS, Check
from timeslice.errors import BackendError
from timeslice.models import Residency, Target

SIZE = 1 << 20


class Files:
    """Processes that keep a file each."""

    def __init__(self, folder: Path) -> None:
        self.fast, self.slow = folder / "fast", folder / "slow"
        self.fast.mkdir()
        self.slow.mkdir()
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._content: dict[int, bytes] = {}

    def make(self) -> Backend:
        return TmpcopyBackend(Context(group="g", node="n1", options={"fast": str(self.fast), "slow": str(self.slow)}))

    def start(self, job: str) -> Target:
        process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        self._running[process.pid] = process
        target = Target(
            job=job,
            host="n1",
            pid=process.pid,
            start=int(Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[19]),
            uid=os.getuid(),
            pid_namespace=str(Path("/proc/self/ns/pid").readlink()),
        )
        self._content[process.pid] = os.urandom(SIZE)
        self.file(target).write_bytes(self._content[process.pid])
        return target

    def end(self, target: Target) -> None:
        process = self._running.pop(target.pid)
        process.kill()
        process.wait()
        for folder in (self.fast, self.slow):
            state_file(folder, target.pid, target.start).unlink(missing_ok=True)

    def is_intact(self, target: Target) -> bool:
        runs = self._running[target.pid].poll() is None
        free = not self.file(target).with_suffix(".locked").exists()
        return runs and free and self.file(target).read_bytes() == self._content[target.pid]

    def used_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.fast.iterdir())

    def file(self, target: Target) -> Path:
        return state_file(self.fast, target.pid, target.start)

    def close(self) -> None:
        for process in self._running.values():
            process.kill()
            process.wait()


@pytest.fixture
def files(tmp_path: Path) -> Iterator[Files]:
    made = Files(tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_conformance(check: Check, files: Files) -> None:
    """All that an agent relies on."""
    await check(files)


async def test_a_move_that_was_cut_off_is_done_again(files: Files) -> None:
    """Both files are there: the job is inside, and either way leads on."""
    target = files.start("a")
    job = Job(group="g", job="a", node="n1", targets=(target,))
    state_file(files.slow, target.pid, target.start).write_bytes(b"half")
    backend = files.make()
    assert (await backend.probe(job)).state is Residency.RESIDENT
    await backend.suspend(job, Selection(), deadline_s=10)
    await backend.restore(job, Selection(), deadline_s=10)
    await backend.release(job, deadline_s=10)
    assert files.is_intact(target)


async def test_without_room_the_job_stays_where_it_is(files: Files) -> None:
    """A failed suspend leaves it running."""
    target = files.start("a")
    job = Job(group="g", job="a", node="n1", targets=(target,))
    blocker = state_file(files.slow, target.pid, target.start).with_suffix(".new")
    blocker.mkdir()  # so that the copy can't be written
    with pytest.raises(BackendError, match="copy out failed"):
        await files.make().suspend(job, Selection(), deadline_s=10)
    assert files.is_intact(target)


def test_folders_that_are_not_there_are_refused(tmp_path: Path) -> None:
    """At the agent's start, with the way to write it."""
    with pytest.raises(BackendError, match="--backend tmpcopy:fast=DIR,slow=DIR"):
        TmpcopyBackend(Context(group="g", node="n1", options={"fast": str(tmp_path)}))
