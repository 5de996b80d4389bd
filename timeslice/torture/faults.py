"""Does what the schedule says, and undoes it.

A deed is chosen first, so that the history can tell of it before it is done.
"""

from __future__ import annotations

import errno
import math
import os
import signal
import socket
import time
from collections.abc import Callable

import redis

from timeslice.errors import RedisUnreachableError
from timeslice.locks.keys import Keys
from timeslice.torture import absences, disguises
from timeslice.torture.backend import Knob, knob_file, met_file
from timeslice.torture.deeds import Deed, World, victim
from timeslice.torture.forms import FORMS
from timeslice.torture.processes import Role
from timeslice.torture.proxy import Proxy
from timeslice.torture.schedule import KINDS, Planned
from timeslice.torture.servers import Victim, is_stopped
from timeslice.torture.stage import GROUPS, LOCK_GROUP, NODES, SERVED, served_by

__all__ = ["Deed", "World", "choose", "groups_of"]

# What a reply is lost to, and what arrives twice: any script call has it.
_MARKER = "EVALSHA"
_ANSWER_S = 0.75  # longer than the longest delay, both ways


def choose(world: World, planned: Planned, now: float) -> Deed | None:
    """The deed that the fault means as things are; None when there is nothing that it could be done to."""
    kind = planned.kind
    if world.lacks(kind):
        return None
    try:
        match KINDS[kind].victim:
            case "job":
                return _to_process(world, planned, "job", now)
            case "agent":
                return _to_process(world, planned, "agent", now)
            case "coordinator":
                return _to_process(world, planned, "coordinator", now)
            case "server" if kind == "outage":
                agent = victim(world, planned, "agent")
                return absences.starting_alone(world, agent, now) if agent else None
            case "server":
                return _to_server(world, planned)
            case "lease":
                return absences.revoked(world, planned, now)
            case "link":
                return _to_link(world, planned)
            case "disk":
                return _to_disk(world, planned)
        return _to_backend(world, planned)
    except (RedisUnreachableError, redis.exceptions.RedisError, OSError):
        return None  # no server to be found for it now


def _to_process(world: World, planned: Planned, role: Role, now: float) -> Deed | None:
    child = victim(world, planned, role)
    if child is None:
        return None
    match planned.kind:
        case "trim":
            return absences.trimmed(world, planned, child, now)
        case "join":
            return absences.joining(world, planned, child, now)
        case "blind-agent":
            return disguises.blinded(world, child, now)
        case "files-job" | "files-agent":
            return disguises.without_files(world, child)
        case form if form in FORMS:
            return disguises.disguised(world, planned, child, now)
    label, groups, process = child.label, child.groups, child.process
    assert process is not None
    if planned.kind.startswith("kill"):
        again_at = now + planned.lasts_s

        def kill() -> None:
            world.processes.kill(child, again_at=again_at, fault=planned.id)

        def gone() -> bool:
            return process.poll() == -signal.SIGKILL

        return Deed(harm="kill", label=label, groups=groups, do=kill, took=gone, heal=None)

    def go_on() -> None:
        if child.label == label:
            world.processes.go_on(child)

    return Deed(
        harm="stop",
        label=label,
        groups=groups,
        do=lambda: world.processes.stop(child),
        took=lambda: is_stopped(child.pid),
        heal=go_on,
    )


def _to_server(world: World, planned: Planned) -> Deed | None:
    fleet, keys = world.fleet, Keys()
    key = keys.group(GROUPS[int(planned.pick * len(GROUPS))]).state
    name = fleet.holder_of(key)
    groups: tuple[str, ...] = ()
    if fleet.kind == "cluster":
        groups = tuple(each for each in GROUPS if fleet.holder_of(keys.group(each).state) == name)
    act = Victim(fleet, name, key).acts(planned, world.clock)[planned.kind]
    detail = f"{planned.kind} of {name}" + (", back" if act.harm == "clock" and planned.amount < 0 else "")
    return Deed(
        harm=act.harm, label=name, groups=groups, detail=detail, do=act.do, took=act.took, heal=act.heal, late=act.late
    )


def _to_link(world: World, planned: Planned) -> Deed | None:
    proxy = world.proxy
    if proxy is None:
        return None
    lost, repeated = proxy.lost_replies, proxy.repeated_requests
    deeds: dict[str, tuple[Callable[[], object], Callable[[], bool]]] = {
        "cut": (proxy.cut, lambda: _answer_s(proxy) is None),
        "stall": (proxy.stall, lambda: _answer_s(proxy) == math.inf),
        "delay": (lambda: proxy.delay(planned.amount), lambda: (_answer_s(proxy) or 0.0) >= planned.amount),
        "half-open": (proxy.half_open, lambda: _answer_s(proxy) == math.inf),
        "lose": (lambda: proxy.lose_reply_to(_MARKER), lambda: proxy.lost_replies > lost),
        "repeat": (lambda: proxy.repeat_request_to(_MARKER), lambda: proxy.repeated_requests > repeated),
    }
    do, took = deeds[planned.kind]
    return Deed(harm=planned.kind, do=do, took=took, heal=proxy.heal, late=planned.kind in {"lose", "repeat"})


def _answer_s(proxy: Proxy) -> float | None:
    """How long a server takes to answer through the proxy: inf for none in time, None for a closed connection."""
    began = time.monotonic()
    try:
        with socket.create_connection(("127.0.0.1", proxy.port), _ANSWER_S) as connection:
            connection.sendall(b"PING\r\n")
            return time.monotonic() - began if connection.recv(64) else None
    except TimeoutError:
        return math.inf
    except OSError:
        return None


def _to_disk(world: World, planned: Planned) -> Deed | None:
    node = NODES[int(planned.pick * len(NODES))]
    filler = world.disks[node] / "filler"

    def fill() -> None:
        while not full():
            pass

    def full() -> bool:
        file = os.open(filler, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC)
        try:
            os.write(file, b"\0" * 4096)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            return True
        finally:
            os.close(file)
        return False

    return Deed(
        harm="disk",
        label=_agent_label(world, node),
        groups=served_by(node),
        detail=f"full disk of node {node}",
        do=fill,
        took=full,
        heal=lambda: filler.unlink(missing_ok=True),
    )


def _to_backend(world: World, planned: Planned) -> Deed | None:
    places = [(node, group) for group, nodes in SERVED.items() for node in nodes]
    node, group = places[int(planned.pick * len(places))]
    file = knob_file(world.knobs, node, group)
    knob = Knob.model_validate({"id": planned.id, "harm": planned.kind, "seconds": planned.amount})
    agents = [child for child in world.processes.children if child.role == "agent" and child.node == node]

    def turn() -> None:
        for agent in agents:
            agent.doomed = planned.kind == "die"
        draft = file.with_suffix(".draft")
        draft.write_text(knob.model_dump_json())
        draft.replace(file)

    def heal() -> None:
        file.unlink(missing_ok=True)

    detail = f"backend of {group} on node {node}"
    label = _agent_label(world, node)

    def met() -> bool:
        return met_file(file).exists() and met_file(file).read_text() == str(planned.id)

    return Deed(harm=planned.kind, label=label, groups=(group,), detail=detail, do=turn, took=met, heal=heal, late=True)


def _agent_label(world: World, node: str) -> str:
    return next((each.label for each in world.processes.children if each.role == "agent" and each.node == node), "")


def groups_of(role: Role, node: str) -> tuple[str, ...]:
    """What such a process has to do with."""
    match role:
        case "job":
            return (*served_by(node), LOCK_GROUP)
        case "agent":
            return served_by(node)
    return tuple(SERVED)
