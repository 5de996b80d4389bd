"""The processes of each job of one group on this node: validated, proven, held by pidfd, remembered on disk."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Collection, Container, Mapping
from pathlib import Path

from timeslice.agent import procfs
from timeslice.agent.choice import CHANNEL, HTTP, stands_in
from timeslice.agent.procfs import Elsewhere
from timeslice.agent.proof import Evidence, examine
from timeslice.agent.watched import (
    IN_A_SANDBOX,
    OUT_OF_SIGHT,
    SAID,
    Stored,
    Unseen,
    Watched,
    check_user,
    read_registration,
    read_stored,
    say_refused,
    stands_in_records,
    write_stored,
)
from timeslice.locks.scripts import Exited
from timeslice.models import Target

log = logging.getLogger("timeslice.agent")

MAX_TARGETS = 4096  # of one group on one node
MAX_ENDED = 512  # ended ones to be told of at a time; the others' turn comes when the group has heard of these


class TargetRegistry:
    """Targets are known per (group, job): two roles of a job on one node are two sets. A registration is a claim, and
    who may write to Redis may claim anything: only a process that shows that it is the job's in this group is ever
    watched, and then for no second job. ``refused`` says of every other registration (``job/node/pid``) why not, and
    ``unwatched`` of every job that has processes here, as far as can be seen, which are not watched.
    Once proven, a process is the job's until it ends or goes on as another program; also for the next run.

    ``on_exit`` is called in the event loop when a process ended. ``ended`` holds those whose end was not reported
    yet, ``departed`` the dead process ids of jobs of which none is left here. ``cut_off`` holds processes that stood in
    for others and ended without a good-bye: for the group they stay until the workload speaks again.
    """

    def __init__(self, group: str, node: str, path: Path, on_exit: Callable[[], None]) -> None:
        self._group, self._node, self._path, self._on_exit = group, node, path, on_exit
        self._namespace, self._keeping = procfs.pid_namespace(), asyncio.Lock()
        self._watched: dict[tuple[str, int], Watched] = {}  # by the number here
        self._told: dict[tuple[str, int, int], Watched] = {}  # by the number that was told, and start time
        self._raw: dict[str, str] = {}
        self._kept: list[Stored] | None = None  # what is on disk; None: not known
        self._remembered: list[Stored] = []  # what a former run watched, and this one can't yet
        self._lost: dict[str, str] = {}  # job -> why one of these is not watched
        self._claims: dict[str, str] = {}  # job -> why a process of it that registered is not watched
        self.refused: dict[str, str] = {}
        self.passed_over: dict[tuple[int, int], tuple[str, str]] = {}  # what discovery may not take: job, and why
        self.remarks: list[str] = []  # of discovery, on processes of no job
        self.ended: set[Exited] = set()
        self.departed: dict[str, set[int]] = {}
        self.cut_off: dict[tuple[str, int], Target] = {}
        self._busy: Container[int] = ()
        self.hidden: dict[str, str] = {}  # jobs that may be here, and why discovery could not look
        self.remembers = False  # what a former run knew
        self._polls, self._unseen = False, Unseen()

    def load(self) -> None:
        """Take what a former run knew: Redis may have lost it."""
        stored = read_stored(self._group, self._path)
        if stored is None or not self._path.exists():
            self._kept = None if stored is None else []
            return
        self.remembers, self._remembered = True, stored
        self._recall(procfs.elsewhere() if stored else Elsewhere())

    def _recall(self, foreign: Elsewhere) -> None:
        """Watch again whom a former run watched. Who can't be watched now is tried again."""
        waiting, before, self._lost = self._remembered, self._lost, {}
        self._remembered = []
        for each in waiting:
            target = each.target
            here = self._from_here(target, foreign)
            if here and (here.job, here.pid) in self._watched:
                continue
            if here is None and foreign.whole:
                self._note_end(target, target.pid)  # it was here, or it had not been taken
                continue
            seen: dict[tuple[int, int], Evidence] = {}
            problem = self._take(target, seen, foreign, proven=True, found=each.found)
            if problem is None:
                continue
            if all(evidence.silent or evidence.uid != target.uid for evidence in seen.values()):
                self._remembered.append(each)
                self._lost[target.job] = f"process {target.pid}, which was watched before: {problem}"
            if self._lost.get(target.job) is None or target.job not in before:
                log.warning("group %s: process %d of job %s is not watched any more: %s",
                            self._group, target.pid, target.job, problem)  # fmt: skip

    async def refresh(self, records: Mapping[str, str], busy: Container[int] = ()) -> None:
        """Take what the group's ``targets`` hash says. What it does not say is kept: it may have been lost. ``busy``:
        numbers of processes here that hold or wait."""
        ours = {name: raw for name, raw in records.items() if name.split("/")[1:2] == [self._node]}
        chosen = [name for name in ours if name in self._raw] + [name for name in ours if name not in self._raw]
        if len(chosen) > MAX_TARGETS:
            log.warning("group %s: of %d processes only %d are watched", self._group, len(chosen), MAX_TARGETS)
        for watched in [each for each in self._watched.values() if each.is_polled and each.has_ended()]:
            self._end(watched)
        for told in self._unseen.over():
            self._note_end(told, told.pid)
        refused: dict[str, str] = {}
        claims = {name.split("/")[0]: f"{MAX_TARGETS} processes are watched already" for name in chosen[MAX_TARGETS:]}
        seen: dict[tuple[int, int], Evidence] = {}
        news = [ours[name] for name in chosen[:MAX_TARGETS] if self._raw.get(name) != ours[name]]
        news += [each.pid_namespace for each in self._remembered]
        elsewhere = any(self._namespace not in raw for raw in news)
        foreign = await asyncio.to_thread(procfs.elsewhere) if elsewhere else Elsewhere()
        self._busy = busy
        self._recall(foreign)
        for name in chosen[:MAX_TARGETS]:
            raw = ours[name]
            if self._raw.get(name) == raw:
                continue
            if name not in self._raw and len(self.ended) >= MAX_ENDED:
                claims[name.split("/")[0]] = "not all registered processes could be looked at yet"
                continue
            target = read_registration(name, raw)
            problem = target if isinstance(target, str) else self._take(target, seen, foreign)
            if problem is None:
                self._raw[name] = raw
                continue
            refused[name] = problem  # and looked at again the next time: it may have changed, or ended
            if isinstance(target, Target):
                claims[target.job] = f"process {target.pid} of host {target.host}: {problem}"
        say_refused(self._group, {name: why for name, why in refused.items() if self.refused.get(name) != why})
        self.refused, self._claims = refused, claims
        self._raw = {name: raw for name, raw in self._raw.items() if name in ours}
        await self.keep()

    @property
    def unwatched(self) -> dict[str, str]:
        """Jobs with processes here that live, or can't be seen to have ended, and are not watched; and why not."""
        return {**dict(self.passed_over.values()), **self._unseen.told(), **self._lost, **self._claims}

    def found(self) -> list[Target]:
        """Living processes that discovery found and that have not registered."""
        return [watched.target for watched in self._living() if watched.found]

    def registered(self) -> dict[tuple[int, int], Target]:
        """Living processes that registered, by number and start time here."""
        return {watched.process: watched.target for watched in self._living() if not watched.found}

    def known(self) -> dict[tuple[int, int], str]:
        """Living processes, by number and start time here, and the job of each."""
        return {watched.process: watched.target.job for watched in self._living()}

    def take_found(self, job: str, pid: int, start: int, uid: int, inner: int = 0) -> str | None:
        """Watch a process that nobody registered, and that showed by itself that it is the job's; why not, if it can't
        be. The caller has just seen that it is not known yet. ``inner``: its number in its own pid namespace."""
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
            procfs.let_go(pidfd)
            return f"it does not run as user id {uid} any more" if status.one_user else "it runs as several users"
        if earlier := self._watched.get((job, pid)):
            self._end(earlier)
        # As its lease calls it, should it hold by a name of its host that is not this node's.
        namespace = procfs.pid_namespace(pid) or self._namespace
        number = inner if inner and namespace != self._namespace else pid
        named = {"pid": number, "pid_namespace": namespace, "start": procfs.own_start(pid, start)}
        self._watch(Watched(target, target.model_copy(update=named), pidfd, found=True))
        return None

    def let_go(self, target: Target) -> None:
        """It was found, and is nobody's of the job any more; it has not ended."""
        watched = self._watched.get((target.job, target.pid))
        if watched and watched.found and watched.target == target:
            self._drop(watched)

    def complaints(self) -> list[str]:
        """What an operator should know of processes that are not watched, a few lines at most."""
        lines = [f"registration {ascii(name)[:200]} is ignored: {why}" for name, why in self.refused.items()]
        lines += [why for _, why in self.passed_over.values()]
        lines += [f"job {job} is not watched: {why}" for job, why in self._lost.items()] + self.remarks
        return lines[:SAID] + ([f"and {len(lines) - SAID} more"] if len(lines) > SAID else [])

    def verify(self, targets: Collection[Target]) -> None:
        """Look once more, right before they are touched. BackendError(poisoned) for one that became another user's."""
        for target in targets:
            check_user(self._group, self._node, target)

    def missing(self, records: Mapping[str, str]) -> list[Target]:
        """Processes that registered and live, or count as if, and that the group's ``targets`` hash does not name: it
        lost them."""
        living = [*(watched.told for watched in self._living() if not watched.found), *self.cut_off.values()]
        return [target for target in living if not stands_in_records(records, target)]

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
        if named and watched is None:  # see procfs.own_start
            watched = self._told.get((job, int(pid), int(start) - 1))
            watched = watched if watched and watched.found else None
        return watched.target if watched and not watched.has_ended() else None

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

    def _take(
        self,
        told: Target,
        seen: dict[tuple[int, int], Evidence],
        foreign: Elsewhere,
        *,
        proven: bool = False,
        found: bool = False,
    ) -> str | None:
        """Watch a process, or say why not. One that has ended is noted as such. ``seen``: looked at a moment ago.
        ``proven``: a former run watched it, and ``found``: because discovery had found it."""
        target = self._from_here(told, foreign)
        if target is None:
            if foreign.whole and told.pid not in self._busy:
                if not self._unseen.strike(told):
                    return IN_A_SANDBOX.format(told.pid_namespace)
                self.ended.add(Exited(told.job, told.pid, told.start))
                return None
            return OUT_OF_SIGHT.format(told.pid_namespace, self._namespace)
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
                procfs.let_go(pidfd)
            if not problem:
                self._note_end(told, target.pid)
            return problem
        seen[target.pid, target.start] = evidence
        if problem := evidence.refusal(self._group, target, proven=proven):
            procfs.let_go(pidfd)
            return problem
        if known:
            self._end(known)
        for other in tuple(self._watched.values()):
            if other.found and other.process == (target.pid, target.start):
                self._drop(other)  # what it says of itself counts for more than what it was started with
        self._watch(Watched(target, told, pidfd, found))
        return None

    def _from_here(self, told: Target, foreign: Elsewhere) -> Target | None:
        """The process with its number in our own pid namespace, and its start time by our clock; None if it is not to
        be seen from here."""
        if told.pid_namespace == self._namespace:
            start = procfs.start_here(told.pid, told.start)
            return told if start == told.start else told.model_copy(update={"start": start})
        pid, start = foreign.numbers.get((told.pid_namespace, told.pid), (0, 0))
        if not pid or not procfs.is_start(pid, start, told.start):
            return None
        return told.model_copy(update={"pid": pid, "start": start, "pid_namespace": self._namespace})

    def _hear(self, known: Watched, target: Target, told: Target) -> None:
        """The same process has told more of itself, or has registered after it was found."""
        self._unname(known)
        known.target, known.told, known.found = target, told, False
        self._told[told.job, told.pid, told.start] = known

    def _unname(self, watched: Watched) -> None:
        named = (watched.told.job, watched.told.pid, watched.told.start)
        if self._told.get(named) is watched:  # two pid namespaces may have started the same number at the same time
            del self._told[named]

    def _watch(self, watched: Watched) -> None:
        target, told = watched.target, watched.told
        self._watched[target.job, target.pid] = self._told[told.job, told.pid, told.start] = watched
        self.departed.pop(target.job, None)
        if not watched.is_polled:
            asyncio.get_running_loop().add_reader(watched.pidfd, self._end, watched)
        elif not self._polls:
            self._polls = True
            log.warning("group %s: this system gives no pidfds (pidfd_open is refused): processes are told apart by "
                        "their start times, and an end is noticed a few seconds later. Allow pidfd_open in the seccomp "
                        "profile of the agent's container.", self._group)  # fmt: skip

    def _out_of_reach(self, target: Target) -> str | None:
        if os.geteuid() not in {0, target.uid}:
            return f"it belongs to user id {target.uid}, the agent runs as {os.geteuid()}; run the agent as root"
        if len(self._watched) >= MAX_TARGETS:
            return f"{MAX_TARGETS} processes are watched already"
        for (job, _), watched in self._watched.items():
            same = watched.process == (target.pid, target.start)
            if same and job != target.job and not watched.found and not watched.has_ended():
                return f"it is a process of job {job} already; give each job processes of its own"
        return None

    def _end(self, watched: Watched) -> None:
        if self._watched.get((watched.target.job, watched.target.pid)) is watched:
            self._drop(watched)
            self._note_end(watched.told, watched.target.pid)
            self._on_exit()

    def _drop(self, watched: Watched) -> None:
        if not watched.is_polled:
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

    def _living(self) -> list[Watched]:
        # The event loop may not have run since a process ended: ask the kernel.
        return [watched for watched in self._watched.values() if not watched.has_ended()]

    async def keep(self) -> None:
        """Write down who is watched, if that is not what was written last."""
        async with self._keeping:  # two tasks call: the one that hears from the group, and the one that looks around
            cut_off = [Stored(**target.model_dump()) for target in self.cut_off.values()]
            stored = [*(each.stored() for each in self._watched.values()), *cut_off, *self._remembered]
            if stored == self._kept:
                return
            if await asyncio.to_thread(write_stored, self._group, self._path, stored):
                self._kept = stored
