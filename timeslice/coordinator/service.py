"""A coordinator process: registers, takes its share of the served groups, and runs an actor for each.

It never ends because Redis does not answer: it waits and goes on.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from timeslice import metrics
from timeslice.coordinator.group import GroupActor
from timeslice.errors import RedisUnreachableError, RefusedError, ServerUnsuitableError
from timeslice.locks import scripts
from timeslice.locks.drivers import AsyncDriver
from timeslice.locks.keys import Keys
from timeslice.locks.outages import unless_stopped
from timeslice.locks.scripts import CALL_DEADLINE_S
from timeslice.locks.suitable import verify_async
from timeslice.names import MAX_LENGTH, check_name, is_name, sanitise_name
from timeslice.settings import default_node
from timeslice.web import EVERYWHERE, Web

log = logging.getLogger("timeslice.coordinator")

SCAN_S = 1.0
ABSENT_S = 60.0  # much longer than anybody takes from naming a group to using it
_SIGN_OFF_S = 3.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 30.0  # before an actor that failed is started again


def unique_name() -> str:
    """A coordinator's name: node, process id, and digits that a container with the same process id has not."""
    tail = f"-{os.getpid()}-{secrets.token_hex(3)}"
    return sanitise_name(default_node(), fallback="node", room=MAX_LENGTH - len(tail)) + tail


@dataclass(frozen=True, kw_only=True)
class CoordinatorOptions:
    """What a coordinator is started with. No two that run may have the same name."""

    url: str
    prefix: str = "ts"
    name: str = field(default_factory=unique_name)
    http_host: str = EVERYWHERE
    http_port: int | None = None  # readiness of jobs, metrics, health
    lease_ms: int = 10_000  # of ownership and registration; renewed every third


async def run_coordinator(
    options: CoordinatorOptions, *, ready: Callable[[], None] | None = None, stop: asyncio.Event
) -> None:
    """Run until ``stop`` is set; then let the groups go. ``ready`` is called after the first look for groups.

    A server that is away is waited for, also at the start. Raises, at start only, ServerUnsuitableError,
    InvalidNameError, and RefusedError when another coordinator of this name runs, or somebody has the port.
    """
    check_name("coordinator", options.name)
    coordinator = Coordinator(options)
    try:
        if not await unless_stopped(coordinator.start(), stop):
            return
        if ready:
            ready()
        await coordinator.serve(stop)
    finally:
        await coordinator.close()


@dataclass(frozen=True)
class _Owner:
    """Who owns a group, and until when; a name of ``""`` is nobody."""

    name: str
    instance: str
    deadline_ms: int


