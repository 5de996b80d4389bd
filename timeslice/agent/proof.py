"""Whether a process takes part in a job of a group, by what the process itself shows.

What stands in Redis proves nothing: whoever may write there could name any process of this machine. So the process has
to show both names in a way that only itself, or who started it, could bring about:

- it holds a memory file named ``timeslice:<group>/<job>``, made by its own user (the client library opens one for
  each group when it registers; forks inherit it), or
- it was started with the group in ``TIMESLICE_GROUPS`` (names with commas between), and its job is shown by
  ``TIMESLICE_JOB`` or ``TIMESLICE_JOB_ID``, or else by Slurm, who put it into the control group of a step: of the job
  ``slurm-<id>.<step>``, and ``slurm-<id>`` for what the batch script itself runs.

The job alone is not enough: a client of any group of this agent could have the jobs of all others stopped.

A process may overwrite the environment that it was started with, as those do that give themselves a title: then that
says nothing of it, neither for nor against.
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
from timeslice.settings import slurm_job

MAX_FILES = 16_384  # open files of one process that are looked at
MAX_ENVIRONMENT = 4 << 20  # bytes
_VARIABLES = (b"TIMESLICE_JOB", b"TIMESLICE_JOB_ID")  # the first that is set counts, as for the job itself
_GROUPS, _PREFIX = b"TIMESLICE_GROUPS", b"TIMESLICE_PREFIX"
DEFAULT_PREFIX = "ts"  # as for clients
_READ = {*_VARIABLES, _GROUPS, _PREFIX}
_MEMORY_FILE = re.compile(r"/memfd:timeslice:([^/]+)/([^/]+) \(deleted\)")
_SLURM = re.compile(r"/job_(\d+)(?:/step_(\d+))?(?:/|$)", re.MULTILINE)


@dataclass(frozen=True)
class Shown:
    """What a process shows: pairs of group and job by its memory files; jobs and groups by how it was started, and the
    prefix of the installation that it was started for. ``wiped``: it has overwritten its environment, or part of it;
    ``bare``: it was started without one."""

    files: frozenset[tuple[str, str]]
    jobs: frozenset[str]
    groups: frozenset[str]
    prefix: str = DEFAULT_PREFIX
    wiped: bool = False
    bare: bool = False

    def proves(self, group: str, job: str) -> bool:
        return (group, job) in self.files or (group in self.groups and job in self.jobs)


@dataclass(frozen=True)
class Evidence:
    """One process, as it shows itself. ``shown`` None: that may not be read. ``ends``: it is on its way out, and shows
    less and less."""

    uid: int
    one_user: bool
    reserved: bool
    shown: Shown | None
    inner: int = 0  # its number in its own pid namespace
    ends: bool = False

    @property
    def silent(self) -> bool:
        """Its environment says nothing, neither for a job nor against."""
        return self.ends or self.shown is None or self.shown.wiped

    def refusal(self, group: str, target: Target, *, proven: bool = False) -> str | None:
        """Why this process is not taken for the one that ``target`` claims in the group; None if it is. ``proven``: it
        showed it before, so that only what it shows otherwise counts."""
        if self.reserved:
            return "it is the agent itself, one that started the agent, the first process, or the kernel's"
        if not self.one_user:
            return "it runs as several users at once (a setuid program)"
        if self.uid != target.uid:
            return f"it runs as user id {self.uid}, registered was {target.uid}"
        if proven and (self.silent or (self.shown and target.job in self.shown.jobs and not self.shown.groups)):
            return None
        if self.shown is None:
            return "what it shows can't be read; run the agent as root, in a container with the capability SYS_PTRACE"
        if not self.shown.proves(group, target.job):
            return (
                f"it does not show that it takes part in job {target.job} of group {group}: let it register itself "
                f"(timeslice.hold, register_workload), or start it with TIMESLICE_JOB={target.job} and "
                f"TIMESLICE_GROUPS={group}"
                + (" (it has overwritten its environment, as by a process title)" if self.shown.wiped else "")
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
    later = None if reserved else procfs.look_at(pid)  # one that ended meanwhile has shown nothing
    ends = not reserved and (later is None or later.exiting or later.ended)
    return Evidence(found.uid, found.one_user, reserved, shown, found.inner, ends)


def _look(proc: Path, uid: int) -> Shown:
    with (proc / "environ").open("rb") as environment:
        block = environment.read(MAX_ENVIRONMENT)
    pairs = (each.partition(b"=") for each in block.split(b"\0"))
    found = {name: value.decode(errors="replace") for name, _, value in pairs if name in _READ}
    jobs = [found[name] for name in _VARIABLES if found.get(name)][:1]
    # As for the job itself: what it was given as its name counts, and only without that Slurm's.
    jobs = jobs or [slurm_job(*each) for each in _SLURM.findall((proc / "cgroup").read_text(errors="replace"))]
    groups = {name.strip() for name in found.get(_GROUPS, "").split(",")} - {""}
    prefix = found.get(_PREFIX) or DEFAULT_PREFIX
    files = frozenset(_memory_files(proc, uid))
    return Shown(
        files, frozenset(jobs), frozenset(groups), prefix, wiped=bool(block) and _is_wiped(block), bare=not block
    )


def _is_wiped(block: bytes) -> bool:
    """Whether an environment was overwritten, wholly or in part: the kernel writes no empty entry between others, and
    who writes a title fills up what is left with zeros or blanks."""
    return b"=" not in block or b"\0\0" in block or block.endswith((b"  ", b"  \0"))


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
