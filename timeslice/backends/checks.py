"""What every backend checks before it touches a process."""

from __future__ import annotations

from pathlib import Path

from timeslice.arena.process import start_time_of
from timeslice.backends.base import Capabilities, Job, Selection
from timeslice.errors import BackendError, FaultKind
from timeslice.models import Target


def fault(kind: FaultKind, job: Job, message: str) -> BackendError:
    """A fault of one job on this node; the message starts with where and who."""
    return BackendError(
        f"group {job.group}, job {job.job}: {message}", kind=kind, group=job.group, job=job.job, node=job.node
    )


def is_alive(target: Target) -> bool:
    """True while exactly this process runs: a later process of the same number is another one."""
    return start_time_of(target.pid) == target.start


def is_foreign(target: Target) -> bool:
    """True if the target's number counts in another PID namespace, so that here it may be any other process's."""
    return target.pid_namespace not in ("", str(Path("/proc/self/ns/pid").readlink()))


def living(job: Job) -> list[Target]:
    """The job's targets that still run. BackendError(unsupported) for one that can't be told from here."""
    for target in job.targets:
        if is_foreign(target):
            raise fault(
                FaultKind.UNSUPPORTED,
                job,
                f"process {target.pid} counts in another PID namespace ({target.pid_namespace}); "
                "run the agent in that one, or give it the host's",
            )
    return [target for target in job.targets if is_alive(target)]


def check_selection(capabilities: Capabilities, job: Job, selection: Selection) -> None:
    """Refuse what a backend that moves whole processes can't do, before anything is touched."""
    if selection.mode not in capabilities.modes:
        raise fault(FaultKind.UNSUPPORTED, job, f"mode {selection.mode} is not possible here; use offload")
    if selection.tags or selection.slot:
        raise fault(FaultKind.UNSUPPORTED, job, "this backend moves all of a process; leave tags and slot out")
