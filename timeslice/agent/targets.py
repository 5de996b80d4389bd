"""The processes of each job of one group on this node: validated, held by pidfd, remembered on disk."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from timeslice.agent import procfs
from timeslice.agent.journal import write_whole
from timeslice.locks.scripts import Exited
from timeslice.models import Target

log = logging.getLogger("timeslice.agent")

MAX_TARGETS = 4096  # of one group on one node
_STORED = TypeAdapter(list[Target])


@dataclass
class _Watched:
    target: Target
    pidfd: int
    exited: asyncio.Event = field(default_factory=asyncio.Event)


class TargetRegistry:
    """Targets are known per (group, job): two roles of a job on one node are two sets.

    ``on_exit`` is called in the event loop when a process ended. ``ended`` holds those whose end was not reported
    yet, ``departed`` the dead process ids of jobs of which none is left here.
    """

    def __init__(self, group: str, node: str, path: Path, on_exit: Callable[[], None]) -> None:
        self._group, self._node, self._path, self._on_exit = group, node, path, on_exit
        self._namespace = procfs.pid_namespace()
        self._watched: dict[tuple[str, int], _Watched] = {}
        self._raw: dict[str, str] = {}
        self.ended: set[Exited] = set()
        self.departed: dict[str, set[int]] = {}

    def load(self) -> None:
        """Take what a former run knew: Redis may have lost it."""
        try:
            stored = _STORED.validate_json(self._path.read_bytes())
        except FileNotFoundError:
            return
        except ValidationError as error:
            log.error("group %s: %s can't be read; processes are known again when they register: %s",
                      self._group, self._path, error)  # fmt: skip
            return
        for target in stored:
            self._take(target)

    async def refresh(self, records: Mapping[str, str]) -> None:
        """Take what the group's ``targets`` hash says. What it does not say is kept: it may have been lost."""
        before = self._targets()
        for name, raw in records.items():
            job, host, pid = name.split("/") if name.count("/") == 2 else ("", "", "")
            if host != self._node or self._raw.get(name) == raw:
                continue
            self._raw[name] = raw
            try:
                target = Target.model_validate_json(raw)
            except ValidationError as error:
                log.warning("group %s: the registration %s is invalid and ignored: %s", self._group, name, error)
                continue
            if (target.job, target.host, str(target.pid)) == (job, host, pid):
                self._take(target)
            else:
                log.warning("group %s: the registration %s names other than its content; ignored", self._group, name)
        self._raw = {name: raw for name, raw in self._raw.items() if name in records}
        if (now := self._targets()) != before:
            await self._store(now)

    def missing(self, records: Collection[str]) -> list[Target]:
        """Living processes that the group's ``targets`` hash does not name: it lost them."""
        living = [watched.target for watched in self._living()]
        return [target for target in living if f"{target.job}/{target.host}/{target.pid}" not in records]

    def jobs(self) -> tuple[str, ...]:
        """Jobs with a living process here."""
        return tuple(sorted({watched.target.job for watched in self._living()}))

    def alive(self, job: str) -> tuple[Target, ...]:
        """The job's living processes, in the order of their numbers."""
        found = [watched.target for watched in self._living() if watched.target.job == job]
        return tuple(sorted(found, key=lambda target: target.pid))

    def pids(self) -> frozenset[int]:
        return frozenset(watched.target.pid for watched in self._living())

    def find(self, job: str, pid: str, start: str) -> Target | None:
        """The living target that a lease names, if it is one."""
        watched = self._watched.get((job, int(pid))) if pid.isdigit() else None
        if watched is None or str(watched.target.start) != start or procfs.has_exited(watched.pidfd):
            return None
        return watched.target

    def exit_event(self, job: str, pid: int, start: int) -> asyncio.Event | None:
        """Set when that process ends; None when it is not watched (any more)."""
        watched = self._watched.get((job, pid))
        return watched.exited if watched and watched.target.start == start else None

    def forget(self, job: str) -> None:
        """The group knows that this job is gone."""
        self.departed.pop(job, None)

    def close(self) -> None:
        for watched in tuple(self._watched.values()):
            self._drop(watched)

    def _take(self, target: Target) -> None:
        key = (target.job, target.pid)
        known = self._watched.get(key)
        if known and known.target.start == target.start:
            known.target = target  # the same process has told more of itself
            return
        if (problem := self._refusal(target)) is not None:
            log.warning("group %s: process %d of job %s is not watched: %s",
                        self._group, target.pid, target.job, problem)  # fmt: skip
            return
        pidfd = procfs.open_process(target.pid, target.start)
        if pidfd is None:
            self._note_end(target)
            return
        if known:
            self._end(known)
        watched = _Watched(target, pidfd)
        self._watched[key] = watched
        self.departed.pop(target.job, None)
        asyncio.get_running_loop().add_reader(pidfd, self._end, watched)

    def _refusal(self, target: Target) -> str | None:
        if target.pid_namespace != self._namespace:
            return (
                f"it is in another pid namespace ({target.pid_namespace}, the agent is in {self._namespace}); "
                "run the agent with the host's pid namespace (hostPID)"
            )
        found = procfs.look_at(target.pid)
        if found is not None and found.start == target.start and found.uid != target.uid:
            return f"it runs as user id {found.uid}, registered was {target.uid}"
        if os.geteuid() not in {0, target.uid}:
            return f"it belongs to user id {target.uid}, the agent runs as {os.geteuid()}; run the agent as root"
        if len(self._watched) >= MAX_TARGETS:
            return f"more than {MAX_TARGETS} processes are registered"
        return None

    def _end(self, watched: _Watched) -> None:
        if self._watched.get((watched.target.job, watched.target.pid)) is watched:
            self._drop(watched)
            self._note_end(watched.target)
            self._on_exit()

    def _drop(self, watched: _Watched) -> None:
        asyncio.get_running_loop().remove_reader(watched.pidfd)
        os.close(watched.pidfd)
        watched.exited.set()
        del self._watched[watched.target.job, watched.target.pid]

    def _note_end(self, target: Target) -> None:
        self.ended.add(Exited(target.job, target.pid, target.start))
        if not self.alive(target.job):
            self.departed.setdefault(target.job, set()).add(target.pid)

    def _living(self) -> list[_Watched]:
        # The event loop may not have run since a process ended: ask the kernel.
        return [watched for watched in self._watched.values() if not procfs.has_exited(watched.pidfd)]

    def _targets(self) -> list[Target]:
        return [watched.target for watched in self._watched.values()]

    async def _store(self, targets: list[Target]) -> None:
        try:
            await asyncio.to_thread(write_whole, self._path, _STORED.dump_json(targets))
        except OSError as error:
            log.error("group %s: %s could not be written: %s. A restarted agent will know its processes from Redis "
                      "only.", self._group, self._path, error)  # fmt: skip
