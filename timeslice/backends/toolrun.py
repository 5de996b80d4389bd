"""Runs a checkpoint tool as a process of its own, one a call, and never kills it.

Killed in mid-operation, the driver and the target fall out of step for good. So a call that is overdue goes on in
the background, is kept until it ends, and no second one is started on the same target meanwhile: nor by the next agent
when this one dies, for tools whose calls are told to it by ``Calls``.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import IO

from timeslice.arena.process import NO_PIDFD, open_pidfd
from timeslice.backends.calls import Calls
from timeslice.models import Target

GRACE_S = 2.0  # a lock that ends just at its deadline, and a call that began just before it, are not overdue
NO_CONTEXT = "initialization error"  # what the tool says of a process that has nothing on the device


class State(StrEnum):
    """What ``--get-state`` prints."""

    RUNNING = "running"
    LOCKED = "locked"
    CHECKPOINTED = "checkpointed"
    FAILED = "failed"  # the driver gave the process up


class ToolFailedError(Exception):
    """The tool ended with an error; the text is its own."""


class ToolMissingError(Exception):
    """The tool can't be started at all."""


class ToolOverdueError(Exception):
    """The tool has not ended in time, and goes on."""


@dataclass(eq=False)
class _Running:
    words: tuple[str, ...]
    process: subprocess.Popen[bytes]
    out: IO[bytes]
    err: IO[bytes]
    since: float = field(default_factory=time.monotonic)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    said: list[str] = field(default_factory=lambda: ["", ""])

    def result(self) -> str:
        if self.process.returncode:
            reason = f"{self.words[0]} ended with exit status {self.process.returncode}"
            raise ToolFailedError(self.said[1] or self.said[0] or reason)
        return self.said[0]

    def end(self) -> None:
        self.process.wait()
        for number, file in enumerate((self.out, self.err)):
            file.seek(0)
            self.said[number] = file.read(65536).decode(errors="replace").strip()
            file.close()
        self.ended.set()


class Tool:
    """A program with cuda-checkpoint's flags. ``environment`` is added to this process's own."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], calls: Calls | None = None) -> None:
        self._command = tuple(command)
        self._environment = dict(environment)
        self._calls = calls
        self._running: dict[Target, _Running] = {}

    async def state(self, target: Target, until: float) -> State | None:
        """State of a target; None when it has no context on the device."""
        try:
            text = await self.run(target, ("--get-state",), until)
        except ToolFailedError as error:
            if NO_CONTEXT in str(error):
                return None
            raise
        try:
            return State(text)
        except ValueError:
            raise ToolFailedError(f"--get-state printed {text!r}, which is no state") from None

    async def act(self, target: Target, action: str, until: float) -> None:
        """One of lock, checkpoint, restore, unlock. A lock is told the time that is left."""
        words: tuple[str, ...] = ("--action", action)
        if action == "lock":
            words += ("--timeout", str(max(1, int((until - time.monotonic()) * 1000))))
        await self.run(target, words, until)

    async def run(self, target: Target, words: tuple[str, ...], until: float) -> str:
        """What the tool prints. ``until`` is on the monotonic clock; a call that has begun gets ``GRACE_S`` more."""
        if not await self.idle(target, until):
            raise ToolOverdueError(self.overdue(target))
        call = self._start(target, words)
        if not await self._wait(call, max(until, time.monotonic()) + GRACE_S):
            raise ToolOverdueError(self.overdue(target))
        return call.result()

    async def idle(self, target: Target, until: float) -> bool:
        """True once no call works on this target any more; False when one still does at ``until``."""
        if call := self._running.get(target):
            return await self._wait(call, until)
        return self._calls is None or await self._calls.ended(target, until)

    def overdue(self, target: Target) -> str:
        """What is under way on this target, for people; empty when nothing is."""
        if call := self._running.get(target):
            what = f"{' '.join(call.words)} on process {target.pid} has not ended after "
            what += f"{time.monotonic() - call.since:.1f} s (tool process {call.process.pid})"
        elif self._calls and self._calls.works_on(target):
            what = f"a call of {self._command[0]} on process {target.pid}, begun by an earlier agent, has not ended"
        else:
            return ""
        return f"{what}. It must not be killed; if it never ends, end process {target.pid}"

    def _start(self, target: Target, words: tuple[str, ...]) -> _Running:
        try:
            lock = self._calls.begin(target) if self._calls else -1
        except OSError as error:  # without it the next agent could not tell: not even tried
            raise ToolMissingError(f"{error.filename} can't be written: {error.strerror}") from error
        if lock is None:
            raise ToolOverdueError(self.overdue(target))
        try:
            return self._spawn(target, words, (lock,) if self._calls else ())
        finally:
            if self._calls:
                os.close(lock)

    def _spawn(self, target: Target, words: tuple[str, ...], inherited: Sequence[int]) -> _Running:
        # Files, not pipes: when this agent dies, the tool must not stumble over a pipe that nobody reads.
        out, err = (os.fdopen(os.memfd_create("timeslice-tool"), "w+b") for _ in range(2))
        try:
            process = subprocess.Popen(
                [*self._command, *words, "--pid", str(target.pid)],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env={**os.environ, **self._environment},
                start_new_session=True,  # a Ctrl-C at the agent's terminal is not for it
                pass_fds=inherited,
            )
        except OSError as error:
            out.close()
            err.close()
            raise ToolMissingError(f"{self._command[0]} can't be started: {error.strerror}") from error
        call = self._running[target] = _Running((*self._command, *words), process, out, err)
        _when_ended(process, lambda: self._end(target, call))
        return call

    def _end(self, target: Target, call: _Running) -> None:
        del self._running[target]
        call.end()

    @staticmethod
    async def _wait(call: _Running, until: float) -> bool:
        try:
            await asyncio.wait_for(call.ended.wait(), until - time.monotonic())
        except TimeoutError:
            return False
        return True


_END_POLL_S = 0.02  # where the system gives no pidfd


def _when_ended(process: subprocess.Popen[bytes], then: Callable[[], None]) -> None:
    # asyncio's own subprocesses are killed when their loop closes, and a waiting thread would keep us from exiting.
    loop = asyncio.get_running_loop()
    pidfd = open_pidfd(process.pid)

    def look() -> None:
        if process.poll() is None:
            loop.call_later(_END_POLL_S, look)
        else:
            then()

    if pidfd == NO_PIDFD:
        look()
        return

    def ended() -> None:
        loop.remove_reader(pidfd)
        os.close(pidfd)
        then()

    loop.add_reader(pidfd, ended)
