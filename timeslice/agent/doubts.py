"""Whether a job of which no process is watched here may still be on this node's devices.

A grant is evidence that it is. What shows otherwise: the devices, measured free of it; and where they can't be
measured, that the processes which held in its last turn were known to the agents of their nodes, or that all which
were watched here have ended since. That nobody can be seen shows nothing: such a job is `unknown`, and nobody is
granted beside it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping

from timeslice.agent import procfs
from timeslice.agent.choice import BackendSet
from timeslice.agent.devices import Devices, unaccounted
from timeslice.agent.discovery import Finder
from timeslice.agent.targets import TargetRegistry
from timeslice.backends.noop import NoopBackend
from timeslice.errors import BackendError
from timeslice.locks.view import GroupView
from timeslice.models import Residency

OUT = {"", Residency.ABSENT, Residency.GONE, Residency.SUSPENDED}


class Doubts:
    """Of one group on one node. ``presumed``: the jobs that the group has let in and that were not shown out since."""

    def __init__(
        self,
        group: str,
        node: str,
        registry: TargetRegistry,
        backends: BackendSet,
        measure: Callable[[], Awaitable[Devices]],
    ) -> None:
        self._group, self._node = group, node
        self._registry, self._backends, self._measure = registry, backends, measure
        self.finder: Finder | None = None
        self.presumed: frozenset[str] = frozenset()
        self.told: dict[str, str] = {}  # job -> what the group notes of it here
        self._said: frozenset[str] = frozenset()  # jobs whose last turn was held by processes that agents were told of
        self._tokens: dict[str, int] = {}
        self._ended_at: dict[str, int] = {}  # job of which all watched processes ended -> the highest number then

    def note_ended(self, floor: int) -> None:
        """Some process ended. ``floor``: the highest number known now; grants with a later one had other processes."""
        self._ended_at = {job: self._ended_at.get(job, floor) for job in self._registry.departed}

    def learn(self, view: GroupView, out_at: Mapping[str, int], floor: int) -> None:
        """Take what the group says. ``out_at``: job -> the highest number known when it was last seen off the device;
        a grant with a later one may have brought it here. ``floor``: the highest number known before this view."""
        self.note_ended(floor)
        joins = self._node not in view.nodes  # it may also be that the server has lost what it knew
        self.told = {member.job: member.state for member in view.members if member.node == self._node}
        told = {job for job, state in self.told.items() if state not in OUT}
        granted = {
            job.job
            for job in view.jobs.values()
            if (joins or job.residency not in OUT) and job.token > max(out_at.get(job.job, 0), job.out_at)
        }
        self.presumed = frozenset(told | granted) | (self.presumed if joins else frozenset())
        self._said = frozenset(job.job for job in view.jobs.values() if job.has_said)
        self._tokens = {job.job: job.token for job in view.jobs.values()}

    async def about(self, job: str) -> str:
        """Why a job without a process that is watched here may be on the devices all the same; '' if it is not."""
        unwatched = self._registry.unwatched.get(job, "")
        if self.told.get(job) == Residency.SUSPENDED:  # an agent has moved it out; what is asked is whether it lives
            return unwatched
        if job not in self.presumed or self._moves_nothing():
            return ""
        # Evidence of an earlier turn is none for a later one, which may have had processes that nobody could see.
        shown = job in self._said or self._tokens.get(job, 0) <= self._ended_at.get(job, -1)
        try:
            devices = await self._measure()
        except BackendError as error:
            return unwatched or ("" if shown else f"its devices can't be measured: {error}")
        taken = unaccounted(devices, self._explained()) if devices else ""
        if devices and not taken:
            return ""
        if unwatched or (taken and (unwatched := self._hides(()))):
            return unwatched
        if shown and not taken:
            return ""
        what = "its processes that were known have ended" if shown else "no agent of the group knows a process of it"
        return (
            f"{what}, and {taken or 'its devices can not be measured'}; have "
            f"its processes register (timeslice.hold in them, TIMESLICE_NODE={self._node}), end them, or say that "
            f"nothing of it is there: timeslice repair {self._group} --out {job}"
        )

    async def beside(self, job: str) -> str:
        """Why more of a job may be on the devices than its processes that are watched here; '' if there is not."""
        if self._moves_nothing():
            return ""
        own = self._registry.alive(job)
        hidden = self._registry.unwatched.get(job, "") or self._hides({target.uid for target in own})
        if not hidden:
            return ""
        try:
            devices = await self._measure()
        except BackendError:
            return hidden
        return "" if devices and not unaccounted(devices, self._explained()) else hidden

    def _moves_nothing(self) -> bool:
        """With the backend ``noop`` alone an operator has said that jobs of the group keep nothing on devices."""
        return self._backends.names() == (NoopBackend.name,)

    def _explained(self) -> frozenset[int]:
        """Processes whose memory on the devices says nothing of a job that can't be seen."""
        strangers = self.finder.strangers if self.finder else {}
        return self._registry.pids() | frozenset(strangers)

    def _hides(self, users: Collection[int]) -> str:
        """Why some process on the devices may be the job's, if it runs as one of its users or those are not known."""
        for pid, why in self.finder.doubtful.items() if self.finder else ():
            status = procfs.look_at(pid)
            if status is None or not users or status.uid in users:
                return why
        return ""
