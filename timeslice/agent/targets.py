"""The processes of each job of one group on this node: validated, proven, held by pidfd, remembered on disk."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Collection, Container, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from timeslice.agent import procfs
from timeslice.agent.choice import CHANNEL, HTTP, stands_in
from timeslice.agent.journal import read_whole, write_whole
from timeslice.agent.procfs import Elsewhere
from timeslice.agent.proof import Evidence, examine
from timeslice.errors import BackendError, FaultKind
from timeslice.locks.scripts import Exited
from timeslice.models import RECORD_MAX, Target, brief, read_wire

log = logging.getLogger("timeslice.agent")

MAX_TARGETS = 4096  # of one group on one node
MAX_ENDED = 512  # ended ones to be told of at a time; the others' turn comes when the group has heard of these
_SAID = 10  # refusals that are told at a time


class _Stored(Target):
    found: bool = False


_STORED = TypeAdapter(list[_Stored])


def _names(target: Target) -> tuple[str, str]:
    """Of its registration: the second one where another container's process has the first."""
    name = f"{target.job}/{target.host}/{target.pid}"
    return name, f"{name}@{target.start}"


def _stands_in(records: Mapping[str, str], target: Target) -> bool:
    name, apart = _names(target)
    return apart in records or target.pid_namespace in records.get(name, "")


@dataclass
class _Watched:
    """``target`` is the process as it is seen from here, ``told`` as it registered: with its number in its own pid
    namespace, by which leases and channels call it. ``found``: it did not register, discovery found it."""

    target: Target
    told: Target
    pidfd: int
    found: bool
    exited: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def process(self) -> tuple[int, int]:
        return self.target.pid, self.target.start


