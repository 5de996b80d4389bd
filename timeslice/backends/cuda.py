"""The ``cuda`` backend: whole processes leave NVIDIA GPUs and come back, whether they cooperate or not.

Works through cuda-checkpoint, or the driver API of the same abilities. What is on which device is read from NVML, for
the tool tells states and no sizes. A footprint is written down when a process leaves: a restore is begun only where it
fits, because one that fails for lack of memory can spoil the driver for good, and is believed only when it came back
to the same devices.
"""

# ruff: noqa: ARG002 - the interface has these arguments
from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Collection, Mapping, Sequence

from pydantic import Field

from timeslice.backends.awake import awake, heard
from timeslice.backends.base import Capabilities, Context, DeviceMemory, Job, Outcome
from timeslice.backends.calls import Calls
from timeslice.backends.checkpoint_tool import ACTIONS, CheckpointBackend, Seen
from timeslice.backends.checks import fault, is_alive
from timeslice.backends.cuda_health import complaints
from timeslice.backends.cuda_memory import (
    Footprint,
    Listing,
    Placement,
    footprint,
    listing,
    number_of,
    shortage,
    status,
    strangers,
)
from timeslice.backends.cuda_tool import CudaTool
from timeslice.backends.marks import Marks, marks_folder
from timeslice.backends.nvml import Nvml, ask
from timeslice.backends.toolrun import State, ToolFailedError, ToolMissingError
from timeslice.errors import BackendError, FaultKind
from timeslice.models import Number, Target, Wire, Word

TOOL = "cuda-checkpoint"
API = (sys.executable, "-I", "-m", "timeslice.backends.cuda_api")
LOOK_S = 5.0  # for a state: a process whose peer is locked may not tell it
RETURN_S = 5.0  # NVML may show late what came back
_PAUSE_S = 0.05
_TOGGLES = {"checkpoint": (State.RUNNING, State.CHECKPOINTED), "restore": (State.CHECKPOINTED, State.RUNNING)}
_CANT = "not supported"  # in the driver's text for unified memory, CUDA IPC, and a lack of rights


class Left(Wire):
    """What a process had on each device when it was about to leave."""

    devices: dict[Word, Number] = Field(max_length=64)


