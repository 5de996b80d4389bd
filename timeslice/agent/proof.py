"""Whether a process takes part in a job of a group, by what the process itself shows.

What stands in Redis proves nothing: whoever may write there could name any process of this machine. So the process has
to show both names in a way that only itself, or who started it, could bring about:

- it holds a memory file named ``timeslice:<group>/<job>``, made by its own user (the client library opens one for
  each group when it registers; forks inherit it), or
- it was started with the group in ``TIMESLICE_GROUPS`` (names with commas between), and its job is shown by
  ``TIMESLICE_JOB`` or ``TIMESLICE_JOB_ID``, or by Slurm, who put it into the control group of the job ``slurm-<id>``.

The job alone is not enough: a client of any group of this agent could have the jobs of all others stopped.
"""

from __future__ import annotations

import os
import re
from collections.abc import Container, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from timeslice.agent import procfs
from timeslice.models import Target

MAX_FILES = 16_384  # open files of one process that are looked at
MAX_ENVIRONMENT = 4 << 20  # bytes
_VARIABLES = (b"TIMESLICE_JOB", b"TIMESLICE_JOB_ID")  # the first that is set counts, as for the job itself
_GROUPS, _PREFIX = b"TIMESLICE_GROUPS", b"TIMESLICE_PREFIX"
DEFAULT_PREFIX = "ts"  # as for clients
_READ = {*_VARIABLES, _GROUPS, _PREFIX}
_MEMORY_FILE = re.compile(r"/memfd:timeslice:([^/]+)/([^/]+) \(deleted\)")
_SLURM = re.compile(r"/job_(\d+)(?:/|$)", re.MULTILINE)


@dataclass(frozen=True)
class Shown:
    """What a process shows: pairs of group and job by its memory files; jobs and groups by how it was started, and the
    prefix of the installation that it was started for."""

    files: frozenset[tuple[str, str]]
    jobs: frozenset[str]
    groups: frozenset[str]
    prefix: str = DEFAULT_PREFIX

    def proves(self, group: str, job: str) -> bool:
        return (group, job) in self.files or (group in self.groups and job in self.jobs)


@dataclass(frozen=True)
class Evidence:
    """One process, as it shows itself. ``shown`` None: that may not be read."""

    uid: int
    one_user: bool
    reserved: bool
    shown: Shown | None

    def refusal(self, group: str, target: Target) -> str | None:
        """Why this process is not taken for the one that ``target`` claims in the group; None if it is."""
        if self.reserved:
            return "it is the agent itself, one that started the agent, the first process, or the kernel's"
        if not self.one_user:
            return "it runs as several users at once (a setuid program)"
        if self.uid != target.uid:
            return f"it runs as user id {self.uid}, registered was {target.uid}"
        if self.shown is None:
            return "what it shows can't be read; run the agent as root, in a container with the capability SYS_PTRACE"
        if not self.shown.proves(group, target.job):
            return (
                f"it does not show that it takes part in job {target.job} of group {group}: let it register itself "
                f"(timeslice.hold, register_workload), or start it with TIMESLICE_JOB={target.job} and "
                f"TIMESLICE_GROUPS={group}"
            )
        return None


def examine(pid: int, start: int, ours: Container[int] = ()) -> Evidence:
    """Look at a process. ProcessLookupError when it has ended; hold its pidfd, so that no later one is meant. ``ours``:
    what ``procfs.ancestors`` has just said, for those who look at many."""
    found = procfs.look_at(pid)
    if found is None or found.start != start:
        raise ProcessLookupError(f"process {pid} has ended")
    reserved = found.kernel or pid == 1 or pid in (ours or procfs.ancestors())
    try:
        shown = None if reserved else _look(Path(f"/proc/{pid}"), found.uid)
    except PermissionError:
        shown = None
    except FileNotFoundError:
        raise ProcessLookupError(f"process {pid} has ended") from None
    return Evidence(found.uid, found.one_user, reserved, shown)


def _look(proc: Path, uid: int) -> Shown:
    with (proc / "environ").open("rb") as environment:
        pairs = (each.partition(b"=") for each in environment.read(MAX_ENVIRONMENT).split(b"\0"))
        found = {name: value.decode(errors="replace") for name, _, value in pairs if name in _READ}
    jobs = [found[name] for name in _VARIABLES if found.get(name)][:1]
    jobs += [f"slurm-{number}" for number in _SLURM.findall((proc / "cgroup").read_text(errors="replace"))]
    groups = {name.strip() for name in found.get(_GROUPS, "").split(",")} - {""}
    prefix = found.get(_PREFIX) or DEFAULT_PREFIX
    return Shown(frozenset(_memory_files(proc, uid)), frozenset(jobs), frozenset(groups), prefix)


def _memory_files(proc: Path, uid: int) -> Iterator[tuple[str, str]]:
    with os.scandir(proc / "fd") as files:
        for file in islice(files, MAX_FILES):
            try:
                link = _MEMORY_FILE.fullmatch(str(Path(file.path).readlink()))
                # One that another user made was sent to it, and says nothing.
                if link and Path(file.path).stat().st_uid == uid:
                    yield link[1], link[2]
            except FileNotFoundError:
                continue  # closed meanwhile
