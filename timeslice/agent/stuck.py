"""A job that must leave the device and can't be moved: no backend of this node works from outside, and its workload is
stopped, hangs, or never lets go.

By default that is told, with the processes and the remedies, and the group waits. Where the group's setting
``on_stuck`` is ``kill``, the job's processes here are ended instead; the next try finds it gone, which is said only
after its device memory was measured free.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Sequence

from timeslice import metrics
from timeslice.agent import procfs
from timeslice.agent.calling import Deadline
from timeslice.agent.choice import stands_in
from timeslice.agent.group import Scope
from timeslice.errors import BackendError, FaultKind, RedisUnreachableError
from timeslice.models import Target

log = logging.getLogger("timeslice.agent")

END_S = 5.0  # a process that is killed has ended by then, unless the kernel can't let it go
_PAUSE_S = 0.02
# A workload that refuses what it was asked is not stuck.
_SILENT = {FaultKind.TRANSIENT, FaultKind.BUSY, FaultKind.POISONED}


async def judge(scope: Scope, error: BackendError) -> BackendError:
    """What to tell of a step that failed: of a stuck job more, after what the group's setting says was done to it."""
    if not _is_stuck(scope, error):
        return error
    if scope.config.on_stuck == "kill":
        try:
            await scope.refresh()  # what was heard of the setting, and of who must leave, may be old
        except RedisUnreachableError as away:
            return _told(error, f"whether on_stuck still says to end its processes can't be asked: {away}")
        if not _is_stuck(scope, error):
            return error
    job = error.job or ""
    targets = scope.registry.alive(job)
    if job in scope.registry.adrift() or any(map(stands_in, targets)):
        return _told(error, f"its workload runs elsewhere, so nothing here can end it; end job {job} there")
    if scope.config.on_stuck != "kill":
        return _told(
            error,
            f"it must leave, and nothing of this node can move it from outside: {_describe(targets)}; or have such "
            f"jobs ended: timeslice group set {scope.name} --on-stuck kill",
        )
    try:
        scope.registry.verify(targets)
        return _told(error, await _end(scope, job, targets))
    except BackendError as changed:
        return changed


def _is_stuck(scope: Scope, error: BackendError) -> bool:
    """Whether the step failed for a job that must leave, lives here, and can't be moved from outside."""
    job = error.job or ""
    targets = scope.registry.alive(job)
    if job != scope.must_leave or not targets or scope.backends.by_force(targets):
        return False
    mute = not any(target.channel for target in targets) or not all(map(procfs.runs, targets))
    return mute or error.kind in _SILENT


async def _end(scope: Scope, job: str, targets: Sequence[Target]) -> str:
    """SIGKILL for exactly these processes, and what became of that."""
    log.error("group %s: job %s must leave and can't be moved; ending its processes %s, as on_stuck says",
              scope.name, job, _numbers(targets))  # fmt: skip
    held = [(target, fd) for target in targets if (fd := procfs.open_process(target.pid, target.start)) is not None]
    try:
        for target, fd in held:
            procfs.send_signal(fd, target.pid, target.start, signal.SIGKILL)
        metrics.STUCK_ENDED.labels(scope.name).inc(len(held))
        wait = Deadline(END_S)
        while left := [target for target, fd in held if not procfs.has_ended(fd, target.pid, target.start)]:
            if wait.left() <= 0:
                return (
                    f"its processes were killed, as on_stuck=kill says, and {_numbers(left)} did not end within "
                    f"{END_S:g} s; the kernel or the driver can't let go of them: see its log, or restart the node"
                )
            await asyncio.sleep(_PAUSE_S)
    finally:
        for _, fd in held:
            procfs.let_go(fd)
    return f"its processes {_numbers(targets)} were ended, as on_stuck=kill says; this is tried again without it"


def _told(error: BackendError, more: str) -> BackendError:
    return BackendError(f"{error}; {more}", kind=error.kind, group=error.group, job=error.job, node=error.node)


def _describe(targets: Sequence[Target]) -> str:
    stopped = [target for target in targets if not procfs.runs(target)]
    words = [f"process {each.pid} is stopped (kill -CONT {each.pid} lets it answer)" for each in stopped]
    return ", ".join([*words, f"or end its processes ({_numbers(targets)})"]).removeprefix("or ")


def _numbers(targets: Sequence[Target]) -> str:
    return ", ".join(str(target.pid) for target in targets)
