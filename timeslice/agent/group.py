"""What the parts of an agent that serve one group share."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path

from timeslice import metrics
from timeslice.agent import fencing
from timeslice.agent.calling import Caller
from timeslice.agent.choice import BackendSet
from timeslice.agent.discovery import Finder
from timeslice.agent.discovery.environment import FRESH_S
from timeslice.agent.doubts import OUT
from timeslice.agent.folder import private_folder
from timeslice.agent.journal import Journal
from timeslice.agent.memory import HostMemory
from timeslice.agent.presence import Presences
from timeslice.agent.state import Ledger, Seen, Undo, kept
from timeslice.agent.steps import Steps
from timeslice.agent.targets import TargetRegistry
from timeslice.locks.drivers import AsyncDriver
from timeslice.locks.keys import GroupKeys
from timeslice.locks.view import GroupView
from timeslice.models import Command, GroupConfig, Residency

log = logging.getLogger("timeslice.agent")


class Scope:
    """One group on one node. ``wake`` asks for a heartbeat now."""

    def __init__(
        self,
        keys: GroupKeys,
        node: str,
        driver: AsyncDriver,
        folder: Path,
        host: HostMemory,
    ) -> None:
        private_folder(folder)
        self.keys, self.node, self.driver, self.host = keys, node, driver, host
        self.name = keys.name
        self.config = GroupConfig()
        self.wake = asyncio.Event()
        self.faults: list[str] = []  # what keeps its backends from working here
        self.ask = False  # at the next look the jobs themselves are asked
        self.finder: Finder | None = None  # of processes that did not register
        self.must_leave = ""  # the job that has to be off the device, come what may, if there is one
        self.idle_holder = ""  # who holds and is nowhere on the device, if somebody does
        self.caller = Caller(self.name)
        self.journal = Journal(folder / "journal.json")
        self.registry = TargetRegistry(self.name, node, folder / "targets.json", self._process_ended)
        self.floor = self.ledger.floor
        self.out_at: dict[str, int] = {}  # job -> the highest number known when it was last seen off the device

    def equip(self, backends: BackendSet) -> None:
        """Give the group its backends, which may need the scope's parts to be made."""
        self.backends = backends
        self.presences = Presences(self.name, self.node, self.registry, backends, self.journal, self.caller)
        self.steps = Steps(self.name, self.presences, self.host, self.caller, lambda: self.config)

    def _process_ended(self) -> None:
        self.presences.doubts.note_ended(self.floor)
        self.wake.set()

    @property
    def ledger(self) -> Ledger:
        return self.journal.ledger

    def undo_of(self, command: Command) -> Undo:
        """What the swap of this order may have done here so far."""
        return self.ledger.undo if self.ledger.swap == command.swap else Undo()

    def complaints(self) -> list[str]:
        """What an operator should know, a few lines at most."""
        idle = [self.idle_holder] if self.idle_holder else []
        return [*self.faults, *idle, *self.registry.complaints()]

    def raise_floor(self, number: int) -> None:
        self.floor = max(self.floor, number)

    async def keep_floor(self, *, fence: int = 0) -> None:
        """Put the highest number seen on disk; ``fence`` is the newest grant's token. How jobs left that have no
        process here any more is dropped with that."""
        await self.journal.update_anyway(
            lambda ledger: kept(fencing.raised(ledger, floor=self.floor, fence=fence), self.registry.jobs())
        )

    async def learn(self, view: GroupView, *, fresh_s: float = FRESH_S) -> None:
        """Take what the group says of settings and processes, and look for processes that did not register."""
        self.config = view.config
        self.must_leave = _must_leave(view)
        await self.registry.refresh(view.targets, _busy(view, self.node))
        self.presences.doubts.learn(view, self.out_at, self.floor)
        if self.finder:
            await self.finder.find(view, fresh_s=fresh_s)

    async def refresh(self) -> None:
        """Learn which processes registered meanwhile, and the settings. RedisUnreachableError."""
        await self.learn(await self.driver.view(self.keys), fresh_s=0)

    def note(self, seen: Sequence[Seen], *, moved: bool = False) -> None:
        """Remember what was observed of jobs. ``moved``: after an order, which may itself have brought them in."""
        for job in seen:
            if job.state in OUT:
                self.out_at[job.job] = self.floor
            elif moved:
                self.out_at.pop(job.job, None)
            if job.state in {Residency.GONE, Residency.ABSENT, Residency.UNKNOWN}:
                self.presences.last.pop(job.job, None)
            else:
                self.presences.last[job.job] = job
            self.host.note(self.name, job.job, job.host_bytes)
        metrics.HOST_BYTES_HELD.labels(self.name).set(sum(self.host.held.get(self.name, {}).values()))


def _busy(view: GroupView, node: str) -> set[int]:
    """Numbers of the processes of this node that hold or wait, as they call themselves."""
    holder = (view.state.get("host", ""), view.state.get("pid", ""))
    parties = [*view.parties, *(party for waiter in view.queue for party in waiter.parties)]
    named = [holder, *((each.host, each.pid) for each in parties), *((each.host, str(each.pid)) for each in view.queue)]
    return {int(pid) for host, pid in named if host == node and pid.isdecimal()}


def _must_leave(view: GroupView) -> str:
    """Whose lease was reclaimed or revoked, or who was evicted by force; not whom an operator wants out if that goes
    well."""
    state = view.state
    must = state.get("evict_how") != "once" or state.get("force") == "1"
    return state.get("evict", "") if must else ""
