"""One process of a job that an agent watches, and how such are named and stored."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from timeslice.agent import procfs
from timeslice.agent.journal import read_whole, write_whole
from timeslice.errors import BackendError, FaultKind
from timeslice.models import RECORD_MAX, Target, brief, read_wire

log = logging.getLogger("timeslice.agent")

SAID = 10  # refusals that are told at a time
OUT_OF_SIGHT = (
    "it is in another pid namespace ({!a}, the agent is in {}), and not to be seen from here; run the agent with the "
    "host's pid namespace (hostPID), as root"
)

COMES_BACK_S = 30.0  # whoever lives registers again within a third of this
IN_A_SANDBOX = (
    "it registers again and again from pid namespace {!a}, and no process of this machine is in there: it lives in a "
    "sandbox with a kernel of its own, where this agent can neither watch nor move it"
)


class Stored(Target):
    found: bool = False

    @property
    def target(self) -> Target:
        return Target.model_validate(self.model_dump(exclude={"found"}))


_STORED = TypeAdapter(list[Stored])


def read_stored(group: str, path: Path) -> list[Stored] | None:
    """Whom a former run watched; None if that can't be read."""
    try:
        return _STORED.validate_json(read_whole(path))
    except FileNotFoundError:
        return []
    except ValidationError as error:
        log.error("group %s: %s can't be read; processes are known again when they register: %s",
                  group, path, brief(error))  # fmt: skip
        return None


def write_stored(group: str, path: Path, stored: Sequence[Stored]) -> bool:
    try:
        write_whole(path, _STORED.dump_json(list(stored)))
    except OSError as error:
        log.error("group %s: %s could not be written: %s. A restarted agent will know its processes from Redis only.",
                  group, path, error)  # fmt: skip
        return False
    return True


def names_of(target: Target) -> tuple[str, str]:
    """Of its registration: the second one where another container's process has the first."""
    name = f"{target.job}/{target.host}/{target.pid}"
    return name, f"{name}@{target.start}"


def read_registration(name: str, raw: str) -> Target | str:
    """Which process it is about, or what is wrong with it."""
    try:
        target = read_wire(Target, raw, limit=RECORD_MAX)
    except ValueError as error:
        return f"its record is invalid: {error}"
    return target if name in names_of(target) else "it names other than its content"


def stands_in_records(records: Mapping[str, str], target: Target) -> bool:
    name, apart = names_of(target)
    return apart in records or target.pid_namespace in records.get(name, "")


@dataclass
class Watched:
    """``target`` is the process as it is seen from here, ``told`` as it registered: with its number in its own pid
    namespace and its start time by its own clock, by which leases and channels call it. ``found``: it did not register,
    discovery found it. ``pidfd`` may be none: then its start time tells whether it has ended."""

    target: Target
    told: Target
    pidfd: int
    found: bool
    exited: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def process(self) -> tuple[int, int]:
        return self.target.pid, self.target.start

    @property
    def is_polled(self) -> bool:
        return self.pidfd == procfs.NO_PIDFD

    def has_ended(self) -> bool:
        return procfs.has_ended(self.pidfd, self.target.pid, self.target.start)

    def stored(self) -> Stored:
        return Stored(**self.told.model_dump(), found=self.found)


def check_user(group: str, node: str, target: Target) -> None:
    """BackendError(poisoned) for a process that has become another user's."""
    found = procfs.look_at(target.pid)
    # Its number can't have passed to another process while we hold its pidfd and it has not ended.
    if found and found.start == target.start and (found.uid, found.one_user) != (target.uid, True):
        raise BackendError(
            f"group {group}: process {target.pid} of job {target.job} runs as user id {found.uid} now, registered was "
            f"{target.uid}; it is not touched. End it.",
            kind=FaultKind.POISONED,
            group=group,
            job=target.job,
            node=node,
        )


def say_refused(group: str, news: Mapping[str, str]) -> None:
    for name, why in list(news.items())[:SAID]:
        log.warning("group %s: the registration %.200s is ignored: %s", group, ascii(name), why)
    if len(news) > SAID:
        log.warning("group %s: so are %d more", group, len(news) - SAID)


class Unseen:
    """Registrations from other pid namespaces of which no process is seen here, by an agent from which no process of
    this kernel can hide. Such a one has ended before anybody looked, or lives in a sandbox with a kernel of its own
    (gVisor, a virtual machine). So it is struck off once: one that lives registers again."""

    def __init__(self) -> None:
        self._struck: dict[tuple[str, int, int, str], tuple[Target, float]] = {}
        self._back: dict[tuple[str, int, int, str], float] = {}

    def strike(self, told: Target) -> bool:
        """False if it has come back since it was struck off, and so lives."""
        key = (told.job, told.pid, told.start, told.pid_namespace)
        if self._struck.pop(key, None) or key in self._back:
            self._back[key] = time.monotonic()
            return False
        self._struck[key] = told, time.monotonic()
        return True

    def over(self) -> list[Target]:
        """Those that have not come back for so long that they have ended."""
        until = time.monotonic() - COMES_BACK_S
        self._back = {key: at for key, at in self._back.items() if at >= until}
        found = [key for key, (_, at) in self._struck.items() if at < until]
        return [self._struck.pop(key)[0] for key in found]

    def told(self) -> dict[str, str]:
        """Jobs of which a process may live there."""
        return {
            told.job: f"process {told.pid} of {told.pid_namespace} is not on this machine; if it lives in a sandbox it "
            f"registers again within {COMES_BACK_S:g} s, else it has ended"
            for told, _ in self._struck.values()
        }
