"""What a fault is once it is chosen, and what faults are done to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import redis

from timeslice.errors import RedisUnreachableError
from timeslice.locks.keys import Keys
from timeslice.locks.scripts import text
from timeslice.torture.clock import MISSING, Clock
from timeslice.torture.fleet import Fleet
from timeslice.torture.processes import Child, Processes, Role
from timeslice.torture.proxy import Proxy
from timeslice.torture.schedule import Planned
from timeslice.torture.stage import GROUPS

NO_DISK = "no agent's disk is filled: this user may not mount one"
_AIMED = 0.6


@dataclass
class World:
    """What faults are done to. Without ``clock`` the server's clock can't be moved, without ``disks`` no disk can be
    filled; ``lacking`` has the other kinds that this machine can't do. Each with its reason."""

    processes: Processes
    fleet: Fleet
    proxy: Proxy | None
    knobs: Path
    disks: Mapping[str, Path]  # node -> its agent's state folder, on a disk of its own
    clock: Clock | None
    lacking: Mapping[str, str] = field(default_factory=dict)

    def lacks(self, kind: str) -> str:
        """Why this machine or topology can't do that; '' if it can."""
        if kind == "clock" and self.clock is None:
            return MISSING
        if kind == "disk" and not self.disks:
            return NO_DISK
        return self.lacking.get("pid-namespace" if kind == "blind-agent" else kind, "")


@dataclass(frozen=True, kw_only=True)
class Deed:
    """``harm``, ``label``, ``groups``, ``detail``, ``kills`` as in `history.Fault`. ``heal`` None: it is over when the
    keeper has started the process again.

    ``took``: whether it came about, as read back from what it was done to. ``late``: that shows later only, as
    somebody has to run into it, or it takes a while.
    """

    harm: str
    do: Callable[[], object]
    took: Callable[[], bool]
    heal: Callable[[], object] | None
    late: bool = False
    label: str = ""
    groups: tuple[str, ...] = ()
    detail: str = ""
    kills: tuple[str, ...] = ()


def victim(world: World, planned: Planned, role: Role) -> Child | None:
    """Who holds a group, or drives its swaps, for more than half of the faults, as it hurts only there; else any."""
    fit = world.processes.having(role)
    return (_aimed(world, planned, role, fit) or fit[int(planned.pick * len(fit))]) if fit else None


def _aimed(world: World, planned: Planned, role: Role, fit: list[Child]) -> Child | None:
    if role == "agent" or planned.amount > _AIMED:
        return None
    fleet, first = world.fleet, int(planned.pick * len(GROUPS))
    for group in (*GROUPS[first:], *GROUPS[:first]):
        key = Keys().group(group).state
        try:
            with fleet.client(fleet.holder_of(key)) as client:
                found = client.hmget(key, ["lease_id", "pid", "owner", "confirmed"])
                lease, pid, owner, confirmed = (text(value or "") for value in found)
        except (RedisUnreachableError, redis.exceptions.RedisError, OSError):
            return None  # anybody, then
        for child in fit:
            holds = lease and child.process and str(child.process.pid) == pid
            if planned.kind == "stop-job":  # one that is inside loses its lease
                holds = holds and confirmed == "1"
            if holds if role == "job" else child.name.endswith(f"-{owner}"):
                return child
    return None
