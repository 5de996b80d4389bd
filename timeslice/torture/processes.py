"""The processes of a torture run, and the keeper that starts again what ended, as a service manager would.

All are in the process group of a guard, one line of shell that reads a pipe whose other end the run holds. When the
pipe closes, for whatever reason, the guard unmounts the run's devices and kills the group, stopped processes too.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from timeslice.torture.clock import PIDS
from timeslice.torture.forms import environment_in, line_in, process_in
from timeslice.torture.history import Born, Died, Healed, Writer

Role = Literal["job", "agent", "coordinator"]

AGAIN_S = 1.0  # after an end that nobody planned
# The kernel hangs a group up when it is orphaned with stopped processes in it; the guard has to outlive that, and who
# ends all processes of a service or a CI job.
_GUARD = f"""trap '' HUP INT TERM; read -r _
cat "$1/{PIDS}" 2>/dev/null |
    while read -r pid; do rm -f "/dev/shm/faketime_shm_$pid" "/dev/shm/sem.faketime_sem_$pid"; done
for each in "$1"/*/devices/* "$1"/*/state; do umount -l "$each" 2>/dev/null; done
rm -rf "$1"; kill -KILL 0"""
_TAIL_BYTES = 2000


@dataclass
class Child:
    """A place for one process after another: the same again after a kill, under a new label."""

    name: str
    role: Role
    make_spec: Callable[[str], dict[str, Any]]  # from the label
    environment: Mapping[str, str]  # all of it
    job: str = ""
    node: str = ""
    groups: tuple[str, ...] = ()
    count: int = 0
    process: subprocess.Popen[bytes] | None = None
    stopped: bool = False
    again_at: float | None = 0.0  # monotonic; None: not again
    heals: list[int] = field(default_factory=list)  # faults that are over when it runs again
    killed: bool = False  # by the run
    doomed: bool = False  # told to kill itself
    ran: int = 0  # when it was last seen to run, on the history's clock
    kill_at: str = ""  # where its next process does so, see ``killpoints``
    next_form: str = ""  # of its next process, see ``forms``
    form: str = ""
    told: bool = False  # to stop by itself

    @property
    def label(self) -> str:
        return f"{self.name}.{self.count}"

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def pid(self) -> int:
        """Of the process itself. ProcessLookupError when there is none."""
        if self.process is None:
            raise ProcessLookupError(f"{self.label} does not run")
        return process_in(self.form, self.process.pid)


class Processes:
    """Starts, keeps and ends them all."""

    def __init__(self, work: Path, logs: Path, writer: Writer, *, mutant: str = "") -> None:
        self._logs, self._writer, self._mutant = logs, writer, mutant
        self.children: list[Child] = []
        self._guard = subprocess.Popen(
            ["sh", "-c", _GUARD, "guard", str(work)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            process_group=0,
        )

    def add(self, child: Child) -> None:
        """It is started at the next turn of the keeper."""
        self.children.append(child)

    def having(self, role: Role) -> list[Child]:
        """Those that run and are not stopped."""
        return [each for each in self.children if each.role == role and each.running and not each.stopped]

    def works(self, child: Child) -> bool:
        """Whether its program is loaded and, if it is a daemon, says that it is ready."""
        if child.role == "job":
            line = f"/{child.label}.jsonl"
            try:
                return any(str(each.readlink()).endswith(line) for each in Path(f"/proc/{child.pid}/fd").iterdir())
            except (FileNotFoundError, ProcessLookupError):
                return False
        return b": ready" in self._errors(child.label).read_bytes()

    def keep(self, now: float) -> list[Child]:
        """Note who ended, and start who is due. Returns the children that ended for good."""
        done = []
        for child in list(self.children):
            seen = time.monotonic_ns()
            if child.process is not None and child.process.poll() is not None:
                self._bury(child, now)
            child.ran = seen
            if child.process is None and child.again_at is None:
                self.children.remove(child)
                done.append(child)
            elif child.process is None and child.again_at is not None and now >= child.again_at:
                self._start(child)
        return done

    def kill(self, child: Child, *, again_at: float, fault: int = 0) -> None:
        """SIGKILL; the keeper starts it again then, which heals the fault, if one is named."""
        assert child.process is not None
        child.killed, child.again_at, child.stopped = True, again_at, False
        child.heals += [fault] if fault else []
        if child.running:
            child.ran = time.monotonic_ns()
        child.process.kill()

    def tell_to_stop(self, child: Child, *, again_at: float) -> None:
        """SIGTERM: it ends by itself, and comes again then."""
        assert child.process is not None
        child.told, child.again_at = True, again_at
        child.process.terminate()

    def stop(self, child: Child) -> None:
        """SIGSTOP."""
        os.kill(child.pid, signal.SIGSTOP)
        child.stopped = True

    def go_on(self, child: Child) -> None:
        """SIGCONT, if it is still that process."""
        if child.stopped and child.running:
            os.kill(child.pid, signal.SIGCONT)
        child.stopped = False

    def hurry(self) -> None:
        """Start everything that is still to come again, now."""
        for child in self.children:
            if child.again_at is not None:
                child.again_at = 0.0
        self.keep(0.0)

    def end(self) -> None:
        """Kill all that is left."""
        for child in self.children:
            if child.process is not None:
                child.process.kill()
        for child in self.children:
            if child.process is not None:
                child.process.wait()

    def clear(self) -> None:
        """Remove mounts and files, as the guard would if this process ended now."""
        assert self._guard.stdin is not None
        self._guard.stdin.close()
        self._guard.wait()

    def _start(self, child: Child) -> None:
        child.count += 1
        child.killed = child.stopped = child.told = False
        child.form, child.next_form = child.next_form, ""
        label = child.label
        self._writer.write(Born(who="run", label=label, role=child.role, job=child.job, node=child.node))
        spec = {**child.make_spec(label), **({"form": child.form} if child.form else {})}
        line = [sys.executable, "-m", "timeslice.torture.child", child.role, json.dumps(spec)]
        if self._mutant:
            line += ["--mutant", self._mutant]
        if child.kill_at:
            line += ["--kill-at", child.kill_at]
            child.kill_at, child.doomed = "", True
        with self._errors(label).open("wb") as errors:
            child.process = subprocess.Popen(
                line_in(child.form, line),
                stdin=subprocess.DEVNULL,
                stdout=errors,
                stderr=errors,
                env=environment_in(child.form, child.environment),
                process_group=self._guard.pid,
            )
        for fault in child.heals:
            self._writer.write(Healed(who="run", id=fault))
        child.heals.clear()

    def _bury(self, child: Child, now: float) -> None:
        assert child.process is not None
        code = child.process.returncode
        finished = child.role == "job" and code == 0
        obeyed = child.doomed and code == -signal.SIGKILL
        stopped = child.told and code in {0, -signal.SIGTERM}  # it may not have been ready to hear it
        meant = child.killed or finished or obeyed or stopped
        detail = "" if meant else self._last_words(child.label)
        said = {"label": child.label, "code": code, "meant": meant, "detail": detail, "ran": child.ran}
        self._writer.write(Died.model_validate({"who": "run", **said}))
        child.process = None
        if finished:
            child.again_at = None
        elif not child.killed and not stopped:
            child.again_at = now + AGAIN_S

    def _errors(self, label: str) -> Path:
        return self._logs / f"{label}.log"

    def _last_words(self, label: str) -> str:
        said = self._errors(label).read_bytes()[-_TAIL_BYTES:].decode(errors="replace").strip().splitlines()
        return " | ".join(said[-12:])
