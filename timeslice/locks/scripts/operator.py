"""Verbs of an operator: pause, configure, delete; revoke, evict, repair; drain, forget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from timeslice.errors import GroupModeError, NotHolderError, RefusedError, UnknownGroupError, UnknownNodeError
from timeslice.locks.keys import GroupKeys
from timeslice.locks.scripts.base import Arg, Call, in_words, make_call, new_request_id, text


def pause(group: GroupKeys, pause: bool, by: str, reason: str = "", *, floor: int = 0) -> Call[str]:
    """Stop or resume granting. Returns the group's phase."""
    return make_call("pause", group, (floor, "1" if pause else "0", by, reason), lambda reply: text(reply[1]))


def configure(
    group: GroupKeys, settings: dict[str, str], *, mode: str = "", only_new: bool = False, floor: int = 0
) -> Call[str]:
    """Create a group or change its settings. Returns its mode."""

    def parse(reply: list[Any]) -> str:
        kind = text(reply[0])
        if kind == "exists":
            raise RefusedError(
                f"group {group.name} exists already ({text(reply[1])}); "
                f"change it with: timeslice group set {group.name}",
                group=group.name,
            )
        if kind == "mode":
            raise GroupModeError(
                f"group {group.name} is {text(reply[1])}; its mode can't be changed. Delete it first.",
                group=group.name,
            )
        return text(reply[1])

    args: list[Arg] = [floor, mode, new_request_id() if only_new else ""]
    for field, value in settings.items():
        args += [field, value]
    return make_call("configure", group, args, parse)


def delete(group: GroupKeys) -> Call[None]:
    """Remove a group that nobody uses."""

    def parse(reply: list[Any]) -> None:
        kind = text(reply[0])
        if kind == "unknown":
            raise UnknownGroupError(f"no group {group.name}; see: timeslice groups", group=group.name)
        if kind == "refused":
            raise RefusedError(f"group {group.name} is in use: {text(reply[1])}", group=group.name)

    return make_call("delete", group, (0, new_request_id()), parse)


@dataclass(frozen=True)
class Revoked:
    """The lease is over. ``quiet_ms`` from now nobody is granted: the old holder of a lock-only group may still run."""

    served: bool
    quiet_ms: int


def revoke(
    group: GroupKeys,
    job: str,
    lease_id: str,
    token: int,
    by: str,
    reason: str,
    *,
    at_once: bool = False,
    floor: int = 0,
) -> Call[Revoked]:
    """Take the group away from the holder of this lease. NotHolderError when the lease ended in another way."""

    def parse(reply: list[Any]) -> Revoked:
        if text(reply[0]) == "not_holder":
            holder = text(reply[1])
            who = f"job {holder} holds it now (token {int(reply[2])})" if holder else "nobody holds it now"
            raise NotHolderError(
                f"group {group.name}: the lease of job {job} (token {token}) ended before it could be revoked; {who}. "
                f"See: timeslice status {group.name}",
                group=group.name,
                job=job,
                token=token,
            )
        return Revoked(text(reply[1]) == "served", int(reply[2]))

    return make_call("revoke", group, (floor, lease_id, token, by, reason, "1" if at_once else "0"), parse)


def evict(group: GroupKeys, job: str, by: str, reason: str, *, force: bool = False, floor: int = 0) -> Call[bool]:
    """Order a job's state off the device. False: there is none on it. RefusedError says why not now."""

    def parse(reply: list[Any]) -> bool:
        kind = text(reply[0])
        if kind == "refused":
            raise RefusedError(
                f"group {group.name}: job {job} is not evicted now: {in_words(reply[1])}", group=group.name, job=job
            )
        return kind == "ok"

    return make_call("evict", group, (floor, job, by, reason, "1" if force else "0"), parse)


def repair(
    group: GroupKeys, by: str, reason: str, *, out: Sequence[str] = (), dry: bool = False, floor: int = 0
) -> Call[tuple[str, ...]]:
    """Put right what needs no guess. What was done, or (``dry``) would be, a line each.

    ``out`` names jobs that nobody can see and that, by the operator's word, are on no device. RefusedError for one that
    is known to be somewhere.
    """

    def parse(reply: list[Any]) -> tuple[str, ...]:
        if text(reply[0]) == "refused":
            raise RefusedError(f"group {group.name} is not repaired: {text(reply[1])}", group=group.name)
        return tuple(text(line) for line in reply[1:])

    return make_call("repair", group, (floor, by, reason, "1" if dry else "0", *out), parse)


def drain(group: GroupKeys, node: str, drain: bool, by: str, reason: str, *, floor: int = 0) -> Call[bool]:
    """Let nobody in while ``node`` is drained, or end that. False: it was so already."""

    def parse(reply: list[Any]) -> bool:
        if text(reply[0]) == "unknown":
            raise UnknownNodeError(
                f"node {node} does not serve group {group.name}; see: timeslice nodes", group=group.name, node=node
            )
        return bool(reply[1])

    return make_call("drain", group, (floor, node, "1" if drain else "0", by, reason), parse)


def forget(
    group: GroupKeys, node: str, by: str, reason: str, *, lose: Sequence[str] = (), floor: int = 0
) -> Call[None]:
    """Take a node out of the group for good; ``lose`` names the jobs whose state on it is given up.

    RefusedError while its agent lives, and for state on it that was not given up.
    """

    def parse(reply: list[Any]) -> None:
        kind = text(reply[0])
        if kind == "alive":
            raise RefusedError(
                f"the agent of node {node} is alive and serves {group.name}. For maintenance: timeslice node drain "
                f"{node}. Stopping its agent does not take the node out: stop it and repeat this when "
                "`timeslice nodes` calls it unreachable, or start it with --leave and stop it",
                group=group.name,
                node=node,
            )
        if kind == "state":
            jobs = sorted(text(job) for job in reply[1:])
            options = " ".join(f"--lose {job}" for job in jobs)
            raise RefusedError(
                f"group {group.name}: node {node} has device state of job {', '.join(jobs)}, which would be lost. "
                f"Start its agent again; or, if the machine is gone for good, add: {options}",
                group=group.name,
                node=node,
            )

    return make_call("forget", group, (floor, node, by, reason, *lose), parse)