class Coordinator:
    """One coordinator. ``owned`` are the groups it drives, or tries to."""

    def __init__(self, options: CoordinatorOptions) -> None:
        self.options = options
        self.driver = AsyncDriver(options.url)
        self._instance = secrets.token_hex(6)  # what tells us from another coordinator of our name
        self._signed_on = False
        self._keys = Keys(options.prefix)
        self.web = Web(self.driver, self._keys)
        self._actors: dict[str, tuple[GroupActor, asyncio.Task[None]]] = {}
        self._unreadable: dict[str, str] = {}  # group -> why it can't be read
        self._absent: dict[str, float] = {}  # indexed group without a state -> since when (monotonic)

    @property
    def owned(self) -> tuple[str, ...]:
        return tuple(sorted(self._actors))

    async def start(self) -> None:
        """Everything up to the first look for groups."""
        self.driver.patience_s = math.inf
        await verify_async(self.driver)
        if self.options.http_port:
            await self.web.start(self.options.http_host, self.options.http_port)
        await self.sign_on()
        await self.scan()
        self.driver.patience_s = CALL_DEADLINE_S

    async def serve(self, stop: asyncio.Event) -> None:
        """Look for groups every second until ``stop`` is set."""
        scanning = asyncio.create_task(self._scan_for_ever(), name="timeslice-coordinator-scan")
        try:
            await stop.wait()
        finally:
            scanning.cancel()
            await asyncio.wait([scanning])

    async def _scan_for_ever(self) -> None:
        while True:
            await asyncio.sleep(min(SCAN_S, self.options.lease_ms / 3000))
            try:
                await self.scan()
            except RedisUnreachableError as error:  # the driver says so
                log.debug("groups were not looked for: %s", error)
            except Exception:
                log.exception("looking for groups failed; trying again")

    async def sign_on(self) -> None:
        """Take our name. RefusedError if another coordinator of it lives: it renews its registration within a lease.

        One that died a moment ago does not, and after a clean stop there is nothing to wait for.
        """
        name, key = self.options.name, self._keys.coordinators

        async def registered() -> float:
            return await self.driver.client.zscore(key, name) or 0.0

        first, now_ms = await self.driver.retry(registered), await self.driver.run(scripts.clock(key))
        until = time.monotonic() + min(first - now_ms, self.options.lease_ms) / 1000
        while time.monotonic() < until:
            await asyncio.sleep(min(SCAN_S, self.options.lease_ms / 3000))
            if await self.driver.retry(registered) > first:
                raise RefusedError(
                    f"a coordinator named {name} runs already. Give each one a name of its own, or none: the default "
                    "is unique"
                )
        self._signed_on = True

    async def scan(self) -> None:
        """Register, find the served groups, and own our share of them: not more, and never one that has an owner."""
        now_ms, live, owners = await self._look()
        share = -(-len(owners) // max(live, 1))
        for name in [name for name in self._actors if name not in owners]:
            await self._stop(name, disown=False)  # deleted: a word about it would bring it back
        # One that is in the middle of a swap costs most to hand over, so it comes last, and only when that has ended.
        names = sorted(self._actors, key=lambda name: self._actors[name][0].busy)
        excess = names[: max(len(names) - share, 0)]
        for name, (actor, _) in list(self._actors.items()):
            actor.leaving = name in excess
            if actor.leaving and not actor.busy:
                await self._hand_over(name)
        for name, owner in sorted(owners.items()):
            free = not owner.name or owner.instance == self._instance or owner.deadline_ms < now_ms
            if not free and owner.name == self.options.name:
                log.error("group %s: owned by another coordinator named %s; give each its own name", name, owner.name)
            if free and name not in self._actors and len(self._actors) < share and name not in excess:
                self._start(name)
        metrics.GROUPS_OWNED.set(len(self._actors))

    async def _look(self) -> tuple[int, int, dict[str, _Owner]]:
        """The server's time, how many coordinators live, and of each served group the owner."""
        options, registered = self.options, self._keys.coordinators
        now = await self.driver.run(scripts.clock(registered))
        _, _, live, members = await self.driver.pipe(
            [
                ("ZADD", registered, now + options.lease_ms, options.name),
                ("ZREMRANGEBYSCORE", registered, "-inf", now - options.lease_ms),
                # Beyond one term lies what was registered before the clock was set back.
                ("ZCOUNT", registered, now, now + options.lease_ms),
                ("SMEMBERS", self._keys.groups),
            ]
        )
        names = [name for name in map(scripts.text, members) if is_name(name)]  # anybody may have put something there
        fields = ["mode", "owner", "owner_instance", "owner_deadline_ms", "clock_ms"]
        found, absent = {}, []
        for name, values in (await self._states(names, fields)).items():
            mode, owner, instance, deadline, clock = (scripts.text(value or "") for value in values)
            if mode == "served":
                found[name] = _Owner(owner, instance, scripts.number(deadline))
            elif not clock:
                absent.append(name)
        await self._sweep(absent)
        return now, int(live), found

    async def _states(self, names: list[str], fields: list[str]) -> dict[str, list[Any]]:
        """These fields of each group's state. One that can't be read, because this user may not or somebody spoilt it,
        is left out and keeps us from no other."""
        orders = {name: ("HMGET", self._keys.group(name).state, *fields) for name in names}
        try:
            return dict(zip(names, await self.driver.pipe([*orders.values()]), strict=True))
        except ServerUnsuitableError:
            pass  # that is about one of them: each alone
        found, refused = {}, {}
        for name, order in orders.items():
            try:
                (found[name],) = await self.driver.pipe([order])
            except ServerUnsuitableError as error:
                refused[name] = str(error)
                if self._unreadable.get(name) != str(error):
                    log.warning("group %s: left alone: %s", name, error)
        self._unreadable = refused
        return found

    async def _sweep(self, absent: list[str]) -> None:
        """Take groups off the index that nobody declared or serves and that have expired. Not at once: the index is
        written before a group's first use."""
        now = time.monotonic()
        self._absent = {name: self._absent.get(name, now) for name in absent}
        if gone := [name for name, since in self._absent.items() if now - since >= ABSENT_S]:
            await self.driver.retry(lambda: self.driver.client.srem(self._keys.groups, *gone))

    def _start(self, name: str) -> None:
        actor = GroupActor(self.driver, self._keys, name, self.options.name, self.options.lease_ms, self._instance)
        task = asyncio.create_task(self._supervise(actor), name=f"timeslice-group-{name}")
        self._actors[name] = (actor, task)

    async def _supervise(self, actor: GroupActor) -> None:
        """Run an actor again after a fault of its own, which is not the other groups' business."""
        pause = _FIRST_PAUSE_S
        while True:
            try:
                await actor.run()
                break
            except Exception:
                log.exception("group %s: its actor failed; it is started again in %g s", actor.name, pause)
            await asyncio.sleep(pause)
            pause = min(pause * 2, _LONGEST_PAUSE_S)
        del self._actors[actor.name]
        metrics.forget(actor.name)

    async def _hand_over(self, name: str) -> None:
        """Let a group go to another coordinator, unless a swap began since its actor last looked."""
        if name not in self._actors:  # it has ended by itself meanwhile
            return
        actor, _ = self._actors[name]
        await self._stop(name, disown=False)
        if await actor.release(idle_only=True):
            log.info("group %s: released, so that each coordinator has its share", name)
        else:
            self._start(name)

    async def _stop(self, name: str, *, disown: bool) -> None:
        if name not in self._actors:  # it has ended by itself meanwhile, and has nothing to let go
            return
        actor, task = self._actors.pop(name)
        task.cancel()
        await asyncio.wait([task])
        metrics.forget(name)
        if disown:
            await actor.release()

    async def close(self) -> None:
        """Let all groups go and sign off; what Redis does not take now lapses by itself."""
        try:
            async with asyncio.timeout(_SIGN_OFF_S):
                for name in self.owned:
                    await self._stop(name, disown=True)
                if self._signed_on:  # else the name is another's
                    await self.driver.client.zrem(self._keys.coordinators, self.options.name)
        except Exception as error:
            why = str(error) or f"no answer within {_SIGN_OFF_S:g} s"
            log.warning("could not sign off (%s); the groups are free again in %d ms", why, self.options.lease_ms)
        finally:
            for name in self.owned:
                await self._stop(name, disown=False)
            await self.web.close()
            await self.driver.close()
