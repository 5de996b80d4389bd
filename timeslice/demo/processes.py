"""The processes of the demo. Each ends when its standard input does, so none outlives the demo."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from timeslice.errors import TimeSliceError

# One thread for each job: two jobs shall compute on two groups at once without getting in each other's way.
ONE_THREAD = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS"), "1")
_GRACE_S = 3.0
_READY_S = 60.0


class Child:
    """A module of this package in a process of its own."""

    def __init__(
        self, name: str, module: str, arguments: Sequence[str], folder: Path, environment: Mapping[str, str]
    ) -> None:
        self.name = name
        self._errors = folder / f"{name}.stderr"
        with self._errors.open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**os.environ, **ONE_THREAD, **environment},
                start_new_session=True,  # Ctrl-C in the terminal is the demo's to handle
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(_GRACE_S if kind is None else 0.2)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def await_line(self) -> None:
        """Wait until it says that it is ready; raises when it ends instead, or says nothing for a long time."""
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], _READY_S)[0]:
            raise TimeSliceError(f"{self.name} was not ready within {_READY_S:g} s; is the machine very busy?")
        if not self._process.stdout.readline():
            self._process.wait()
            raise self._failed()

    def go(self) -> None:
        """Let it begin."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"go\n")
        self._process.stdin.flush()

    def running(self) -> bool:
        """False when it has ended well; raises when it has failed."""
        code = self._process.poll()
        if code:
            raise self._failed()
        return code is None

    def _failed(self) -> TimeSliceError:
        said = self._errors.read_text(errors="replace").strip().splitlines()
        tail = "\n  ".join(said[-12:]) or "(it said nothing)"
        return TimeSliceError(f"{self.name} ended with status {self._process.returncode}:\n  {tail}")
