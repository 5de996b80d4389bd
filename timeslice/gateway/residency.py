"""What Status tells: the jobs and the accelerators of this gateway's node, or of all if no agent serves it there."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated

from pydantic import ConfigDict, Field

from timeslice.client.aio import AsyncClient
from timeslice.client.compat import JobState, job_state
from timeslice.errors import ServerUnsuitableError, UsageError
from timeslice.locks.scripts import text
from timeslice.locks.view import GroupView
from timeslice.models import Number, Wire, read_wire
from timeslice.names import is_name

log = logging.getLogger("timeslice.gateway")

# A job may be in several groups and on several nodes: of its states the first of these is told.
_ORDER = (JobState.FAULTED, JobState.TRANSITIONING, JobState.RUNNING, JobState.SAVED, JobState.IDLE)


class _Device(Wire):
    model_config = ConfigDict(extra="ignore")

    device: Annotated[str, Field(max_length=4096)]
    total_bytes: Number
    free_bytes: Number


class _Memory(Wire):
    """What is used here of an agent's word about its memory."""

    model_config = ConfigDict(extra="ignore")

    devices: dict[str, tuple[_Device, ...]] = Field(default={}, max_length=1024)


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    id: str
    used_bytes: int
    total_bytes: int


@dataclass(frozen=True, kw_only=True)
class NodeStatus:
    jobs: dict[str, JobState]
    accelerators: tuple[Accelerator, ...]


async def node_status(client: AsyncClient, node: str) -> NodeStatus:
    """As agents last told it."""
    views = await _views(client)
    nodes = {name for view in views for name in view.nodes}
    meant = {node} if node in nodes else nodes
    found: dict[str, Accelerator] = {}
    for name in sorted(meant):
        where = "" if meant == {node} else f"{name}/"
        for device in await _devices(client, name):
            used = max(device.total_bytes - device.free_bytes, 0)
            found.setdefault(
                where + device.device,
                Accelerator(id=where + device.device, used_bytes=used, total_bytes=device.total_bytes),
            )
    return NodeStatus(jobs=_jobs(views, meant), accelerators=tuple(found.values()))


def _jobs(views: Iterable[GroupView], nodes: set[str]) -> dict[str, JobState]:
    told: dict[str, set[JobState]] = {}
    for view in views:
        for target in view.targets:  # a registered process, with or without state on a device
            job, _, at = target.partition("/")
            if is_name(job) and at.partition("/")[0] in nodes:
                told.setdefault(job, set()).add(JobState.IDLE)
        for member in view.members:
            if member.node in nodes:
                told.setdefault(member.job, set()).add(job_state(member.state))
    return {job: min(states, key=_ORDER.index) for job, states in sorted(told.items())}


async def _views(client: AsyncClient) -> list[GroupView]:
    (members,) = await client.driver.pipe([("SMEMBERS", client.keys.groups)])
    views = []
    for name in sorted(filter(is_name, map(text, members))):
        try:
            views.append(await client.status(name))
        except (ServerUnsuitableError, UsageError) as error:  # no reason to hide the others
            log.warning("group %s is left out of the status: %s", name, error)
    return views


async def _devices(client: AsyncClient, node: str) -> list[_Device]:
    (stored,) = await client.driver.pipe([("HGET", client.keys.node_state(node), "memory")])
    try:
        told = read_wire(_Memory, text(stored or "{}"))
    except ValueError as error:
        log.warning("node %s: what its agent says of its memory can't be read: %s", node, error)
        return []
    return [device for devices in told.devices.values() for device in devices]
