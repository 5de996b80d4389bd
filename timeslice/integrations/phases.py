"""Callbacks for drivers that tell where a phase of the training loop begins and ends.

A framework calls ``on_phase_begin(phase, role)`` before work on the devices and ``on_phase_end`` after it. The role
says whose devices: ``trainer``, ``sampler`` or ``both``. ``PhaseCallback`` holds the groups of that role in between.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Protocol

from timeslice.client import standing
from timeslice.client.hold import Hold
from timeslice.client.lease import Lease
from timeslice.client.phases import phase as recorded
from timeslice.client.steps import run
from timeslice.client.sync import Client
from timeslice.errors import LeaseLostError, RedisUnreachableError, ServerUnsuitableError, UsageError
from timeslice.integrations import patience
from timeslice.names import check_name
from timeslice.settings import Settings, find_url

log = logging.getLogger("timeslice")

TRAINER_GROUP = "TIMESLICE_TRAINER_GROUP"
SAMPLER_GROUP = "TIMESLICE_SAMPLER_GROUP"
ADDRESS = "TIMESLICE_ORCH_ADDR"

Context = Mapping[str, Any]


class DriverCallback(Protocol):
    """What a driver calls. ``context`` tells more, such as the number of the rollout."""

    def on_phase_begin(self, phase: str, role: str, context: Context | None = None) -> None: ...
    def on_phase_end(self, phase: str, role: str, context: Context | None = None) -> None: ...
    def close(self) -> None: ...


class PhaseCallback:
    """Holds the trainer's group, the sampler's or both during each phase.

    ``TIMESLICE_TRAINER_GROUP`` and ``TIMESLICE_SAMPLER_GROUP`` name the groups. One name for both is the colocated
    mode: one hold. The phases of a role without a group hold nothing and are recorded in the events of the other;
    with neither set, calls do nothing. The server is ``TIMESLICE_URL``, else ``TIMESLICE_ORCH_ADDR`` (a Redis URL or
    ``host:port``), else that of ``timeslice up``.

    Phases may overlap and a phase may begin again before it ended: a group is taken by the first that needs it and
    yielded by the last one out, whatever thread or task says so. The trainer's group is taken before the sampler's.

    A phase whose lease is lost ends with LeaseLostError: another job may have had the devices meanwhile, so what the
    phase computed is not to be kept. While the server is away, a phase that begins beside another waits for it.

    ``close`` ends all phases; one that is only beginning then, on another thread, gets UsageError. It also runs at the
    exit of the process, so that a driver that fails in mid-phase does not keep the devices; one that is killed keeps
    them for its lease at most.

    ``gang`` as of ``timeslice.hold``: for the ranks of a program, which all begin and end the same phases.
    """

    def __init__(self, *, gang: bool | None = None) -> None:
        self._gang = gang
        self._groups = {"trainer": _group(TRAINER_GROUP), "sampler": _group(SAMPLER_GROUP)}
        self._hint = ""
        self._client = self._connect() if any(self._groups.values()) else None
        self._start_clean()
        if self._client is None:
            log.info("neither %s nor %s is set: phases hold nothing", TRAINER_GROUP, SAMPLER_GROUP)
        else:
            atexit.register(self.close)

    def on_phase_begin(self, phase: str, role: str, context: Context | None = None) -> None:
        """Wait until the groups of ``role`` are held; what ``timeslice.hold`` raises, and then nothing more is held."""
        if self._client is None:
            return
        self._mind_forks()
        log.debug("phase %s of %s begins %s", phase, role, context or "")
        while True:
            begun = _Phase(phase, role)
            try:
                self._begin(self._client, begun)
                return
            except LeaseLostError:
                # The trainer's, lost in the wait for the sampler's. What others are inside of can't be had anew.
                if not any(lease.lost.is_set() and lease.holding and not lease.holding.count for lease in begun.leases):
                    raise

    def _begin(self, client: Client, begun: _Phase) -> None:
        phase, role = begun.name, begun.role
        with begun.kept as entered:
            with self._changing:
                pools, still_open = self._pools_of(phase, role), self._open
            for pool in pools:
                begun.leases.append(self._enter(pool, phase))
                entered.callback(pool.leave, begun)
            run(standing.ask_all(client, [*begun.leases]))
            for lease in begun.leases:
                patience.ensure_held(lease)
            if not pools:
                others = [group for group in self._groups.values() if group]
                entered.enter_context(recorded(phase, job=client.job, groups=others, url=client.url))
            with self._changing:
                if self._open is not still_open:
                    raise UsageError(
                        f"phase {phase} of {role}: close() was called while it began, so it holds nothing. Begin it "
                        "again to go on."
                    )
                self._open.append(begun)
                begun.kept = entered.pop_all()

    def on_phase_end(self, phase: str, role: str, context: Context | None = None) -> None:
        """Yield what no other open phase needs. UsageError when this phase has not begun. LeaseLostError when a lease
        was lost in it; all is yielded then, too. Called while an error is on its way, as in a ``finally``, it ends the
        phase as failed: a weight sync has brought no weights then."""
        if self._client is None:
            return
        self._mind_forks()
        log.debug("phase %s of %s ends %s", phase, role, context or "")
        done = sys.exc_info()[0] is None
        with self._changing:
            begun = [each for each in self._open if (each.name, each.role) == (phase, role)]
            if not begun:
                raise UsageError(
                    f"phase {phase} of {role} ends but has not begun; {self._told()}. Call on_phase_begin before it, "
                    "with the same phase and role."
                )
            ended = begun[-1]
            self._open.remove(ended)
        ended.done = done
        ended.kept.close()
        for lease in ended.leases:
            if lease.lost.is_set():
                lease.ensure_held()  # raises

    def close(self) -> None:
        """End all open phases, last begun first. May be called again."""
        if self._client is None:
            return
        self._mind_forks()
        with self._changing:  # what begins from now on waits, or the client would yield that, too
            before = self._open
            self._start_anew()
            with ExitStack() as entered:
                for phase in before:
                    entered.push(phase.kept)
            self._client.close()

    def _connect(self) -> Client:
        settings = Settings()
        address = os.environ.get(ADDRESS) or None
        if address and not settings.url:
            self._hint = f"The address is that of {ADDRESS}; TIMESLICE_URL overrides it."
        return Client(None if settings.disable else find_url(target=address))

    def _enter(self, pool: _Pool, phase: str) -> Lease:
        try:
            return pool.enter(phase)
        except (RedisUnreachableError, ServerUnsuitableError) as error:
            if self._hint:
                error.add_note(self._hint)
            raise

    def _pools_of(self, phase: str, role: str) -> Sequence[_Pool]:
        try:
            return self._roles[role]
        except KeyError:
            raise UsageError(f"phase {phase}: no role {role!r}; it is trainer, sampler or both") from None

    def _told(self) -> str:
        return "open: " + (", ".join(f"{each.name} of {each.role}" for each in self._open) or "none")

    def _mind_forks(self) -> None:
        """A forked child owns nothing of its parent's."""
        if self._pid != os.getpid():
            self._start_clean()

    def _start_clean(self) -> None:
        self._pid = os.getpid()
        self._changing = threading.RLock()  # a signal's handler may call close, in the middle of another
        self._start_anew()

    def _start_anew(self) -> None:
        self._open: list[_Phase] = []
        client = self._client
        pools = {group: _Pool(client, group, self._gang) for group in self._groups.values() if group and client}
        self._roles = {role: [pools[group]] if group else [] for role, group in self._groups.items()}
        self._roles["both"] = list(pools.values())  # the trainer's first, as everybody takes them