class CudaBackend(CheckpointBackend):
    """Options: ``driver`` (``cli`` or ``api``), ``tool`` (path of cuda-checkpoint), ``state`` (footprints, calls)."""

    name = "cuda"
    options = frozenset({"driver", "state", "tool"})
    bare_bytes = 1  # a context takes memory, so who has none has no context worth a move
    one_by_one = frozenset({"checkpoint", "restore"})  # of two at once, both may wait for ever

    def __init__(self, context: Context) -> None:
        driver = context.options.get("driver", "cli")
        if driver not in ("cli", "api"):
            raise _unusable(context, f"driver={driver} is neither cli (the tool {TOOL}) nor api (cuda-bindings)")
        folder = marks_folder(context, self.name, f"cuda-{context.group}")
        command = (context.options.get("tool", TOOL),) if driver == "cli" else API
        self._cuda = CudaTool(command, {}, Calls(folder / "calls"))
        super().__init__(context, self._cuda)
        self._nvml = Nvml()
        self._marks = Marks(folder, Left)
        self._refused: dict[Target, str] = {}

    def capabilities(self) -> Capabilities:
        return Capabilities(forced=True, freed_share=0.99)

    async def see(self, job: Job, target: Target) -> Seen | None:
        on = footprint(target, await self._listing())
        here = {device: size for device, size in on.items() if self._is_ours(device)}
        size = sum(each or 0 for each in here.values())
        state = await self._state_if_told(job, target, on)
        if state is None:
            if size and is_alive(target):  # it was still listed when it ended
                raise fault(
                    FaultKind.TRANSIENT,
                    job,
                    f"process {target.pid} has {size} bytes on {', '.join(here)}, but {self._cuda.command[0]} finds no "
                    "CUDA context in it; run the agent as root, in the host's PID namespace",
                )
            return None
        left = self._marks.get(target)
        host = sum(left.devices.values()) if left and state is State.CHECKPOINTED else 0
        total = host if state is State.CHECKPOINTED else size
        return Seen(state=state, device_bytes=size, host_bytes=host, total_bytes=total, on=on)

    async def state_of(self, job: Job, target: Target, until: float) -> State | None:
        await self._learn(job)
        if self._cuda.features.steps:
            return await heard(super().state_of(job, target, until), target)
        # A tool that only toggles tells no state: who is listed computes, who left a footprint is out.
        if footprint(target, await self._listing()):
            return State.RUNNING
        return State.CHECKPOINTED if self._marks.get(target) else None

    async def do(self, job: Job, target: Target, action: str, until: float) -> None:
        left = self._marks.get(target) if action == "restore" else None
        device_map = await self._map() if left and len(left.devices) > 1 else ""
        with awake(target):  # the driver does its part in a thread of the process
            await self._cuda.act(target, action, until, device_map)

    def movable(self, seen: Mapping[Target, Seen]) -> list[Target]:
        """Processes of which NVML tells no size move only if it tells none of any."""
        sized = [target for target, each in seen.items() if each.device_bytes or each.state is State.CHECKPOINTED]
        return sized or [target for target, each in seen.items() if None in each.on.values()]

    def _is_bare(self, seen: Seen) -> bool:
        return None not in seen.on.values() and super()._is_bare(seen)

    async def check_shape(self, job: Job, seen: Mapping[Target, Seen]) -> None:
        self._refused = {target: why for target, why in self._refused.items() if is_alive(target)}
        for target, each in seen.items():
            if each.state is State.CHECKPOINTED:
                continue
            if why := self._refused.get(target) or self._refusal(target, each.on):
                raise fault(FaultKind.UNSUPPORTED, job, f"process {target.pid} can't be moved: {why}")

    def _refusal(self, target: Target, on: Footprint) -> str:
        if (leader := status(target.pid, "Tgid")) and leader[0] != str(target.pid):
            return f"it is a thread of process {leader[0]}; register that one"
        if outside := [device for device in on if not self._is_ours(device)]:
            return (
                f"it also computes on {', '.join(outside)}, which group {self._context.group} does not have here; "
                "give the group all devices of the job, or one process a group"
            )
        if len(on) > 1 and not self._cuda.features.device_map:
            return (
                f"it computes on {len(on)} devices, and this driver can't be told which is which at a restore; "
                "use one process a device, or driver 580 or newer"
            )
        return ""

    async def note_leaving(self, job: Job, seen: Mapping[Target, Seen]) -> None:
        listed = await self._listing()
        going = [target for target, each in seen.items() if each.state is not State.CHECKPOINTED]
        try:
            self._marks.sweep()
            for target in going:
                on = footprint(target, listed)
                self._marks.put(target, Left(devices={device: size or 0 for device, size in on.items()}))
        except OSError as error:
            message = f"what it has where can't be written to {error.filename}: {error.strerror}; see the option state"
            raise fault(FaultKind.TRANSIENT, job, message) from error

    async def taken(self, job: Job, targets: Collection[Target]) -> int:
        """A process that is out is listed no more, whatever it still holds: what the devices say counts."""
        return sum(device.total_bytes - device.free_bytes for device in await self.memory())

    async def check_room(self, job: Job, targets: Sequence[Target]) -> None:
        """A restore that does not fit is not even tried."""
        if not targets:
            return
        devices, lefts = await self.memory(), [self._marks.get(target) for target in targets]
        listed = {pid for device in devices for pid, _ in device.holders}
        why = shortage(devices, [left.devices for left in lefts if left], {number_of(each, listed) for each in targets})
        family = {number_of(target, listed) for target in job.targets}
        if not why and None in lefts and (others := strangers(devices, family)):
            why = f"how much it needs is not known any more, and the devices are not free: {others}"
        if why:
            raise fault(FaultKind.TRANSIENT, job, f"not restored, its saved copy is intact: {why}")

    async def check_return(self, job: Job, targets: Sequence[Target], until: float) -> None:
        wait = min(until, time.monotonic() + RETURN_S)
        while (found := await self._misplaced(targets)).missing:
            if found.elsewhere or time.monotonic() > wait:
                raise fault(FaultKind.TRANSIENT, job, f"the driver did not restore it to where it was: {found}")
            await asyncio.sleep(_PAUSE_S)

    async def _misplaced(self, targets: Sequence[Target]) -> Placement:
        listed = await self._listing()
        for target in filter(is_alive, targets):  # of one that has ended nothing comes back
            if left := self._marks.get(target):
                found = Placement.compare(target.pid, left.devices, footprint(target, listed))
                if found.missing:
                    return found
        return Placement()

    def failure(self, job: Job, target: Target, action: str, complaint: str) -> BackendError:
        if action != "checkpoint" or _CANT not in complaint:
            return super().failure(job, target, action, complaint)
        why = (
            f"{complaint}; does it use unified memory (cudaMallocManaged) or CUDA IPC (before driver 610)? Those can't "
            "be moved. Nor can anything by an agent that is not root"
        )
        if os.geteuid() == 0:
            self._refused[target] = why
        return fault(FaultKind.UNSUPPORTED, job, why)

    async def release(self, job: Job, *, deadline_s: float) -> Outcome:
        outcome = await super().release(job, deadline_s=deadline_s)
        self._forget(job)
        return outcome

    async def _bring_back(self, job: Job, until: float) -> None:
        await super()._bring_back(job, until)
        self._forget(job)

    def _forget(self, job: Job) -> None:
        for target in job.targets:
            self._marks.drop(target)

    async def health(self) -> Sequence[str]:
        return await complaints(self._cuda, self._nvml, self._context.accelerators)

    async def memory(self) -> Sequence[DeviceMemory]:
        return await ask(self._measure)

    def _measure(self) -> list[DeviceMemory]:
        uuids = self._context.accelerators or [device.uuid for device in self._nvml.devices()]
        return self._nvml.measure(uuids)

    async def _listing(self) -> Listing:
        return await ask(lambda: listing(self._nvml))

    def _is_ours(self, device: str) -> bool:
        return not self._context.accelerators or device in self._context.accelerators

    async def _map(self) -> str:
        devices = await ask(self._nvml.devices)
        return ",".join(f"{each.uuid}={each.uuid}" for each in devices)

    async def _state_if_told(self, job: Job, target: Target, on: Footprint) -> State | None:
        """Its state; while it does not tell one, what can be seen of it from outside."""
        if not self._tool.overdue(target):
            try:
                return await self._look(job, target, time.monotonic() + LOOK_S)
            except BackendError as error:
                if error.kind is not FaultKind.POISONED:
                    raise
        return State.RUNNING if on else State.CHECKPOINTED if self._marks.get(target) else None

    async def _learn(self, job: Job) -> None:
        try:
            self.actions = ACTIONS if (await self._cuda.ask()).steps else _TOGGLES
        except (ToolFailedError, ToolMissingError) as error:
            raise fault(FaultKind.UNSUPPORTED, job, str(error)) from error


def _unusable(context: Context, reason: str) -> BackendError:
    message = f"group {context.group}, node {context.node}: cuda backend: {reason}"
    return BackendError(message, kind=FaultKind.UNSUPPORTED, group=context.group, node=context.node)
