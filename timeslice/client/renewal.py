"""The thread that keeps leases alive: one a process and server, off the main thread, on its own connection.

It also finishes what an interrupted or unlucky caller left: yields and cancels that the server has not answered. And
it repeats the registrations of this process, which may have state on a device although it holds nothing: after data
loss an agent that had not heard of it yet would take the device for free.
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import sys
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from timeslice.addresses import redact_url
from timeslice.client.identity import registration, this_target
from timeslice.errors import RedisUnreachableError, TimeSliceError
from timeslice.locks.connection import REPLY_TIMEOUT_S
from timeslice.locks.drivers import SyncDriver
from timeslice.locks.keys import GroupKeys
from timeslice.locks.scripts import Call

if TYPE_CHECKING:
    from timeslice.client.lease import BaseLease

T = TypeVar("T")

log = logging.getLogger("timeslice")

ERRAND_S = 600.0  # what was not answered for so long is given up: by then its lease is over
REGISTER_S = 10.0  # a third of the time in which nobody is granted after data loss
_RETRY_S = 0.5
_NEWS_MOST = 256  # that are not told yet
_HELD_MOST = 256  # groups and jobs that are known to have been held
_EXIT_S = 1.0  # how long a process that ends waits for what is not told yet
_SHORTEST_REPLY_S = 0.1


@dataclass
class _Errand:
    call: Call[Any]
    what: str
    then: Callable[[Any], None] | None
    at: float
    until: float


@dataclass
class _Registration:
    keys: GroupKeys
    job: str
    host: str
    floors: dict[str, int]  # its client's
    at: float


class Renewer:
    """Renews each lease every third of its term. Adding and dropping one costs no wake-up unless it is due first."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._leases: dict[tuple[str, int | None], BaseLease] = {}
        self._errands: list[_Errand] = []
        self._registrations: dict[tuple[str, str, str], _Registration] = {}
        self._news: deque[tuple[Call[Any], str]] = deque(maxlen=_NEWS_MOST)
        self._news_at = -math.inf  # not before
        self._apart: list[tuple[Callable[[], None], str]] = []  # work for threads that could not be started yet
        self._apart_at = -math.inf  # not before
        self._held: OrderedDict[tuple[str, str, str], GroupKeys] = OrderedDict()
        # Always taken by its own name: a handler that raises inside the condition would leave it locked, and the
        # thread would never renew again.
        self._lock = threading.RLock()
        self._wake = threading.Condition(self._lock)
        self._wake_at = -math.inf  # -inf: awake, and looks before it sleeps
        self._used = False  # since the last time there was nothing to do
        self._running = False  # the thread; set by itself, so that a start that failed or was interrupted is none
        # No attempt may take so long that a lease runs out unseen behind it.
        self._reply_s = REPLY_TIMEOUT_S
        self._driver: SyncDriver | None = None
        self._driver_reply_s = 0.0

    def add(self, lease: BaseLease) -> None:
        with self._lock:
            self._leases[lease.key] = lease
            self._used = True
            self._note_held(lease)
            if lease.lease_s < 3 * self._reply_s:
                self._reply_s = max(lease.lease_s / 3, _SHORTEST_REPLY_S)
            self._rouse(lease.renew_at)

    def drop(self, lease: BaseLease) -> None:
        self._leases.pop(lease.key, None)  # of one that is at a yield point the id changes

    def _note_held(self, lease: BaseLease) -> None:
        keys = lease._keys  # noqa: SLF001
        place = (keys.prefix, lease.job, keys.name)
        self._held[place] = keys
        self._held.move_to_end(place)
        if len(self._held) > _HELD_MOST:
            self._held.popitem(last=False)

    def held_for(self, prefix: str, job: str) -> list[GroupKeys]:
        """The groups that this process has held for a job."""
        with self._lock:
            return [keys for place, keys in self._held.items() if place[:2] == (prefix, job)]

    def remember(self, keys: GroupKeys, job: str, host: str, floors: dict[str, int]) -> None:
        """Repeat this process's registration for as long as it lives."""
        key = (keys.prefix, keys.name, job)
        if key not in self._registrations:
            with self._lock:
                at = time.monotonic() + REGISTER_S
                self._registrations[key] = _Registration(keys, job, host, floors, at)
                self._rouse(at)

    def of(self, client: object) -> list[BaseLease]:
        """Leases that a client still holds."""
        return [lease for lease in list(self._leases.values()) if lease._client is client]  # noqa: SLF001

    def later(self, call: Call[T], what: str, then: Callable[[T], None] | None = None) -> None:
        """Send a call until it is answered, in the background. Every call may be repeated, so this can't harm."""
        now = time.monotonic()
        with self._lock:
            self._errands.append(_Errand(call, what, then, now, now + ERRAND_S))
            self._try_rouse(now)

    def tell(self, call: Call[Any], what: str) -> None:
        """Send a call that is only news, after those that were given before. Of too many that the server does not
        answer the oldest are dropped."""
        with self._lock:
            self._news.append((call, what))
            self._try_rouse(self._news_at)

    def apart(self, work: Callable[[], None], name: str) -> None:
        """Do it on a thread of its own, as soon as one can be started: it must not stop the renewal of leases."""
        try:
            threading.Thread(target=work, name=name, daemon=True).start()
        except RuntimeError as error:
            log.warning("%s waits for a thread: %s", name, error)
            with self._lock:
                self._apart.append((work, name))
                self._apart_at = time.monotonic() + _RETRY_S
                self._try_rouse(self._apart_at)

    def flush(self, within_s: float) -> None:
        """Wait until all news are told, or the time is up."""
        with self._lock:
            self._wake.wait_for(lambda: not self._news, within_s)

    def _rouse(self, at: float) -> None:
        """RuntimeError if the thread is not there and can't be started: then no lease may be held."""
        if not self._running:
            threading.Thread(target=self._run, name="timeslice-renewal", daemon=True).start()
        elif at < self._wake_at:
            self._wake.notify_all()

    def _try_rouse(self, at: float) -> None:
        """For what can wait until there is room for a thread: the next hold brings it, or fails itself."""
        try:
            self._rouse(at)
        except RuntimeError as error:
            log.warning("what is told behind at %s waits for a thread: %s", redact_url(self._url), error)

    def _run(self) -> None:
        with self._lock:
            if self._running:  # started twice, before this one came to run
                return
            self._running = True
        try:
            while True:
                try:
                    self._turn()
                except Exception:
                    log.exception("renewal of leases at %s failed; going on", redact_url(self._url))
                    time.sleep(_RETRY_S)
        finally:
            self._running = False

    def _turn(self) -> None:
        """Sleep until something is due, or do what is due."""
        with self._lock:
            now = time.monotonic()
            leases, errands = list(self._leases.items()), list(self._errands)
            registrations = list(self._registrations.values())
            due = [lease.renew_at for _, lease in leases]
            due += [errand.at for errand in errands]
            due += [known.at for known in registrations]
            due += [self._news_at] if self._news else []
            due += [self._apart_at] if self._apart else []
            at = min(due, default=math.inf)
            if not leases and not errands and self._used and at > now:
                # A lease was here and is gone: the next one, likely soon, must not have to wake us.
                at, self._used = min(at, now + self._reply_s), False
            if at > now:
                self._wake_at = at
                self._wake.wait(None if at == math.inf else at - now)
                self._wake_at = -math.inf
                return
        answers = True
        for key, lease in sorted(leases, key=lambda each: each[1].renew_at):
            if lease.renew_at <= time.monotonic():
                answers = self._renew(key, lease, send=answers) and answers
        for errand in errands:
            if errand.at <= time.monotonic():
                answers = self._attempt(errand, send=answers) and answers
        for known in registrations:
            if known.at <= time.monotonic():
                answers = self._register(known, send=answers) and answers
        self._tell(send=answers)
        if self._apart_at <= time.monotonic():
            with self._lock:
                waiting, self._apart = self._apart, []
            for work, name in waiting:
                self.apart(work, name)

    def _renew(self, key: tuple[str, int | None], lease: BaseLease, *, send: bool) -> bool:
        """False if the server did not answer; then the others of this turn are not sent."""
        sent = time.monotonic()
        lease.note_clock(sent)
        call = lease.renewal()
        if lease.state != "held" or lease.key != key:
            self._leases.pop(key, None)
            return True
        if send:
            try:
                lease.note_renewal(self._connection().run(call, deadline_s=0), sent, key[0])
                return True
            except TimeSliceError as error:
                log.debug("group %s: renewal for job %s: %s", lease.group, lease.job, error)  # the driver says so
        lease.renew_at = time.monotonic() + min(_RETRY_S, lease.lease_s / 10)
        if lease.lock_only:
            lease.renew_at = min(lease.renew_at, max(lease.expires_at, sent))
        lease.note_clock(time.monotonic())
        return False

    def _attempt(self, errand: _Errand, *, send: bool) -> bool:
        if send:
            try:
                reply = self._connection().run(errand.call, deadline_s=0)
                self._errands.remove(errand)
                log.info("%s: answered at last", errand.what)
                if errand.then:
                    errand.then(reply)
                return True
            except TimeSliceError as error:
                if time.monotonic() > errand.until:
                    log.warning("%s: given up: %s", errand.what, error)
                    self._errands.remove(errand)
        errand.at = time.monotonic() + _RETRY_S
        return False

    def _tell(self, *, send: bool) -> None:
        """The oldest, and in the next turn the next: a job that tells faster than the server answers must not keep its
        leases from being renewed. In order: what was told later waits for what is not answered yet."""
        if not self._news or self._news_at > time.monotonic():
            return
        call, what = first = self._news[0]
        try:
            if send:
                self._connection().run(call, deadline_s=0)
        except RedisUnreachableError as error:
            log.info("%s: %s", what, error)
            send = False
        except TimeSliceError as error:
            log.warning("%s is not told: %s", what, error)
        if not send:
            self._news_at = time.monotonic() + _RETRY_S
            return
        with self._lock:
            if self._news and self._news[0] is first:  # else it was dropped meanwhile
                self._news.popleft()
            self._wake.notify_all()

    def _register(self, known: _Registration, *, send: bool) -> bool:
        if send:
            try:
                floor, told = known.floors.get(known.keys.name, 0), None
                # Once more if a hold has changed it meanwhile: ours may have come behind the one that the hold sent.
                while (now := this_target(known.keys.name, known.job, known.host)) != told:
                    told = now
                    self._connection().run(registration(known.keys, known.job, known.host, floor, told), deadline_s=0)
            except TimeSliceError as error:
                log.info("group %s: registration of job %s: %s", known.keys.name, known.job, error)
                send = False
        known.at = time.monotonic() + REGISTER_S
        return send

    def _connection(self) -> SyncDriver:
        if self._driver is None or self._driver_reply_s != self._reply_s:
            if self._driver:
                self._driver.close()
            self._driver, self._driver_reply_s = SyncDriver(self._url, reply_s=self._reply_s), self._reply_s
        return self._driver


_renewers: dict[str, Renewer] = {}
_of_the_parent: list[dict[str, Renewer]] = []
_making = threading.Lock()


def _start_clean() -> None:
    """In a forked child: no thread, no lease, no lock in doubt; the parent's sockets are neither used nor shut."""
    global _renewers, _making  # a child can't trust the lock it inherited
    _of_the_parent.append(_renewers)
    _renewers, _making = {}, threading.Lock()


def _finish() -> None:
    for renewer in list(_renewers.values()):
        renewer.flush(_EXIT_S)


def _finish_child() -> None:
    """A child of multiprocessing ends without atexit, after exit functions of its own."""
    process, util = (sys.modules.get(f"multiprocessing.{name}") for name in ("process", "util"))
    if process and util and process.parent_process():
        util.Finalize(None, _finish, exitpriority=0)


os.register_at_fork(after_in_child=_start_clean)
atexit.register(_finish)


def renewer_for(url: str) -> Renewer:
    """The renewal thread of this process for one server."""
    found = _renewers.get(url)
    if found is None:
        with _making:
            if not _renewers:
                _finish_child()
            found = _renewers.setdefault(url, Renewer(url))
    return found
