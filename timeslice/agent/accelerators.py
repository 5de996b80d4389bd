"""Which real devices belong to which group of this agent, and what moves state there."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence

from timeslice.agent.choice import CHANNEL, MakeBackend
from timeslice.backends.base import Context
from timeslice.backends.nvml import Accelerator, Nvml, NvmlError, ask
from timeslice.errors import BackendError, UsageError

log = logging.getLogger("timeslice.agent")

ALL, CUDA = "all", "cuda"
HEALTH_S = 30.0
Assigned = dict[str, tuple[str, ...]]  # group -> UUIDs


async def assign(asked: Mapping[str, Sequence[str]], groups: Sequence[str], emulated: Iterable[str]) -> Assigned:
    """The UUIDs of each group's devices, checked against what there is.

    ``asked``: group -> UUIDs, numbers of GPUs, or ``all``. Without it the only group of an agent gets all there are,
    unless its device is emulated. UsageError, NvmlError (devices were asked for, and NVML can't be asked).
    """
    if both := sorted(asked.keys() & set(emulated)):
        raise UsageError(f"group {both[0]} has an emulated device, so it gets no real one: drop --device or --emulate")
    if asked:
        return chosen(asked, await ask(Nvml().devices))
    if list(emulated) or len(set(groups)) != 1:
        return {}
    try:
        found = await ask(Nvml().devices)
    except NvmlError as error:
        log.info("no real devices: %s", error)
        return {}
    return {groups[0]: tuple(device.uuid for device in found)} if found else {}


def chosen(asked: Mapping[str, Sequence[str]], found: Sequence[Accelerator]) -> Assigned:
    """UsageError for a device that is not there, or that two groups would have."""
    owners: dict[str, str] = {}
    assigned: Assigned = {}
    for group, words in asked.items():
        uuids = tuple(dict.fromkeys(uuid for word in words for uuid in _matching(group, word, found)))
        for uuid in uuids:
            if (other := owners.setdefault(uuid, group)) != group:
                raise UsageError(
                    f"device {uuid} can't be both {other}'s and {group}'s: give each group its own, or divide the GPU "
                    "by MIG and give each an instance"
                )
        assigned[group] = uuids
    return assigned


def described(device: Accelerator) -> str:
    """For lists and logs."""
    kind = f"MIG instance of GPU {device.index}" if device.parent else f"GPU {device.index}"
    return f"{device.uuid} ({kind}, {device.name}, {device.total_bytes >> 20} MiB)"


async def default_backends(context: Context, make: MakeBackend) -> tuple[str, ...]:
    """For a group with real devices: workloads move themselves; all other jobs are moved by ``cuda``, where it can."""
    try:
        async with asyncio.timeout(HEALTH_S):
            why = list(await make(CUDA, context).health())
    except (BackendError, TimeoutError) as error:
        why = [str(error) or f"it did not answer within {HEALTH_S:g} s"]
    if not why:
        return CHANNEL, CUDA
    log.warning(
        "group %s: only jobs that register a workload can be moved, for the backend %s can't be used here: %s",
        context.group,
        CUDA,
        "; ".join(why),
    )
    return (CHANNEL,)


def _matching(group: str, word: str, found: Sequence[Accelerator]) -> list[str]:
    """A GPU that is divided stands for all its instances."""
    matching = [
        device.uuid
        for device in found
        if word == ALL or word.lower() in {device.uuid.lower(), device.parent.lower(), str(device.index)}
    ]
    if not matching:
        there = "; ".join(map(described, found)) or "none"
        raise UsageError(f"group {group}: no device {word!r} on this node; there are: {there}")
    return matching
