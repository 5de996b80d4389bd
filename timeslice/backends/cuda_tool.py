"""NVIDIA's cuda-checkpoint, or our own program with its flags on the driver API; and what of it this node has."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from timeslice.backends.calls import Calls
from timeslice.backends.checks import is_alive
from timeslice.backends.toolrun import NO_CONTEXT, State, Tool, ToolFailedError, ToolMissingError
from timeslice.models import Target

HELP_S = 20.0  # a driver without persistence mode takes seconds to wake up
_NO_DRIVER = "Error initializing CUDA"  # about the node, whatever the quoted reason
_BAD_MAP = "invalid argument"


@dataclass(frozen=True, kw_only=True)
class Features:
    """What its help text names. Without ``steps`` it can only toggle: lock and copy are one."""

    steps: bool = True  # since driver 570: --action with a timeout for the lock, and --get-state
    device_map: bool = False  # since driver 580

    @classmethod
    def read(cls, text: str) -> Features:
        return cls(
            steps=all(flag in text for flag in ("--action", "--get-state", "--timeout")),
            device_map="--device-map" in text,
        )


class CudaTool(Tool):
    """The tool, as ``features`` says once it was asked."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], calls: Calls | None = None) -> None:
        super().__init__(command, environment, calls)
        self.command = tuple(command)
        self._asked: Features | None = None
        self._contexts: set[Target] = set()

    @property
    def features(self) -> Features:
        return self._asked or Features()

    async def ask(self) -> Features:
        """What the tool can do; asked until it answered once. Raises ToolMissingError or ToolFailedError."""
        if self._asked is None:
            self._asked = Features.read(await asyncio.to_thread(self._help))
        return self._asked

    async def state(self, target: Target, until: float) -> State | None:
        """None without a context: the restore thread tells that, for "initialization error" is also said of processes
        that have one."""
        if target not in self._contexts and not await self._has_context(target, until):
            return None
        state = await super().state(target, until)
        if state is None and await self._has_context(target, until):
            raise ToolFailedError(f'--get-state says "{NO_CONTEXT}" of process {target.pid}, which has a context')
        return state

    async def act(self, target: Target, action: str, until: float, device_map: str = "") -> None:
        if not self.features.steps:
            await self.run(target, ("--toggle",), until)
            return
        if device_map and action == "restore":
            try:
                await self.run(target, ("--action", action, "--device-map", device_map), until)
                return
            except ToolFailedError as error:
                # It has to name all devices that the process sees, and that may be fewer than we see. One that is
                # refused changes nothing.
                if _BAD_MAP not in str(error):
                    raise
        await super().act(target, action, until)

    async def _has_context(self, target: Target, until: float) -> bool:
        try:
            await self.run(target, ("--get-restore-tid",), until)
        except ToolFailedError as error:
            if _NO_DRIVER in str(error):
                raise
            self._contexts.discard(target)
            return False
        self._contexts = {each for each in self._contexts if is_alive(each)} | {target}
        return True

    def _help(self) -> str:
        try:
            done = subprocess.run(
                [*self.command, "-h"],
                capture_output=True,
                text=True,
                errors="replace",
                timeout=HELP_S,
                check=False,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **self._environment},
            )
        except OSError as error:
            raise ToolMissingError(f"{self.command[0]} can't be started: {error.strerror}") from error
        except subprocess.TimeoutExpired as error:
            raise ToolFailedError(f"{self.command[0]} -h has not ended after {HELP_S:.0f} s") from error
        if done.returncode:
            raise ToolFailedError((done.stderr or done.stdout).strip() or f"{self.command[0]} -h failed")
        return done.stdout
