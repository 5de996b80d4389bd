"""What quiesces the processes of a job: signals to all of them at once, or a command of the agent's operator."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import shlex
import shutil
import signal
import time
from asyncio import sleep
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Literal, Protocol

from timeslice.arena.errors import EmulatedDeviceError, TargetGoneError
from timeslice.arena.process import HeldProcess
from timeslice.arena.process import Target as HeldTarget
from timeslice.backends.base import Job
from timeslice.backends.checks import fault
from timeslice.errors import FaultKind, UsageError, quoted
from timeslice.models import Target

log = logging.getLogger("timeslice.backends")

Stage = Literal["before", "after"]

_RELATIVE = re.compile(r"(?:SIG)?RTMIN\+(\d+)")
_PLAIN = {"USR1": signal.SIGUSR1, "USR2": signal.SIGUSR2}
_OUTPUT_MAX = 64 << 10
_MOST_S = 3600.0


class Hook(Protocol):
    """Raises BackendError, and has then done nothing or has to be undone by the stage ``after``."""

    async def run(self, job: Job, targets: Sequence[Target], stage: Stage, until: float) -> None:
        """Do the work of a stage for all targets at once. ``until`` is on the monotonic clock."""

    def able(self, job: Job, target: Target) -> str:
        """Why a process can't take part now; '' if it can."""


class Signals:
    """One signal to every process, and a settle time for them to act on it."""

    def __init__(self, options: Mapping[str, str]) -> None:
        self._numbers: dict[Stage, int] = {
            "before": _number(options.get("signal_before", "RTMIN+1")),
            "after": _number(options.get("signal_after", "RTMIN+2")),
        }
        self._settle_s = _seconds(options.get("settle", "1"))

    def able(self, job: Job, target: Target) -> str:
        with suppress(TargetGoneError), _hold(job, target) as process:
            lacks = [number for number in self._numbers.values() if not _handles(target.pid, number)]
            if lacks:
                return (
                    f"process {target.pid} has no handler for signal {_name(lacks[0])}, which would kill it; load what "
                    "destroys and rebuilds its communicators, or leave the stage quiesce out"
                )
            if process.is_stopped():
                return f"process {target.pid} is stopped and heeds no signal; continue it: kill -CONT {target.pid}"
        return ""

    async def run(self, job: Job, targets: Sequence[Target], stage: Stage, until: float) -> None:
        settle_s = self._settle_s if stage == "before" else 0.0
        left = until - time.monotonic()
        if settle_s > left:
            message = f"{settle_s:g} s to settle are more than the {max(left, 0):.1f} s left; raise the group's timeout"
            raise fault(FaultKind.TRANSIENT, job, message)
        with ExitStack() as stack:
            held = []
            for target in targets:
                with suppress(TargetGoneError):
                    held.append(stack.enter_context(_hold(job, target)))
            for process in held:  # all are held before the first one is told
                if not _handles(process.pid, self._numbers[stage]):  # it started another program meanwhile
                    log.warning("job %s: process %d has lost its handler and is not told", job.job, process.pid)
                    continue
                with suppress(TargetGoneError):
                    process.send_signal(self._numbers[stage])
        await sleep(settle_s)


class Command:
    """A command a stage, run once for the job on this node, as the agent's user. Not given: nothing is done."""

    def __init__(self, options: Mapping[str, str]) -> None:
        stages: tuple[Stage, ...] = ("before", "after")
        self._lines = {stage: _words(options[stage]) for stage in stages if options.get(stage)}

    def able(self, job: Job, target: Target) -> str:  # noqa: ARG002 - the interface has these arguments
        return ""

    async def run(self, job: Job, targets: Sequence[Target], stage: Stage, until: float) -> None:
        if not (words := self._lines.get(stage)):
            return
        told = {
            "TIMESLICE_JOB": job.job,
            "TIMESLICE_GROUP": job.group,
            "TIMESLICE_NODE": job.node,
            "TIMESLICE_PIDS": " ".join(str(target.pid) for target in targets),
            "TIMESLICE_STAGE": stage,
        }
        # A file, not a pipe: what the command leaves running may keep it open for ever.
        with os.fdopen(os.memfd_create("timeslice-hook"), "w+b") as out:
            try:
                process = await asyncio.create_subprocess_exec(
                    *words,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=out,
                    stderr=out,
                    env={**os.environ, **told},
                    start_new_session=True,
                )
            except OSError as error:
                message = f"the command {stage} a freeze, {words[0]}, can't be started: {error.strerror}"
                raise fault(FaultKind.UNSUPPORTED, job, message) from error
            try:
                await asyncio.wait_for(process.wait(), max(until - time.monotonic(), 0.0))
            except TimeoutError:
                what = "did not end within its deadline, and was killed"
            else:
                what = f"ended with {process.returncode}" if process.returncode else ""
            finally:
                await _end(process)
            out.seek(0)
            said = out.read(_OUTPUT_MAX).decode(errors="replace").strip()
        if what:
            message = f"the command {stage} a freeze, {words[0]}, {what}: {quoted(said) or 'it said nothing'}"
            raise fault(FaultKind.TRANSIENT, job, message)


async def _end(process: asyncio.subprocess.Process) -> None:
    """Kill a command with all that it started, if it still runs."""
    if process.returncode is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


def _hold(job: Job, target: Target) -> HeldProcess:
    try:
        return HeldProcess(HeldTarget(target.pid, target.start))
    except PermissionError as error:
        message = f"no right to signal process {target.pid}; run the agent as root or as its user"
        raise fault(FaultKind.UNSUPPORTED, job, message) from error
    except TargetGoneError:
        raise
    except EmulatedDeviceError as error:
        raise fault(error.kind, job, str(error)) from error


def _handles(pid: int, number: int) -> bool:
    """Whether the process has a handler of its own for a signal."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return False
    caught = next((int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:")), 0)
    return bool(caught >> (number - 1) & 1)


def _number(text: str) -> int:
    if relative := _RELATIVE.fullmatch(text):
        number = signal.SIGRTMIN + int(relative[1])
    elif text.removeprefix("SIG") in _PLAIN:
        number = _PLAIN[text.removeprefix("SIG")]
    else:
        number = int(text) if text.isdecimal() else 0
    if not (signal.SIGRTMIN <= number <= signal.SIGRTMAX or number in _PLAIN.values()):
        raise UsageError(
            f"{text!r} is no signal to quiesce a process with; write RTMIN+1, a number from {signal.SIGRTMIN:d} to "
            f"{signal.SIGRTMAX:d}, USR1 or USR2"
        )
    return number


def _name(number: int) -> str:
    plain = {int(value): name for name, value in _PLAIN.items()}
    return plain.get(number) or f"RTMIN+{number - signal.SIGRTMIN}"


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= _MOST_S:
        raise UsageError(f"settle={text!r}: write seconds, such as 0.5")
    return seconds


def _words(text: str) -> tuple[str, ...]:
    """The command as it will be run, without a shell."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UsageError(f"{text!r} is no command: {error}") from None
    if not words or not shutil.which(words[0]):
        raise UsageError(f"{text!r} is no command: {words[0] if words else 'nothing'} is not there or can't be run")
    return tuple(words)
