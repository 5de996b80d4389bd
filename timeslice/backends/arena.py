"""The ``arena`` backend: jobs on an emulated device, moved from outside by ``timeslice-arena-checkpoint``."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from timeslice.arena.control import STATES
from timeslice.arena.errors import ArenaBusyError, EmulatedDeviceError, NoArenaError, TargetGoneError
from timeslice.arena.process import Target as ArenaTarget
from timeslice.arena.session import session
from timeslice.arena.survey import ArenaInfo, arenas_of
from timeslice.backends.base import Capabilities, Context, DeviceMemory, Job
from timeslice.backends.checkpoint_tool import CheckpointBackend, Seen
from timeslice.backends.checks import fault
from timeslice.backends.devices import measure_devices, missing_devices
from timeslice.backends.toolrun import State, Tool
from timeslice.errors import BackendError, FaultKind
from timeslice.models import Target

# As fast as the console script (19 ms), and it can't be another installation's.
COMMAND = (sys.executable, "-I", "-m", "timeslice.arena.tool")

LOOK_S = 1.0  # for another operator to finish, before its process is only looked at

T = TypeVar("T")


class ArenaBackend(CheckpointBackend):
    """Moves whole processes, whether they cooperate or not. Sees only the emulated devices of its group."""

    name = "arena"
    bare_bytes = 64 << 10

    def __init__(self, context: Context) -> None:
        if not context.devices:
            raise BackendError(
                f"group {context.group}, node {context.node}: the arena backend needs an emulated device; "
                f"give the agent --emulate {context.group}=SIZE",
                kind=FaultKind.UNSUPPORTED,
                group=context.group,
                node=context.node,
            )
        self._devices = [str(path.resolve()) for path in context.devices]
        super().__init__(context, Tool(COMMAND, {"TIMESLICE_VISIBLE_ARENAS": ",".join(self._devices)}))

    def capabilities(self) -> Capabilities:
        return Capabilities(forced=True, freed_share=0.99, overlaps=True)

    async def see(self, job: Job, target: Target) -> Seen | None:
        # The control block tells more than the tool, at a hundredth of the cost, and by number and start time.
        arenas = await _call(job, lambda: self._visible(target))
        if not arenas:
            return None
        return Seen(
            state=_state(arenas),
            device_bytes=sum(arena.bytes_on_device for arena in arenas),
            host_bytes=sum(arena.bytes_on_host for arena in arenas),
            total_bytes=sum(arena.bytes_allocated for arena in arenas),
            copied_bytes=sum(arena.bytes_copied for arena in arenas),
        )

    async def state_of(self, job: Job, target: Target, until: float) -> State | None:
        def look() -> State | None:
            try:
                timeout = min(LOOK_S, max(0.0, until - time.monotonic()))
                with session(ArenaTarget(target.pid, target.start), timeout=timeout, visible=self._devices) as opened:
                    return State(opened.state)
            except NoArenaError:
                return None
            except ArenaBusyError:  # an operator hangs on it: then only look
                arenas = self._visible(target)
                return _state(arenas) if arenas else None

        return await _call(job, look)

    async def health(self) -> Sequence[str]:
        return await missing_devices(self._context)

    async def memory(self) -> Sequence[DeviceMemory]:
        return await measure_devices(self._context)

    def _visible(self, target: Target) -> list[ArenaInfo]:
        arenas = arenas_of(ArenaTarget(target.pid, target.start))
        return [arena for arena in arenas if arena.device in self._devices]


def _state(arenas: Sequence[ArenaInfo]) -> State:
    return State(min((arena.state for arena in arenas), key=STATES.index))


async def _call(job: Job, look: Callable[[], T | None]) -> T | None:
    try:
        return await asyncio.to_thread(look)
    except TargetGoneError:
        return None
    except EmulatedDeviceError as error:
        raise fault(error.kind, job, str(error)) from error
