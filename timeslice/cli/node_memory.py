"""What nodes have for jobs: their devices, and host memory for suspended state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, Field, ValidationError

from timeslice.cli.output import size
from timeslice.locks.view import GroupView
from timeslice.models import Number, Residency


class _Device(BaseModel):
    total_bytes: Number
    free_bytes: Number


class _Memory(BaseModel):
    """The part of an agent's words that is shown. Older agents told less."""

    budget_bytes: Number | None = None
    available_bytes: Number = 0
    devices: dict[str, list[_Device]] = Field(default_factory=dict)


def suspended(view: GroupView, node: str) -> list[dict[str, Any]]:
    """The jobs of a group that are out of its devices on a node: what they take in host memory, and what stayed."""
    return [
        {
            "group": view.name,
            "job": member.job,
            "host_bytes": member.host_bytes,
            "device_bytes": member.device_bytes,
        }
        for member in sorted(view.members, key=lambda member: member.job)
        if member.node == node and member.state in {Residency.SUSPENDED, Residency.SUSPENDING}
    ]


def devices_told(node: dict[str, Any]) -> str:
    """The devices of each group and how full they are, in a word or two."""
    told, emulated = _told(node), node["emulated"] or ()
    lines = []
    for group, devices in told.devices.items() if told else ():
        if not devices:
            continue
        total, free = sum(each.total_bytes for each in devices), sum(each.free_bytes for each in devices)
        kind = " emulated" if group in emulated else ""
        lines.append(f"{group}: {len(devices)}{kind}, {size(max(total - free, 0))} of {size(total)} used")
    return "; ".join(lines) or ("emulated" if emulated else "")


def host_told(node: dict[str, Any]) -> str:
    """What suspended jobs take of the node's host memory, and what is left of its budget."""
    told, jobs = _told(node), node["suspended"]
    parts = [_held(jobs)] if jobs else []
    if told and told.budget_bytes is not None:
        parts.append(f"{size(told.available_bytes)} of {size(told.budget_bytes)} left")
    return ", ".join(parts)


def _held(jobs: Sequence[dict[str, Any]]) -> str:
    many = f"{len(jobs)} jobs" if len(jobs) > 1 else jobs[0]["job"]
    left = sum(job["device_bytes"] for job in jobs)
    stayed = f" ({size(left)} stayed on devices)" if left else ""
    return f"{size(sum(job['host_bytes'] for job in jobs))} for {many}{stayed}"


def _told(node: dict[str, Any]) -> _Memory | None:
    try:
        return _Memory.model_validate(node["memory"])
    except ValidationError:
        return None
