"""What this process knows of each server: whether it ever answered, and since when it does not.

One record a server and process, whatever connections, leases and groups there are: an outage is told once, again each
minute, and when it is over.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Coroutine
from typing import Any

import redis

from timeslice.addresses import parse_url
from timeslice.errors import RedisUnreachableError, ServerUnsuitableError, TimeSliceError
from timeslice.locks.faults import explain, is_denied_place, is_transient
from timeslice.locks.refusals import answers
from timeslice.settings import look_again

log = logging.getLogger("timeslice.locks")

FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 0.5
LOOK_S = 1.0  # who waits longer has time for a closer look at what is there, and a shorter trouble is no outage
ROTATION_S = 10.0  # a daemon that starts while a password is changed waits for the right one so long
AGAIN_S = 60.0  # an outage that lasts is told again; and without a fault for so long it is over
_TIMEOUTS = (redis.exceptions.TimeoutError, TimeoutError)


class Contact:
    """A server, as this process knows it. ``address``: where it is now. ``reached``: it answered once, so it is the
    right one; what it refuses to a whole connection, such as a password, is an outage from then on."""

    def __init__(self, url: str) -> None:
        self.url = self.address = url
        self.reached = False
        self.troubled = False
        self._refuses = False  # it answers, and not as it should: what others hear from it proves nothing
        self._since = self._last = 0.0
        self._told_at: float | None = None
        self._lock = threading.Lock()

    def answered(self, *, again: bool) -> None:
        """``again``: a call that had failed, succeeded."""
        self.reached = True
        if not self.troubled or (self._refuses and not again):
            return
        with self._lock:
            self.troubled, told_at, self._told_at = False, self._told_at, None
        if told_at is not None:
            log.warning("Redis at %s answers again, after %s", self._shown(), _lasted(time.monotonic() - self._since))

    def failed(self, told: TimeSliceError, began: float, *, at_once: bool, refuses: bool) -> None:
        """A try failed that began at ``began`` (monotonic). ``at_once``: its caller waits, and nobody knows why yet."""
        with self._lock:
            now = time.monotonic()
            if not self.troubled or now - self._last > AGAIN_S:
                self._since, self._told_at = began, None
            self.troubled, self._refuses, self._last = True, refuses, now
            lasts = now - self._since
            first = self._told_at is None
            if self._told_at is None:
                due = lasts >= LOOK_S or (at_once and not self.reached)
            else:
                due = now - self._told_at >= AGAIN_S
            if due:
                self._told_at = now
        if due and first:
            log.warning("waiting for Redis: %s", told)
        elif due:
            log.warning("still waiting for Redis, for %s now: %s", _lasted(lasts), told)
        self.address = look_again(self.url)

    def _shown(self) -> str:
        return parse_url(self.address).shown


def _lasted(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < AGAIN_S else f"{seconds / 60:.0f} min"


class Tries:
    """The tries of one call, after its first failure: whether and when to try again. ``limit_s`` may be infinite.
    ``rotation_s``: so long a server that never answered here may refuse our credentials, and be asked again."""

    def __init__(self, contact: Contact, began: float, limit_s: float, *, rotation_s: float = 0.0) -> None:
        self._contact, self._began, self._limit_s = contact, began, limit_s
        self._rotates_until, self._rotates = began + rotation_s, False
        self._try_began = began
        self._pause = FIRST_PAUSE_S / 2
        self._looked = False

    def failed(self, error: BaseException) -> tuple[float | None, TimeSliceError]:
        """The pause before the next try, or None if there is none; and what to say."""
        now = time.monotonic()
        self._rotates = isinstance(error, redis.exceptions.AuthenticationError) and now < self._rotates_until
        known = self._contact.reached or self._rotates
        told: TimeSliceError
        if isinstance(error, ServerUnsuitableError):  # sentinels that say so; or, with a cause, a call within this one
            transient = known and error.__cause__ is None
            told = RedisUnreachableError(str(error)) if transient else error
        else:
            transient, told = is_transient(error, known=known), explain(error, self._contact.address, known=known)
        if is_denied_place(error) and not known:
            transient = False
        elif isinstance(told, RedisUnreachableError):
            transient = True  # also what nobody foresaw: who waits must neither end by it nor ask at full speed
        self._pause = min(self._pause * 2, _LONGEST_PAUSE_S)
        over = not transient or now + self._pause > self._began + self._limit_s
        if transient:
            began = self._try_began if isinstance(error, _TIMEOUTS) else now
            at_once = not over and self._limit_s > LOOK_S
            self._contact.failed(told, began, at_once=at_once, refuses=answers(error))
        self._try_began = now + self._pause
        return None if over else self._pause, told

    def wants_look(self, told: TimeSliceError, *, over: bool) -> bool:
        """Whether it is time to look if what is there is no Redis at all: at the end, and while nobody ever answered
        also after a moment. Who gives no time for an answer has none for a closer look either."""
        known = self._contact.reached or self._rotates
        if known or self._limit_s < LOOK_S or not isinstance(told, RedisUnreachableError):
            return False
        due = over or (not self._looked and time.monotonic() - self._began >= LOOK_S)
        self._looked = self._looked or due
        return due


async def unless_stopped(starting: Coroutine[Any, Any, None], stop: asyncio.Event) -> bool:
    """Run the start of a daemon, which waits for the server as long as that takes. False if ``stop`` was set before."""
    work, stopping = asyncio.create_task(starting), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({work, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            work.result()
            return True
        return False
    finally:
        for task in (work, stopping):
            task.cancel()
        await asyncio.gather(work, stopping, return_exceptions=True)


_contacts: dict[str, Contact] = {}


def contact_of(url: str) -> Contact:
    """This process's record of a server."""
    return _contacts.get(url) or _contacts.setdefault(url, Contact(url))


def _start_clean() -> None:
    """A forked child keeps what is known; a lock that it inherited may be held for ever."""
    for contact in _contacts.values():
        contact._lock = threading.Lock()  # noqa: SLF001


os.register_at_fork(after_in_child=_start_clean)
