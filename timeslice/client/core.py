"""What both clients do, written once, in generators that `steps` runs."""

from __future__ import annotations

import logging
import math
import os
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Generic, TypeVar

from timeslice.client import context, standing
from timeslice.client.identity import (
    ask_to_leave,
    asked_to_leave,
    check_leave,
    new_waiter_id,
    process_start,
    registrations,
    told_to_leave,
)
from timeslice.client.known import served_groups, unknown
from timeslice.client.lease import BaseLease
from timeslice.client.once import is_first, say_once
from timeslice.client.renewal import Renewer, renewer_for
from timeslice.client.steps import Steps
from timeslice.client.terms import Terms
from timeslice.errors import (
    AcquireTimeoutError,
    CancelledByOperatorError,
    DeadlockError,
    GangEndedError,
    GroupModeError,
    RedisUnreachableError,
    TimeSliceError,
    UsageError,
)
from timeslice.locks import flows, scripts
from timeslice.locks.cycles import Held
from timeslice.locks.drivers import AsyncDriver, SyncDriver
from timeslice.locks.flows import Grant
from timeslice.locks.keys import GroupKeys, Keys
from timeslice.locks.loader import load_all
from timeslice.locks.scripts import CALL_DEADLINE_S, Call, Party, Queued, Request, Yielded
from timeslice.locks.view import GroupView, look
from timeslice.locks.waits import notice
from timeslice.names import check_name
from timeslice.settings import Settings, check_patience, default_job, default_node, find_url, shared_job

log = logging.getLogger("timeslice")
LeaseT = TypeVar("LeaseT", bound=BaseLease)
DriverT = TypeVar("DriverT", SyncDriver, AsyncDriver)

WAITER_TTL_MS = 15_000
_TELL_FIRST_S = 3.0  # a wait that is shorter needs no word
_TELL_NEXT_S = 60.0
_TELL_ANSWER_S = 1.0  # a question to a server that hangs keeps nobody
CLEANUP_S = 3.0  # how long an exception on its way out may be kept back by withdrawing the request


class _Unregistered(Exception):
    """Ends a wait for a moment: the agents of this host don't know this process yet."""


class _WaitsForItself(Exception):
    """Carries the DeadlockError out of a wait, which is still to be withdrawn."""


class _Untold(Exception):
    """Ends a wait for a moment: nobody was told for long why it goes on."""


class _Unserved(Exception):
    """Ends a wait for a moment: nobody declared or serves the group."""


