"""Notices a holder that computes elsewhere: it has the group, and nothing of it is on the group's devices (O18).

Usually a library path changed, and the framework fell back to the CPU without a word.
"""

from __future__ import annotations

import logging
from collections.abc import Collection

from timeslice import metrics
from timeslice.agent import procfs
from timeslice.agent.calling import Deadline
from timeslice.agent.group import Scope
from timeslice.agent.presence import MEASURE_S
from timeslice.errors import BackendError
from timeslice.locks.view import GroupView

log = logging.getLogger("timeslice.agent")

AFTER_S = 60.0
_NAMED = 8  # processes that are told


class IdleHolders:
    """Of one group on one node. ``after_s``: so long a holder may take to come to the device; 0 never complains.

    A hold that was once seen on a device, on whatever node, is fine until it ends.
    """

    def __init__(self, scope: Scope, after_s: float) -> None:
        self._scope, self._after_s = scope, after_s
        self._fine = 0  # token of a hold that was seen there
        self._said = 0  # token of one that was complained of

    async def look(self, view: GroupView) -> None:
        """Set the scope's ``idle_holder``: a sentence, or ''."""
        complaint = await self._complaint(view) if self._after_s and view.holder else ""
        self._scope.idle_holder = complaint
        metrics.IDLE_HOLDERS.labels(self._scope.name).set(bool(complaint))

    async def _complaint(self, view: GroupView) -> str:
        token, held_s = view.number("token"), (view.now_ms - view.number("granted_at_ms")) / 1000
        if self._fine == token or not self._concerns_us(view):
            return ""
        if self._was_told(view):
            self._fine = token
            return ""
        if held_s < self._after_s:
            return ""
        there = await self._there()
        if there is None:
            return ""
        registry = self._scope.registry
        if any({target.pid, registry.number_told(target)} & there for target in registry.alive(view.holder)):
            self._fine = token
            return ""
        strangers = there - registry.pids()
        if not all(map(procfs.look_at, strangers)):  # counted as in another pid namespace: it may be the holder's
            return ""
        told = (
            f"holder of {view.name} (job {view.holder}) has no process on the device for {held_s:.0f} s"
            f"{_whose(view, strangers)}: is it running on the CPU?"
        )
        if self._said != token:
            log.warning("group %s: %s", self._scope.name, told)
        self._said = token
        return told

    def _concerns_us(self, view: GroupView) -> bool:
        """Whether the holder, or any process of its job, is on this node."""
        return view.state.get("host") == self._scope.node or bool(self._scope.registry.alive(view.holder))

    def _was_told(self, view: GroupView) -> bool:
        """Whether some agent, or the job's own workload, told of state on a device, or of state that was there."""
        last = self._scope.presences.last.get(view.holder)
        seen = [(each.device_bytes, each.host_bytes) for each in view.members if each.job == view.holder]
        return any(map(any, [*seen, (last.device_bytes, last.host_bytes) if last else ()]))

    async def _there(self) -> set[int] | None:
        """Numbers of the processes that have something on the group's devices; None where nobody can tell."""
        scope = self._scope
        try:
            devices = await scope.caller.look("measuring devices", scope.backends.measure, Deadline(MEASURE_S))
        except BackendError as error:
            log.info("group %s: who is on its devices can't be told: %s", scope.name, error)
            return None
        return {pid for device in devices for pid, _ in device.holders} if devices else None


def _whose(view: GroupView, strangers: Collection[int]) -> str:
    """What to do if those who are there are the holder's, and nobody knows it; '' if nobody else is there."""
    if not strangers:
        return ""
    numbers = ", ".join(map(str, sorted(strangers)[:_NAMED]))
    return (
        f" that is known to be its own. If process {numbers} there is, let it register, or start it with "
        f"TIMESLICE_JOB={view.holder} and TIMESLICE_GROUPS={view.name}, for nobody can move it now. Else"
    )