class TargetRegistry:
    """Targets are known per (group, job): two roles of a job on one node are two sets. A registration is a claim, and
    who may write to Redis may claim anything: only a process that shows that it is the job's in this group is ever
    watched, and then for no second job. ``refused`` says of every other registration (``job/node/pid``) why not.

    ``on_exit`` is called in the event loop when a process ended. ``ended`` holds those whose end was not reported
    yet, ``departed`` the dead process ids of jobs of which none is left here. ``cut_off`` holds processes that stood in
    for others and ended without a good-bye: for the group they stay until the workload speaks again.
    """

    def __init__(self, group: str, node: str, path: Path, on_exit: Callable[[], None]) -> None:
        self._group, self._node, self._path, self._on_exit = group, node, path, on_exit
        self._namespace, self._keeping = procfs.pid_namespace(), asyncio.Lock()
        self._watched: dict[tuple[str, int], _Watched] = {}  # by the number here
        self._told: dict[tuple[str, int, int], _Watched] = {}  # by the number that was told, and start time
        self._raw: dict[str, str] = {}
        self._kept: list[tuple[Target, bool]] | None = None  # what is on disk; None: not known
        self.refused: dict[str, str] = {}
        self.passed_over: dict[tuple[int, int], str] = {}  # what discovery found and may not take
        self.ended: set[Exited] = set()
        self.departed: dict[str, set[int]] = {}
        self.cut_off: dict[tuple[str, int], Target] = {}
        self._busy: Container[int] = ()
        self.hidden: dict[str, str] = {}  # jobs that may be here, and why discovery could not look
        self.remembers = False  # what a former run knew

    def load(self) -> None:
        """Take what a former run knew: Redis may have lost it."""
        try:
            stored = _STORED.validate_json(read_whole(self._path))
        except FileNotFoundError:
            self._kept = []
            return
        except ValidationError as error:
            log.error("group %s: %s can't be read; processes are known again when they register: %s",
                      self._group, self._path, brief(error))  # fmt: skip
            return
        self.remembers = True
        foreign = procfs.elsewhere() if any(each.pid_namespace != self._namespace for each in stored) else Elsewhere()
        for each in stored:
            target = Target.model_validate(each.model_dump(exclude={"found"}))
            if self._from_here(target, foreign) is None and foreign.whole:
                self._note_end(target, target.pid)  # it was here, or it had not been taken
                continue
            if problem := self._find_again(target) if each.found else self._take(target, {}, foreign):
                log.warning("group %s: process %d of job %s is not watched any more: %s",
                            self._group, target.pid, target.job, problem)  # fmt: skip

    async def refresh(self, records: Mapping[str, str], busy: Container[int] = ()) -> None:
        """Take what the group's ``targets`` hash says. What it does not say is kept: it may have been lost. ``busy``:
        numbers of processes here that hold or wait."""
        ours = {name: raw for name, raw in records.items() if name.split("/")[1:2] == [self._node]}
        chosen = [name for name in ours if name in self._raw] + [name for name in ours if name not in self._raw]
        if len(chosen) > MAX_TARGETS:
            log.warning("group %s: %d processes are registered on this node, and only %d looked at",
                        self._group, len(chosen), MAX_TARGETS)  # fmt: skip
        refused: dict[str, str] = {}
        seen: dict[tuple[int, int], Evidence] = {}
        news = [ours[name] for name in chosen[:MAX_TARGETS] if self._raw.get(name) != ours[name]]
        elsewhere = any(self._namespace not in raw for raw in news)
        foreign = await asyncio.to_thread(procfs.elsewhere) if elsewhere else Elsewhere()
        self._busy = busy
        for name in chosen[:MAX_TARGETS]:
            raw = ours[name]
            if self._raw.get(name) == raw or (name not in self._raw and len(self.ended) >= MAX_ENDED):
                continue
            if (problem := self._consider(name, raw, seen, foreign)) is None:
                self._raw[name] = raw
            else:
                refused[name] = problem  # and looked at again the next time: it may have changed, or ended
        self._say({name: why for name, why in refused.items() if self.refused.get(name) != why})
        self.refused = refused
        self._raw = {name: raw for name, raw in self._raw.items() if name in ours}
        await self.keep()

    def _consider(self, name: str, raw: str, seen: dict[tuple[int, int], Evidence], foreign: Elsewhere) -> str | None:
        """Take a registration that is new or has changed, or say why not."""
        try:
            target = read_wire(Target, raw, limit=RECORD_MAX)
        except ValueError as error:
            return f"its record is invalid: {error}"
        if name not in _names(target):
            return "it names other than its content"
        return self._take(target, seen, foreign)

    def found(self) -> list[Target]:
        """Living processes that discovery found and that have not registered."""
        return [watched.target for watched in self._living() if watched.found]

    def registered(self) -> dict[tuple[int, int], Target]:
        """Living processes that registered, by number and start time here."""
        return {watched.process: watched.target for watched in self._living() if not watched.found}

    def known(self) -> dict[tuple[int, int], str]:
        """Living processes, by number and start time here, and the job of each."""
        return {watched.process: watched.target.job for watched in self._living()}

    def take_found(self, job: str, pid: int, start: int, uid: int) -> str | None:
        """Watch a process that nobody registered, and that showed by itself that it is the job's; why not, if it can't
        be. The caller has just seen that it is not known yet."""
        target = Target(job=job, host=self._node, pid=pid, start=start, uid=uid, pid_namespace=self._namespace)
        if problem := self._out_of_reach(target):
            return problem
        try:
            opened = procfs.open_and_look(pid, start)
        except OSError as error:
            return procfs.unwatchable(error)
        if opened is None:
            return None  # it has ended, and nobody has heard of it yet
        pidfd, status = opened
        if (status.uid, status.one_user) != (uid, True):
            os.close(pidfd)
            return f"it does not run as user id {uid} any more"
        if earlier := self._watched.get((job, pid)):
            self._end(earlier)
        self._watch(_Watched(target, target, pidfd, found=True))
        return None

    def _find_again(self, target: Target) -> str | None:
        """One that a former run had found. The next look tells whether it still shows its job."""
        found = procfs.look_at(target.pid)
        if found is None or found.start != target.start:
            self._note_end(target, target.pid)
            return None
        return self.take_found(target.job, target.pid, target.start, target.uid)

    def let_go(self, target: Target) -> None:
        """It was found, and is nobody's of the job any more; it has not ended."""
        watched = self._watched.get((target.job, target.pid))
        if watched and watched.found and watched.target == target:
            self._drop(watched)

    def _say(self, news: Mapping[str, str]) -> None:
        for name, why in list(news.items())[:_SAID]:
            log.warning("group %s: the registration %.200s is ignored: %s", self._group, ascii(name), why)
        if len(news) > _SAID:
            log.warning("group %s: so are %d more", self._group, len(news) - _SAID)

    def complaints(self) -> list[str]:
        """What an operator should know of the refused registrations, a few lines at most."""
        lines = [f"registration {ascii(name)[:200]} is ignored: {why}" for name, why in self.refused.items()]
        lines += list(self.passed_over.values())
        return lines[:_SAID] + ([f"and {len(lines) - _SAID} more registrations"] if len(lines) > _SAID else [])

    def verify(self, targets: Collection[Target]) -> None:
        """Look once more, right before they are touched. BackendError(poisoned) for one that became another user's."""
        for target in targets:
            found = procfs.look_at(target.pid)
            # Its number can't have passed to another process while we hold its pidfd and it has not ended.
            if found and found.start == target.start and (found.uid, found.one_user) != (target.uid, True):
                raise BackendError(
                    f"group {self._group}: process {target.pid} of job {target.job} runs as user id {found.uid} now, "
                    f"registered was {target.uid}; it is not touched. End it.",
                    kind=FaultKind.POISONED,
                    group=self._group,
                    job=target.job,
                    node=self._node,
                )

    def missing(self, records: Mapping[str, str]) -> list[Target]:
        """Processes that registered and live, or count as if, and that the group's ``targets`` hash does not name: it
        lost them."""
        living = [*(watched.told for watched in self._living() if not watched.found), *self.cut_off.values()]
        return [target for target in living if not _stands_in(records, target)]

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
        """The living target that a lease names, if it is one: by the number that it has for itself."""
        named = pid.isdecimal() and start.isdecimal()
        watched = self._told.get((job, int(pid), int(start))) if named else None
        if watched is None or procfs.has_exited(watched.pidfd):
            return None
        return watched.target

    def number_told(self, target: Target) -> int:
        """The number that this living process has for itself, in its own pid namespace, if it registered from there."""
        watched = self._watched.get((target.job, target.pid))
        return watched.told.pid if watched else target.pid

    def exit_event(self, job: str, pid: int, start: int) -> asyncio.Event | None:
        """Set when that process ends; None when it is not watched (any more)."""
        watched = self._told.get((job, pid, start))
        return watched.exited if watched else None

    def adrift(self) -> set[str]:
        """Jobs whose workload may live with its state, and nobody here can reach it."""
        return {job for job, _ in self.cut_off} - {found.target.job for found in self._living() if found.target.channel}

    def settle(self, job: str) -> None:
        """The job's state is known without those that were cut off."""
        for key in [key for key in self.cut_off if key[0] == job]:
            self._depart(self.cut_off.pop(key), key[1])

    def forget(self, job: str) -> None:
        """The group knows that this job is gone."""
        self.departed.pop(job, None)

    def close(self) -> None:
        for watched in tuple(self._watched.values()):
            self._drop(watched)

    def _take(self, told: Target, seen: dict[tuple[int, int], Evidence], foreign: Elsewhere) -> str | None:
        """Watch a process, or say why not. One that has ended is noted as such. ``seen``: looked at a moment ago."""
        target = self._from_here(told, foreign)
        if target is None:
            if foreign.whole and told.pid not in self._busy:  # it had ended before anybody saw it
                self._note_end(told, told.pid)
                return None
            return (
                f"it is in another pid namespace ({told.pid_namespace!a}, the agent is in {self._namespace}), and not "
                "to be seen from here; run the agent with the host's pid namespace (hostPID), as root"
            )
        known = self._watched.get((target.job, target.pid))
        if known and (known.target.start, known.target.uid) == (target.start, target.uid):
            self._hear(known, target, told)
            return None
        evidence = seen.get((target.pid, target.start))
        if problem := self._out_of_reach(target) or (evidence and evidence.refusal(self._group, target)):
            return problem
        pidfd = evidence = problem = None
        try:
            pidfd = procfs.open_process(target.pid, target.start)
            # Its number means this process now, or it has ended and nobody.
            evidence = examine(target.pid, target.start) if pidfd is not None else None
        except ProcessLookupError:
            pass
        except OSError as error:
            problem = procfs.unwatchable(error)
        if pidfd is None or evidence is None:
            if pidfd is not None:
                os.close(pidfd)
            if not problem:
                self._note_end(told, target.pid)
            return problem
        seen[target.pid, target.start] = evidence
        if problem := evidence.refusal(self._group, target):
            os.close(pidfd)
            return problem
        if known:
            self._end(known)
        for other in tuple(self._watched.values()):
            if other.found and other.process == (target.pid, target.start):
                self._drop(other)  # what it says of itself counts for more than what it was started with
        self._watch(_Watched(target, told, pidfd, found=False))
        return None

    def _from_here(self, told: Target, foreign: Elsewhere) -> Target | None:
        """The process with its number in our own pid namespace; None if it is not to be seen from here."""
        if told.pid_namespace == self._namespace:
            return told
        pid = foreign.numbers.get((told.pid_namespace, told.pid, told.start))
        return told.model_copy(update={"pid": pid, "pid_namespace": self._namespace}) if pid else None

    def _hear(self, known: _Watched, target: Target, told: Target) -> None:
        """The same process has told more of itself, or has registered after it was found."""
        self._unname(known)
        known.target, known.told, known.found = target, told, False
        self._told[told.job, told.pid, told.start] = known

    def _unname(self, watched: _Watched) -> None:
        named = (watched.told.job, watched.told.pid, watched.told.start)
        if self._told.get(named) is watched:  # two pid namespaces may have started the same number at the same time
            del self._told[named]

    def _watch(self, watched: _Watched) -> None:
        target, told = watched.target, watched.told
        self._watched[target.job, target.pid] = self._told[told.job, told.pid, told.start] = watched
        self.departed.pop(target.job, None)
        asyncio.get_running_loop().add_reader(watched.pidfd, self._end, watched)

    def _out_of_reach(self, target: Target) -> str | None:
        if os.geteuid() not in {0, target.uid}:
            return f"it belongs to user id {target.uid}, the agent runs as {os.geteuid()}; run the agent as root"
        if len(self._watched) >= MAX_TARGETS:
            return f"{MAX_TARGETS} processes are watched already"
        for (job, _), watched in self._watched.items():
            same = watched.process == (target.pid, target.start)
            if same and job != target.job and not watched.found and not procfs.has_exited(watched.pidfd):
                return f"it is a process of job {job} already; give each job processes of its own"
        return None

    def _end(self, watched: _Watched) -> None:
        if self._watched.get((watched.target.job, watched.target.pid)) is watched:
            self._drop(watched)
            self._note_end(watched.told, watched.target.pid)
            self._on_exit()

    def _drop(self, watched: _Watched) -> None:
        asyncio.get_running_loop().remove_reader(watched.pidfd)
        os.close(watched.pidfd)
        watched.exited.set()
        del self._watched[watched.target.job, watched.target.pid]
        self._unname(watched)

    def _note_end(self, target: Target, pid: int) -> None:
        """``target`` as it registered, ``pid`` as its number was here."""
        if stands_in(target):
            self.cut_off[target.job, target.pid] = target
            return
        self._depart(target, pid)
        said_good_bye = target.backend in (CHANNEL, HTTP)
        if said_good_bye and target.job in self.adrift():
            self.settle(target.job)

    def _depart(self, target: Target, pid: int) -> None:
        self.ended.add(Exited(target.job, target.pid, target.start))
        if not self.alive(target.job):
            self.departed.setdefault(target.job, set()).add(pid)

    def _living(self) -> list[_Watched]:
        # The event loop may not have run since a process ended: ask the kernel.
        return [watched for watched in self._watched.values() if not procfs.has_exited(watched.pidfd)]

    async def keep(self) -> None:
        """Write down who is watched, if that is not what was written last."""
        async with self._keeping:  # two tasks call: the one that hears from the group, and the one that looks around
            state = [(w.told, w.found) for w in self._watched.values()] + [(t, False) for t in self.cut_off.values()]
            if state == self._kept:
                return
            stored = [_Stored(**target.model_dump(), found=found) for target, found in state]
            try:
                await asyncio.to_thread(write_whole, self._path, _STORED.dump_json(stored))
                self._kept = state
            except OSError as error:
                log.error("group %s: %s could not be written: %s. A restarted agent will know its processes from Redis "
                          "only.", self._group, self._path, error)  # fmt: skip