def _group(variable: str) -> str | None:
    name = os.environ.get(variable)
    return check_name("group", name) if name else None


@dataclass(eq=False)
class _Phase:
    """One that is open, and what it keeps until it ends."""

    name: str
    role: str
    done: bool = False  # it has ended, and no error ended it
    leases: list[Lease] = field(default_factory=list)
    kept: ExitStack = field(default_factory=ExitStack)


class _Pool:
    """One group as this driver uses it: the phases that run now share one hold."""

    def __init__(self, client: Client, group: str, gang: bool | None) -> None:
        self._client, self._group, self._gang = client, group, gang
        self._changing = threading.Lock()
        self._phases = 0
        self._done = True  # of all phases that shared the hold so far
        self._held: tuple[Hold, Lease] | None = None

    def enter(self, phase: str) -> Lease:
        """The lease of the hold, new or shared: one that is shared may be over."""
        with self._changing:  # a second phase waits here for the grant that the first one waits for
            if self._held is None:
                hold = self._client.hold(self._group, phase=phase, gang=self._gang)
                self._held, self._done = (hold, hold.__enter__()), True
            self._phases += 1
            return self._held[1]

    def leave(self, phase: _Phase) -> None:
        with self._changing:
            self._phases -= 1
            self._done &= phase.done
            if not self._phases and self._held:
                (hold, _), self._held = self._held, None
                hold.leave(done=self._done)


class CompositeCallback:
    """Several callbacks for a framework that has a place for one: begun in order, ended and closed in reverse.

    If one fails to begin, those before it are ended. One that fails to end or close does not keep the others from it.
    """

    def __init__(self, callbacks: Sequence[DriverCallback]) -> None:
        self._callbacks = tuple(callbacks)

    def on_phase_begin(self, phase: str, role: str, context: Context | None = None) -> None:
        with ExitStack() as begun:
            for callback in self._callbacks:
                callback.on_phase_begin(phase, role, context)
                begun.callback(callback.on_phase_end, phase, role, context)
            begun.pop_all()

    def on_phase_end(self, phase: str, role: str, context: Context | None = None) -> None:
        with ExitStack() as ending:
            for callback in self._callbacks:
                ending.callback(callback.on_phase_end, phase, role, context)

    def close(self) -> None:
        with ExitStack() as closing:
            for callback in self._callbacks:
                closing.callback(callback.close)
