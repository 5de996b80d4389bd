"""Whether a process takes part in a job, by what the process itself shows.

What stands in Redis proves nothing: whoever may write there could name any process of this machine. So the process has
to show the job's name in a way that only itself, or who started it, could bring about:

- it holds a memory file named ``timeslice:<job>``, made by its own user (the client library opens one when it
  registers; forks inherit it), or
- it was started with ``TIMESLICE_JOB`` or ``TIMESLICE_JOB_ID`` set to the job, or
- Slurm put it into the control group of the job ``slurm-<id>``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from timeslice.agent import procfs
from timeslice.models import Target

MAX_FILES = 16_384  # open files of one process that are looked at
MAX_ENVIRONMENT = 4 << 20  # bytes
_VARIABLES = (b"TIMESLICE_JOB", b"TIMESLICE_JOB_ID")  # the first that is set counts, as for the job itself
_MEMORY_FILE = re.compile(r"/memfd:timeslice:(.+) \(deleted\)")
_SLURM = re.compile(r"/job_(\d+)(?:/|$)", re.MULTILINE)


@dataclass(frozen=True)
class Evidence:
    """One process, as it shows itself. ``jobs`` None: what it shows may not be read."""

    uid: int
    one_user: bool
    reserved: bool
    jobs: frozenset[str] | None

    def refusal(self, target: Target) -> str | None:
        """Why this process is not taken for the one that ``target`` claims; None if it is."""
        if self.reserved:
            return "it is the agent itself, one that started the agent, the first process, or the kernel's"
        if not self.one_user:
            return "it runs as several users at once (a setuid program)"
        if self.uid != target.uid:
            return f"it runs as user id {self.uid}, registered was {target.uid}"
        if self.jobs is None:
            return "what it shows can't be read; run the agent as root, in a container with the capability SYS_PTRACE"
        if target.job not in self.jobs:
            return (
                f"it does not show that it takes part in job {target.job}: start it with TIMESLICE_JOB={target.job}, "
                "or let it register itself (timeslice.hold, register_workload)"
            )
        return None


def examine(pid: int, start: int) -> Evidence:
    """Look at a process. ProcessLookupError when it has ended; hold its pidfd, so that no later one is meant."""
    found = procfs.look_at(pid)
    if found is None or found.start != start:
        raise ProcessLookupError(f"process {pid} has ended")
    reserved = found.kernel or pid == 1 or pid in procfs.ancestors()
    try:
        jobs = None if reserved else frozenset(_shown(pid, found.uid))
    except PermissionError:
        jobs = None
    except FileNotFoundError:
        raise ProcessLookupError(f"process {pid} has ended") from None
    return Evidence(found.uid, found.one_user, reserved, jobs)


def _shown(pid: int, uid: int) -> Iterator[str]:
    proc = Path(f"/proc/{pid}")
    with (proc / "environ").open("rb") as environment:
        pairs = (each.partition(b"=") for each in environment.read(MAX_ENVIRONMENT).split(b"\0"))
        found = {name: value for name, _, value in pairs if name in _VARIABLES and value}
    yield from [found[name].decode(errors="replace") for name in _VARIABLES if name in found][:1]
    yield from (f"slurm-{number}" for number in _SLURM.findall((proc / "cgroup").read_text(errors="replace")))
    with os.scandir(proc / "fd") as files:
        for file in islice(files, MAX_FILES):
            try:
                link = _MEMORY_FILE.fullmatch(str(Path(file.path).readlink()))
                # One that another user made was sent to it, and says nothing.
                if link and Path(file.path).stat().st_uid == uid:
                    yield link[1]
            except FileNotFoundError:
                continue  # closed meanwhile
