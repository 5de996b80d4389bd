"""Who this process is, to agents: node, pid and start time together, never a pid alone."""

from __future__ import annotations

import logging
import os
import secrets
import sys
from functools import cache
from pathlib import Path

from timeslice.locks import scripts
from timeslice.locks.keys import GroupKeys
from timeslice.locks.scripts import Call
from timeslice.models import Target

log = logging.getLogger("timeslice")

# What a workload declared about this process, by (group, job): its registration is repeated as it stands, so that
# a client which registers the process again does not wipe out the channel.
declared: dict[tuple[str, str], Target] = {}

_memberships: dict[tuple[str, str], int] = {}  # (group, job) -> descriptor


def new_waiter_id() -> str:
    """Identity of one request, made before anything is sent. From the system's randomness, so forks differ."""
    return secrets.token_hex(10)


@cache
def process_start(pid: int) -> int:
    """When the process started, in clock ticks since boot; 0 where the system has no /proc."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    return int(stat.rpartition(")")[2].split()[19])  # field 22; the name in brackets may hold anything


def _pid_namespace() -> str:
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""


def process_id(host: str) -> str:
    """Name of this process in channel keys: ``<node>.<pid>.<start>``."""
    pid = os.getpid()
    return f"{host}.{pid}.{process_start(pid)}"


def show_membership(group: str, job: str) -> None:
    """Hold an empty memory file that is named after group and job, for node agents to see in /proc/PID/fd.

    What stands in Redis anybody may have written; this only the process itself can show, and its forks. An agent acts
    on no process that shows nothing, and for no group that it does not name.
    """
    if sys.platform != "linux":
        return
    name = f"timeslice:{group}/{job}"
    try:
        if str(Path(f"/proc/self/fd/{_memberships[group, job]}").readlink()) == f"/memfd:{name} (deleted)":
            return
    except (KeyError, OSError):  # not made yet, or closed by a process that closes all it inherited
        pass
    try:
        _memberships[group, job] = os.memfd_create(name)
    except OSError as error:
        log.warning(
            "group %s: this process can't show that it is job %s's (%s); unless it was started with TIMESLICE_JOB=%s "
            "and TIMESLICE_GROUPS=%s, no agent will move its state",
            *(group, job, error.strerror, job, group),
        )


def this_target(group: str, job: str, host: str) -> Target:
    """This process as a target of its node's agent: as a workload declared it, else as it is."""
    pid = os.getpid()
    show_membership(group, job)
    known = declared.get((group, job))
    if known and (known.pid, known.host) == (pid, host):
        return known
    return Target(
        job=job, host=host, pid=pid, start=process_start(pid), uid=os.getuid(), pid_namespace=_pid_namespace()
    )


def registration(keys: GroupKeys, job: str, host: str, floor: int) -> Call[bool]:
    """The call that makes this process known to its node's agent."""
    target = this_target(keys.name, job, host)
    return scripts.register(keys, job, host, target.pid, target.model_dump_json(), floor=floor)
