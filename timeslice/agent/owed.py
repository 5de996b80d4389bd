"""Device memory that jobs had when they began to leave, until it was measured free (G06).

A backend's word that a job is suspended frees nothing. What has to become free, and what was free before, is on disk
before the backend is asked; a job that owes does not count as out, also for an agent that was killed and is back.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from timeslice.agent.devices import NOTHING, Devices, freed, told
from timeslice.agent.journal import Journal
from timeslice.agent.state import Owed, owing
from timeslice.backends.base import Probe
from timeslice.errors import BackendError
from timeslice.models import Residency, Target

log = logging.getLogger("timeslice.agent")

_OUT = {Residency.SUSPENDED, Residency.ABSENT}


@dataclass(frozen=True)
class Standing:
    """How much of what is due was measured free."""

    due: int
    freed: int
    share: float

    @property
    def left(self) -> int:
        """Bytes that are still due; 0 when enough of them are free."""
        return 0 if self.freed >= self.share * self.due else self.due - self.freed

    def __str__(self) -> str:
        return f"only {self.freed} of its {self.due} bytes were measured free (at least {self.share:.0%} are due)"


@dataclass(frozen=True)
class Debt:
    """What a job that seems to be out still owes, and that in words."""

    left: int
    told: str


def standing(owed: Owed, devices: Devices, shown: int, taken: Mapping[str, int] = NOTHING) -> Standing:
    """``shown``: the job's bytes on the devices by its backend's own look. ``taken``: what somebody who came in
    meanwhile has."""
    gone = max(owed.had - shown, 0)
    due = gone if owed.due is None else owed.due
    # Where no device can be asked, or its state is known to lie elsewhere, such as tensors of a CPU beside an emulated
    # device: the backend's own measure.
    measured = sum(freed(owed.free, devices, taken).values()) if _on_devices(owed, due) else gone
    return Standing(due, measured, owed.share)


def devices_tell(owed: Owed) -> bool:
    """Whether the devices alone can tell what became free, without a look at the job."""
    return owed.due is not None and _on_devices(owed, owed.due)


def _on_devices(owed: Owed, due: int) -> bool:
    return owed.there >= max(int(owed.share * due), 1)


class Debts:
    """Of the jobs of one group on this node."""

    def __init__(self, journal: Journal, measure: Callable[[], Awaitable[Devices]]) -> None:
        self._journal, self._measure = journal, measure

    def of(self, job: str, targets: Sequence[Target]) -> Owed | None:
        """What these processes owe. Not what others did, of an earlier run of the job."""
        owed = self._journal.ledger.owed.get(job)
        return owed if owed and any((each.pid, each.start) in owed.processes for each in targets) else None

    async def owe(self, job: str, owed: Owed) -> None:
        """Write down what a job that is about to leave has to free. An undo goes ahead with a full disk, too."""
        await self._journal.update_anyway(lambda ledger: owing(ledger, job, owed))

    async def settle(self, job: str) -> None:
        """It was measured free, or the job is back."""
        await self._journal.update_anyway(lambda ledger: owing(ledger, job, None))

    async def of_one_out(self, job: str, targets: Sequence[Target], probe: Probe) -> Debt | None:
        """What a job that seems to be out still owes. Once that was measured free it is forgotten, for somebody else
        may take the memory then."""
        owed = self.of(job, targets)
        if owed is None or probe.state not in {*_OUT, Residency.RESIDENT}:
            return None
        if probe.state is Residency.RESIDENT:
            await self.settle(job)
            return None
        try:
            devices = await self._measure()
        except BackendError as error:
            return Debt(owed.had, f"whether its {owed.had} bytes of device memory are free can't be told: {error}")
        now = standing(owed, devices, probe.device_bytes)
        if now.left == 0:
            log.info("job %s: what it had on the devices is free by now", job)
            await self.settle(job)
            return None
        pids = ", ".join(str(each.pid) for each in targets)
        return Debt(
            now.left,
            f"it was moved off the device, but {now}: {'; '.join(map(told, devices)) or 'no device can be asked'}; "
            f"this goes on by itself when they are free; if they stay taken, end its processes ({pids})",
        )