class BaseClient(Generic[LeaseT, DriverT]):
    """Server, job and the logic of both clients."""

    _lease_type: ClassVar[type[BaseLease]]
    _driver_type: ClassVar[type[Any]]

    lock_only_words = "lock_only=True"  # how our caller asks for a plain lock
    tell: Callable[[int, str], None] = log.log  # level and words, for whoever looks why nothing goes on
    registers = True  # this process is the job's own, so its node's agent is told of it

    def __init__(
        self,
        url: str | None = None,
        job: str | None = None,
        prefix: str | None = None,
        *,
        patience: float | None = None,
    ) -> None:
        settings = Settings()
        patience = settings.patience if check_patience(patience) is None else patience
        self.patience = CALL_DEADLINE_S if patience is None else patience
        self.disabled = settings.disable
        self.url = "" if self.disabled else find_url(url)
        self.job = check_name("job", job) if job else default_job()
        self._job_is_shared = bool(job or shared_job())  # else it is this process's alone
        self.keys = Keys(prefix or settings.prefix)
        self.host = default_node()
        self.floors: dict[str, int] = {}  # highest counter seen, by group
        self._groups: dict[str, GroupKeys] = {}
        self._indexed: set[str] = set()
        self._driver: DriverT | None = None
        if not self.disabled:
            load_all()  # whoever uses up all descriptors later must not need another one to enter, or to leave
        _clients.add(self)

    # what the two faces differ in

    def _pipe(self, commands: Sequence[tuple[str, ...]], deadline_s: float) -> Any:
        """Plain commands in one round trip; a list of replies."""
        raise NotImplementedError

    def _taker(self) -> object:
        """The thread or task that runs now."""
        raise NotImplementedError

    def _pause(self, seconds: float) -> Any:
        raise NotImplementedError

    def _finish(self, call: Call[Any], deadline_s: float) -> Any:
        """Run a call that cleans up. Whoever interrupts it leaves it to the renewal thread."""
        raise NotImplementedError

    # shared

    @property
    def driver(self) -> DriverT:
        if self._driver is None:
            if self.disabled:
                raise UsageError("TIMESLICE_DISABLE=1 is set: there is no server to ask. Unset it.")
            self._driver = self._driver_type(self.url, patience_s=self.patience)
        return self._driver

    @property
    def is_connected(self) -> bool:
        """Whether it has talked to the server."""
        return self._driver is not None

    @property
    def renewer(self) -> Renewer:
        return renewer_for(self.url)

    def group_keys(self, group: str) -> GroupKeys:
        found = self._groups.get(group)
        if found is None:
            found = self._groups[group] = self.keys.group(group)
        return found

    def raise_floor(self, group: str, counter: int) -> None:
        if counter > self.floors.get(group, 0):
            self.floors[group] = counter

    def _acquire(
        self,
        group: str,
        terms: Terms,
        timeout: float | None,
        *,
        limit: float | None = None,
        again: BaseLease | None = None,
        in_body: bool = True,
    ) -> Steps[LeaseT]:
        """``limit``: what the caller gave, of which ``timeout`` is left. ``again``: the lease that is to go on with the
        new grant, instead of a new one. ``in_body``: whether a loss is the caller's from now on."""
        keys = self.group_keys(group)
        pid = os.getpid()
        request = Request(
            waiter=new_waiter_id(),
            job=terms.job or self.job,
            host=self.host,
            pid=pid,
            start=process_start(pid),
            priority=terms.priority,
            label=terms.phase or "",
            lease_ms=int(terms.lease * 1000),
            ttl_ms=WAITER_TTL_MS,
            lock_only=terms.lock_only,
            party=self._party(group, terms),
        )
        if self.disabled:
            return self._pretend(keys, request, terms)
        check_leave(group, request.job, terms.leave)
        lease: BaseLease | None = None
        until = math.inf if timeout is None else time.monotonic() + timeout
        try:
            if terms.lock_only and group not in self._indexed:
                yield self._pipe([("SADD", self.keys.groups, group)], _left(until))
                self._indexed.add(group)
            limit = timeout if limit is None else limit
            grant, waited = yield from self._wait(keys, request, timeout, limit)
            self.raise_floor(group, grant.counter)
            held = replace(request, waiter=grant.gang or request.waiter)
            lease = again.regranted(held, grant) if again else self._lease_type(self, keys, held, grant, terms)
            lease.taken_by, lease.in_body, lease.waited = self._taker(), in_body, waited
            if in_body and not again:
                context.keep(lease)
            self.renewer.add(lease)
            if grant.mode == "served" and self.registers:
                self.renewer.remember(keys, request.job, self.host, self.floors)
                if ask_to_leave(self.url, keys, request.job, terms.leave) or not grant.registered:
                    yield from self._register(keys, request.job, until)
            return lease  # type: ignore[return-value]
        except (AcquireTimeoutError, CancelledByOperatorError, DeadlockError, GangEndedError, GroupModeError):
            raise  # nothing of ours is left there
        except BaseException as error:
            if lease:
                self.renewer.drop(lease)
            yield from self._withdraw(keys, request, error)
            raise

    def _party(self, group: str, terms: Terms) -> Party | None:
        gang = terms.gang
        if gang is None or self.disabled:
            return None
        if not terms.job and not self._job_is_shared:
            raise UsageError(
                f"group {group}: rank {gang.rank} of {gang.world} has no job in common with the other ranks. Set "
                "TIMESLICE_JOB to the same for all of them, or give job=; torchrun --rdzv-id=NAME does, too. If this "
                "process is to hold alone: gang=False.",
                group=group,
            )
        return Party(gang.name, gang.rank, gang.world)

    def _pretend(self, keys: GroupKeys, request: Request, terms: Terms) -> LeaseT:
        say_once("holds do nothing: TIMESLICE_DISABLE=1 is set")
        grant = Grant(0, "no-op", 0.0, 0.0, "disabled", True, 0, math.inf)
        return self._lease_type(self, keys, request, grant, terms)  # type: ignore[return-value]

    def _wait(
        self, keys: GroupKeys, request: Request, timeout: float | None, limit: float | None
    ) -> Steps[tuple[Grant, bool]]:
        """The grant, and whether it was waited for."""
        started = time.monotonic()
        until = math.inf if timeout is None else started + timeout
        tell_at = started + _TELL_FIRST_S
        waited = False
        registered_at = -math.inf
        checked = request.lock_only
        gang = ""

        def note(queued: Queued) -> None:
            nonlocal gang, waited
            gang, waited = queued.gang, True
            self.raise_floor(keys.name, queued.counter)
            if not queued.registered and queued.mode == "served" and time.monotonic() > registered_at + 1:
                raise _Unregistered
            if not queued.mode and not checked:
                raise _Unserved
            if timeout != 0 and (found := standing.own_wait(self, keys, request.job)):
                raise _WaitsForItself(found)
            if time.monotonic() >= tell_at:
                raise _Untold

        while True:
            left = None if timeout is None else max(round(until - time.monotonic(), 3), 0.0)
            floor = self.floors.get(keys.name, 0)
            try:
                grant: Grant = yield self.driver.drive(
                    flows.acquire(
                        keys,
                        request,
                        gang=gang,
                        floor=floor,
                        timeout_s=left,
                        limit_s=limit,
                        note=note,
                        held=lambda: self._held_elsewhere(keys),
                    )
                )
            except _Unregistered:
                yield from self._register(keys, request.job, until)
                registered_at = time.monotonic()
            except _Unserved:
                checked = True
                yield from self._check_known(keys.name, until)
            except _WaitsForItself as found:
                (error,) = found.args
                yield from self._withdraw(keys, request, error)
                raise error from None
            except _Untold:
                tell_at = time.monotonic() + _TELL_NEXT_S
                yield from self._tell(keys, gang or request.waiter, time.monotonic() - started)
            else:
                return grant, waited

    def _tell(self, keys: GroupKeys, waiter: str, waited_s: float) -> Steps[None]:
        """Say why this wait goes on. Turns are the usual thing, so only the first such wait for a group is a warning,
        and what lasts for minutes."""
        try:
            view: GroupView = yield self.driver.run(look(keys), deadline_s=_TELL_ANSWER_S)
        except TimeSliceError:
            return  # the wait itself meets this, too, and ends by it or goes on
        if line := notice(view, waiter):
            news = waited_s >= _TELL_NEXT_S or is_first(f"wait for {self.url} {keys.state}")
            self.tell(logging.WARNING if news else logging.INFO, line + standing.whose_child_waits(self, keys))

    def _held_elsewhere(self, keys: GroupKeys) -> list[Held]:
        """What the running code can't let go while it waits for the group: the holds around it, and what this thread
        or task has from ``acquire``."""
        acquired: list[BaseLease] = [lease for lease in self.renewer.of(self) if lease.taken_by is self._taker()]
        found = {lease.lease_id: lease for lease in [*context.leases(), *acquired]}
        return [
            Held(self.group_keys(lease.group), lease.lease_id, self.floors.get(lease.group, 0))
            for lease in found.values()
            if lease.stands_beside(self.url, keys)
        ]

    def _register(self, keys: GroupKeys, job: str, until: float) -> Steps[None]:
        leave = asked_to_leave(keys.name, job)
        for call in registrations(keys, job, self.host, self.floors.get(keys.name, 0)):
            yield self.driver.run(call, deadline_s=_left(until))
        told_to_leave(self.url, keys, job, leave)

    def _check_known(self, group: str, until: float) -> Steps[None]:
        """A group that nobody serves is a mistake if agents serve others, and else one to wait for."""
        served = yield from served_groups(lambda commands: self._pipe(commands, _left(until)), self.keys)
        if served and group not in served:
            raise unknown(group, served, f"; for a lock without devices use {self.lock_only_words}")
        yield self._pipe([("SADD", self.keys.groups, group)], _left(until))
        if not served:
            say_once(
                f"no agent serves group {group}: waiting for one. Start it with `timeslice agent --group {group}`, or "
                f"use {self.lock_only_words} for a lock without devices."
            )

    def _withdraw(self, keys: GroupKeys, request: Request, error: BaseException) -> Steps[None]:
        """Send the cancel of a wait that ended early; if its grant had landed, the server passes it on."""
        call = scripts.cancel(keys, request.waiter, floor=self.floors.get(keys.name, 0))
        what = f"group {keys.name}: withdrawal of job {request.job}"
        if not isinstance(error, RedisUnreachableError):
            try:
                yield self._finish(call, CLEANUP_S)
                return
            except Exception as failure:
                log.info("%s: %s", what, failure)
            except BaseException:
                self.renewer.later(call, what)
                raise
        self.renewer.later(call, what)
        error.add_note(f"{what} is not confirmed; it is tried on, and ends by itself within {WAITER_TTL_MS // 1000} s")

    def _yield(self, lease: BaseLease) -> Steps[Yielded | None]:
        if self.disabled or not lease.begin_yield():
            return None
        try:
            self.renewer.drop(lease)
            reply: Any = yield self._finish(lease.yield_call(), max(lease.expires_at - time.monotonic(), 0.0))
        except Exception as error:
            log.warning("%s is not answered; it is tried on in the background: %s", lease.yield_name, error)
            lease.yield_later()
            return None
        except BaseException:
            lease.yield_later()
            raise
        lease.end_yield(reply)
        return reply if isinstance(reply, Yielded) else None

    def abandon(self, lease: BaseLease) -> None:
        """See to a lease whose holder was interrupted before it could yield: nobody else will."""
        if not self.disabled and (lease.begin_yield() or lease.state == "yielding"):
            self.renewer.drop(lease)
            lease.yield_later()

    def orders(self, groups: Sequence[str], until: float) -> Any:
        """The configured order of each group, as bytes or None."""
        return self._pipe([("HGET", self.group_keys(group).config, "order") for group in groups], _left(until))

    def _close(self) -> Steps[None]:
        for lease in self.renewer.of(self) if self._driver else []:
            yield from self._yield(lease)
        driver: Any = self._driver
        self._driver = None
        if driver:
            yield driver.close()


def _left(until: float) -> float:
    """Also who won't wait for the group waits a second for an answer."""
    return max(until - time.monotonic(), 1.0)


_clients: weakref.WeakSet[BaseClient[Any, Any]] = weakref.WeakSet()
_of_the_parent: list[Any] = []


def _start_clean() -> None:
    """In a forked child: every client gets a new driver; the parent's is kept, so that nothing shuts its sockets."""
    for client in list(_clients):
        _of_the_parent.append(client._driver)  # noqa: SLF001
        client._driver = None  # noqa: SLF001


os.register_at_fork(after_in_child=_start_clean)
