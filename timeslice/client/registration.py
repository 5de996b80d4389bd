"""What this process told its node's agent, and tells again: the server may forget it."""

from __future__ import annotations

import logging
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from timeslice.client.identity import as_asked, registration, show_membership
from timeslice.client.known import ensure_known
from timeslice.client.steps import run
from timeslice.errors import RedisUnreachableError
from timeslice.locks.drivers import SyncDriver
from timeslice.locks.keys import Keys
from timeslice.models import Target
from timeslice.settings import Settings, find_url

log = logging.getLogger("timeslice")

REFRESH_S = 5.0  # a registration is repeated that often
CLOSE_S = 2.0
_PAUSE_S = 0.5


class Registration(ABC):
    """Alive until ``close`` or the end of the process. A forked child has none.

    ``what`` names it for people, as in ``the workload``.
    """

    def __init__(self, group: str, target: Target, what: str) -> None:
        self.group, self.job, self.target = group, target.job, target
        self._what = f"group {group}: {what} of job {target.job}"
        self._keys = Keys(Settings().prefix).group(group)
        self._closed = threading.Event()
        self._telling = threading.Lock()  # what is repeated must not arrive behind the good-bye
        self._pid = os.getpid()
        self._thread: threading.Thread | None = None
        self._looked = False  # whether the group is one that agents serve

    def _start(self, url: str | None, name: str) -> None:
        """Register, now or as soon as the server can be reached, and begin the thread."""
        if Settings().disable:
            return
        self._driver = SyncDriver(find_url(url))
        try:
            self._refresh(deadline_s=1.0)
        except RedisUnreachableError as error:
            log.warning("%s can't be registered yet, trying on: %s", self._what, error)
        except BaseException:  # nobody gets this object, so that nobody could close it
            self._forget()
            self._driver.close()
            raise
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _refresh(self, *, deadline_s: float) -> None:
        """Register, for the first time or again, unless it is closed."""
        with self._telling:
            if self._closed.is_set():
                return
            self._declare()
            if self.target.pid == self._pid:  # else it is for that process to show
                show_membership(self.group, self.job)
            told, served = None, True
            while (now := as_asked(self.group, self.target)) != told:  # a hold may change it meanwhile
                told = now
                served = self._register(told, deadline_s)
            if served:
                self._looked = True
            elif not self._looked:
                self._look(deadline_s)

    @abstractmethod
    def _declare(self) -> None:
        """Put it into what the holds of this process tell."""

    @abstractmethod
    def _forget(self) -> None:
        """Take it out of what the holds of this process tell."""

    @abstractmethod
    def _turn(self) -> None:
        """What the thread does over and over until it is closed, after a fault too."""

    def _is_open(self) -> bool:
        return self._thread is not None and self._pid == os.getpid() and not self._closed.is_set()

    def _run(self) -> None:
        lost = False
        while not self._closed.is_set():
            try:
                self._turn()
                lost = False
            except Exception as error:
                if not lost:
                    log.warning("%s can't be told of, trying on: %s", self._what, error)
                lost = True
                self._closed.wait(_PAUSE_S)

    def _register(self, target: Target, deadline_s: float) -> bool:
        """False: no agent of the node serves the group now, so that nobody has heard of it."""
        return self._driver.run(registration(self._keys, target.job, target.host, 0, target), deadline_s=deadline_s)

    def _look(self, deadline_s: float) -> None:
        """UnknownGroupError for a mistaken name. Else it is said that the agent is still to come."""

        def pipe(commands: Sequence[tuple[str, ...]]) -> Any:
            return self._driver.pipe(commands, deadline_s=deadline_s)

        looking = ensure_known(pipe, Keys(self._keys.prefix), self.group)
        self._looked = True  # whatever comes out, it is told once
        run(looking)
        log.warning(
            "%s is known to nobody yet: no agent of node %s serves the group. It is told again every %g s; start one "
            "with `timeslice agent --group %s`, and if it names the node otherwise set TIMESLICE_NODE here",
            *(self._what, self.target.host, REFRESH_S, self.group),
        )
