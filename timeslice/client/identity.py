"""Who this process is, to agents: node, pid and start time together, never a pid alone."""

from __future__ import annotations

import logging
import os
import secrets
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from timeslice.errors import UsageError
from timeslice.locks import scripts
from timeslice.locks.keys import GroupKeys
from timeslice.locks.scripts import Call
from timeslice.models import GroupName, Leave, Target, brief

log = logging.getLogger("timeslice")

# What a workload declared about this process, by (group, job): its registration is repeated as it stands, so that
# a client which registers the process again does not wipe out the channel.
declared: dict[tuple[str, str], Target] = {}

# Other processes whose state this one holds for, such as servers: by (pid of this one, group, job), and their own.
beside: dict[tuple[int, str, str], dict[int, Target]] = {}

LEAVE_VARIABLE = "TIMESLICE_LEAVE"  # JSON: by group, what the hold around this process said
_NOTHING = Leave()
_LEAVES = TypeAdapter(dict[GroupName, Leave])
_asked: dict[tuple[int, str, str], Leave] = {}  # (pid, group, job) -> what the newest hold of this process said
_told: dict[tuple[int, str, str, str, str], Leave] = {}  # the same as a server has it; with (url, prefix)

_homeless: set[tuple[str, str, str, str]] = (
    set()
)  # (prefix, group, job, host) of which was said that no agent serves it

_memberships: dict[tuple[str, str], int] = {}  # (group, job) -> descriptor


def new_waiter_id() -> str:
    """Identity of one request, made before anything is sent. From the system's randomness, so forks differ."""
    return secrets.token_hex(10)


@cache
def process_start(pid: int) -> int:
    """When the process started, in clock ticks since boot; 0 where the system has no /proc."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")  # names are cut within a character
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
    """This process as a target of its node's agent: as a workload declared it, else as it is; and what of it leaves as
    its newest hold said, else the hold that it was started in."""
    pid = os.getpid()
    show_membership(group, job)
    known = declared.get((group, job))
    if not known or (known.pid, known.host) != (pid, host):
        known = Target(
            job=job, host=host, pid=pid, start=process_start(pid), uid=os.getuid(), pid_namespace=_pid_namespace()
        )
    return as_asked(group, known)


def as_asked(group: str, target: Target) -> Target:
    """A process whose state is this one's to hold for, with what holds have said of it."""
    around = _inherited(os.environ.get(LEAVE_VARIABLE, "")).get(group, _NOTHING)
    asked = overlaid(around, asked_to_leave(group, target.job))
    return target if asked == _NOTHING else target.model_copy(update={"leave": overlaid(target.leave, asked)})


def registrations(keys: GroupKeys, job: str, host: str, floor: int) -> list[Call[bool]]:
    """The calls that make this process known to its node's agent, and those beside it."""
    others = list(beside.get((os.getpid(), keys.name, job), {}).values())
    targets = [this_target(keys.name, job, host), *(as_asked(keys.name, other) for other in others)]
    return [registration(keys, job, target.host, floor, target) for target in targets]


def overlaid(default: Leave, asked: Leave) -> Leave:
    """What ``asked`` says, and where it says nothing the default. A slot is one of the tags that it came with."""
    if not asked.tags:
        asked = asked.model_copy(update={"tags": default.tags, "slot": asked.slot or default.slot})
    return asked if asked.mode else asked.model_copy(update={"mode": default.mode})


@cache
def _inherited(text: str) -> Mapping[str, Leave]:
    try:
        return _LEAVES.validate_json(text) if text else {}
    except ValidationError as error:
        raise UsageError(f"{LEAVE_VARIABLE} can't be read: {brief(error)}; `timeslice hold` sets it") from None


def leaves_written(leaves: Mapping[str, Leave]) -> str:
    """For ``LEAVE_VARIABLE`` of processes that are started inside of a hold."""
    return _LEAVES.dump_json(dict(leaves), exclude_defaults=True).decode()


def ask_to_leave(url: str, keys: GroupKeys, job: str, leave: Leave) -> bool:
    """Note what a hold that begins said of this process's state; the next registration carries it. Whether the server
    has to be told, which most often knows it already; of a process that has never registered it can't."""
    pid = os.getpid()
    _asked[pid, keys.name, job] = leave
    return _told.get((pid, url, keys.prefix, keys.name, job)) != leave


def check_leave(group: str, job: str, leave: Leave) -> None:
    """UsageError where a hold asks of this process's workload, or of servers that it registered, what they did not
    register: else the agent would refuse it, and whoever waits for the group would pay for the mistake."""
    pid = os.getpid()
    mine = [target for target in (declared.get((group, job)),) if target and target.pid == pid and target.channel]
    for target in (*mine, *beside.get((pid, group, job), {}).values()):
        if why := target.unable(leave):
            what = "the workload of this process" if target in mine else f"the server of process {target.pid}"
            raise UsageError(f"group {group}, job {job}: {what} can't leave so: it {why}", group=group, job=job)


def asked_to_leave(group: str, job: str) -> Leave:
    """What a registration that is made now carries of that."""
    return _asked.get((os.getpid(), group, job), _NOTHING)


def told_to_leave(url: str, keys: GroupKeys, job: str, leave: Leave) -> None:
    """The server has it."""
    _told[os.getpid(), url, keys.prefix, keys.name, job] = leave


def registration(keys: GroupKeys, job: str, host: str, floor: int, target: Target | None = None) -> Call[bool]:
    """The call that makes this process known to its node's agent. Where its host is no node of the group, that is said
    aloud, once: whoever waits for the device could else be let in beside this process."""
    target = target or this_target(keys.name, job, host)
    call = scripts.register(keys, job, host, target.pid, target.model_dump_json(), floor=floor)

    place = (keys.prefix, keys.name, job, host)

    def parse(reply: list[Any]) -> bool:
        taken = call.parse(reply)
        if taken:
            _homeless.discard(place)
        elif place not in _homeless:
            _homeless.add(place)
            nodes = ", ".join(scripts.text(each) for each in reply[1:])
            log.warning(
                "group %s: process %d of job %s calls its host %s, and no agent serves a node of that name%s. If the "
                "process uses the group's devices, set TIMESLICE_NODE to the name of its node (timeslice nodes), above "
                "all in containers: else the agent may not find it, and another job would be let in beside it",
                *(keys.name, target.pid, job, host, f" (nodes of the group: {nodes})" if nodes else ""),
            )
        return taken

    return replace(call, parse=parse)
