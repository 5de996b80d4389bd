"""Reading a group as one consistent picture. For people, coordinators and agents; never part of a decision that a
script should take."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from timeslice.errors import UsageError
from timeslice.locks.keys import GroupKeys
from timeslice.locks.scripts import Call, number, text
from timeslice.locks.scripts.base import in_words, make_call
from timeslice.models import GroupConfig
from timeslice.names import is_name

_LATEST_MS = 1e14  # beyond it no calendar goes
WORLD_MOST = 1024  # ranks of a gang, as the scripts take them
_RANKS_NAMED = 8


def name_ranks(ranks: Sequence[int]) -> str:
    """For people; of many the first."""
    more = f" and {len(ranks) - _RANKS_NAMED} more" if len(ranks) > _RANKS_NAMED else ""
    return f"rank{'' if len(ranks) == 1 else 's'} {', '.join(map(str, ranks[:_RANKS_NAMED]))}{more}"


@dataclass(frozen=True)
class PartyView:
    """One rank of a gang: ``arrived`` (it waits, or has not confirmed its grant), ``inside``, or ``left``."""

    rank: int
    host: str
    pid: str
    start: str
    state: str


@dataclass(frozen=True)
class WaiterView:
    """One queued request, in service order; or a gang that forms."""

    waiter: str
    job: str
    host: str
    pid: int
    priority: int
    label: str
    waited_s: float
    deferred: str  # why it is passed over now, or ""
    alive: bool
    world: int = 0  # ranks of the gang; 0: it is none
    parties: tuple[PartyView, ...] = ()  # those that arrived

    @property
    def missing(self) -> tuple[int, ...]:
        """Ranks of the gang that have not arrived."""
        there = {party.rank for party in self.parties}
        return tuple(rank for rank in range(self.world) if rank not in there)

    @property
    def forms(self) -> str:
        """How far a gang is that forms, for people."""
        have = "has" if len(self.missing) == 1 else "have"
        return f"gang {len(self.parties)}/{self.world}, {name_ranks(self.missing)} {have} not arrived"


@dataclass(frozen=True)
class MemberView:
    """What one node's agent last observed of one job."""

    node: str
    job: str
    state: str
    host_bytes: int
    device_bytes: int
    backend: str
    unheld: bool  # on the device without a hold
    saved_bytes: int = 0  # what its last step did not have to copy
    why: str = ""  # of one that is unknown: why nobody can see whether it is there
    has_left: bool = False  # of one that is unknown: its state was not on the device when it was last seen


@dataclass(frozen=True)
class NodeView:
    """One node of the group, and how far it is with the current or last swap."""

    node: str
    alive: bool
    heartbeat_age_s: float  # negative: its deadline is still to come
    swap: int
    step: str  # begun prepare, prepared, begun commit, done, failed, begun rollback, rolled back
    kind: str
    error: str
    command: str = ""  # the id of the order that it began last


@dataclass(frozen=True)
class JobView:
    job: str
    residency: str
    host_bytes: int
    usage_s: float
    last_granted_s: float  # seconds ago
    token: int
    phase: str = ""  # what a process of it last said it does off the device
    phase_s: float = 0.0  # for how long
    needs_weights: bool = False  # its content was discarded, and no weight sync has brought it back yet
    out_at: int = 0  # the number at which an operator said that it is on no device
    has_said: bool = False  # in its last turn it had told agents of each process that held


@dataclass(frozen=True)
class GroupView:
    """One group at one moment of the server's clock."""

    name: str
    now_ms: int
    state: dict[str, str]
    queue: tuple[WaiterView, ...]
    jobs: dict[str, JobView]
    members: tuple[MemberView, ...]
    nodes: dict[str, NodeView]
    config: GroupConfig
    targets: dict[str, str] = field(default_factory=dict)
    forming: tuple[WaiterView, ...] = ()  # gangs whose ranks have not all arrived, by the time of their first
    parties: tuple[PartyView, ...] = ()  # ranks of the gang that holds

    def number(self, name: str) -> int:
        return number(self.state.get(name, ""))

    @property
    def exists(self) -> bool:
        """Somebody declared it, serves it, or waits for it."""
        return bool(self.mode or self.queue or self.forming)

    @property
    def waiting(self) -> int:
        """How many requests wait, gangs that form among them."""
        return len(self.queue) + len(self.forming)

    @property
    def mode(self) -> str:
        return self.state.get("mode", "")

    @property
    def phase(self) -> str:
        return self.state.get("phase") or "idle"

    @property
    def reason(self) -> str:
        """Why the group is in this phase, with times in words."""
        return in_words(self.state.get("reason", ""))

    @property
    def evict_reason(self) -> str:
        """Why what operators ordered off the device could not be moved when it was last tried, or ''."""
        return in_words(self.state.get("evict_reason", ""))

    @property
    def since_s(self) -> float:
        since = self.number("since_ms")
        return (self.now_ms - since) / 1000 if since else 0.0

    @property
    def holder(self) -> str:
        """The job that holds a lease whose time has not passed, or ''."""
        live = self.state.get("lease_id") and self.number("deadline_ms") >= self.now_ms
        return self.state.get("job", "") if live else ""

    @property
    def world(self) -> int:
        """How many ranks the gang has that holds; 0 if it is none."""
        return min(self.number("gang"), WORLD_MOST)

    @property
    def swap(self) -> int:
        return self.number("swap_id")

    @property
    def epoch(self) -> int:
        return self.number("owner_epoch")

    @property
    def counter(self) -> int:
        return self.number("counter")

    @property
    def resident(self) -> tuple[str, ...]:
        """Jobs that are or may be on the device."""
        out = {"", "absent", "gone", "suspended"}
        return tuple(sorted(job.job for job in self.jobs.values() if job.residency not in out))


def look(group: GroupKeys) -> Call[GroupView]:
    """Read the group in one moment. Unlike a MULTI, it is answered by a full server too."""
    return make_call("look", group, (0,), lambda reply: _parse(group, reply[1:]))


def _strings(flat: list[Any]) -> dict[str, str]:
    """A hash or scored set, which comes as a flat list."""
    return {text(key): text(value) for key, value in zip(flat[::2], flat[1::2], strict=True)}


def _nested(flat: list[Any], depth: int) -> dict[tuple[str, ...], dict[str, str]]:
    """Fields ``a/b/name`` grouped by their first ``depth`` parts."""
    found: dict[tuple[str, ...], dict[str, str]] = defaultdict(dict)
    for name, value in _strings(flat).items():
        parts = name.split("/", depth)
        if len(parts) == depth + 1:
            found[tuple(parts[:-1])][parts[-1]] = value
    return found


def _int(record: dict[str, str], name: str) -> int:
    return number(record.get(name, ""))


def _score(value: str) -> float:
    """A deadline as stored, within what a clock may show."""
    return min(max(float(value), 0.0), _LATEST_MS)


def parse_config(name: str, flat: dict[str, str]) -> GroupConfig:
    """Settings as stored. Raises UsageError naming the field that is wrong."""
    try:
        return GroupConfig.model_validate(flat)
    except ValidationError as error:
        first = error.errors()[0]
        where = ascii(".".join(str(part) for part in first["loc"]))[1:-1]
        raise UsageError(
            f"group {name}: setting {where:.100}: {first['msg']:.200} (got {first['input']!a:.100}); see: timeslice "
            "group set --help",
            group=name,
        ) from error


def _parse(keys: GroupKeys, reply: list[Any]) -> GroupView:
    stamp, state, queue, waiters, alive, jobs, members, nodes, config, targets = reply
    now = int(stamp[0]) * 1000 + int(stamp[1]) // 1000
    deadlines = {member: _score(score) for member, score in _strings(alive).items()}
    records = _nested(waiters, 1)
    observed = _nested(members, 2)
    fields = _strings(state)
    changed_ms = _int(fields, "changed_ms")
    queued = {text(w) for w in queue}
    forming = sorted(
        (gang for (gang,), record in records.items() if record.get("world") and gang not in queued),
        key=lambda gang: (_int(records[gang,], "enqueued_at_ms"), gang),
    )

    def waiter(name: str) -> WaiterView:
        return _waiter(name, records.get((name,), {}), deadlines, now, changed_ms)

    return GroupView(
        name=keys.name,
        now_ms=now,
        state=fields,
        queue=tuple(waiter(text(w)) for w in queue),
        forming=tuple(map(waiter, forming)),
        parties=_parties(records.get((fields.get("lease_id", ""),), {})) if fields.get("gang") else (),
        jobs={job: _job(job, record, now) for (job,), record in _nested(jobs, 1).items() if is_name(job)},
        members=tuple(
            _member(node, job, record)
            for (node, job), record in sorted(observed.items())
            if is_name(node) and is_name(job)  # "@" is none: the node's own part
        ),
        nodes={
            node: _node(node, _score(score), observed.get((node, "@"), {}), now)
            for node, score in _strings(nodes).items()
            if is_name(node)
        },
        config=parse_config(keys.name, _strings(config)),
        targets=_strings(targets),
    )


def _waiter(waiter: str, record: dict[str, str], deadlines: dict[str, float], now: int, changed_ms: int) -> WaiterView:
    enqueued = _int(record, "enqueued_at_ms")
    deferred = record.get("deferred", "")
    put_off = _int(record, "deferred_until_ms") > now and (
        deferred == "silent" or _int(record, "deferred_at_ms") >= changed_ms
    )
    return WaiterView(
        waiter=waiter,
        job=record.get("job", ""),
        host=record.get("host", ""),
        pid=_int(record, "pid"),
        priority=_int(record, "priority"),
        label=record.get("label", ""),
        waited_s=(now - enqueued) / 1000 if enqueued else 0.0,
        deferred=in_words(deferred) if put_off else "",
        alive=deadlines.get(waiter, 0) >= now,
        world=min(_int(record, "world"), WORLD_MOST),
        parties=_parties(record),
    )


def _parties(record: dict[str, str]) -> tuple[PartyView, ...]:
    """The ranks that a gang's record names, as `party/<rank>`; what is none is passed over."""
    found = []
    for name, value in record.items():
        label, _, rank = name.partition("/")
        words = value.split(" ")
        if label == "party" and rank.isascii() and rank.isdecimal() and len(words) == 5:
            _, host, pid, start, renewed = words
            state = {"-": "arrived", "left": "left"}.get(renewed, "inside")
            found.append(PartyView(number(rank), host, pid, start, state))
    return tuple(sorted(found, key=lambda party: party.rank))


def _job(job: str, record: dict[str, str], now: int) -> JobView:
    granted = _int(record, "last_granted_at_ms")
    return JobView(
        job=job,
        residency=record.get("residency", "absent"),
        host_bytes=_int(record, "bytes"),
        usage_s=_int(record, "usage_ms") / 1000,
        last_granted_s=(now - granted) / 1000 if granted else 0.0,
        token=_int(record, "token"),
        phase=record.get("phase", ""),
        phase_s=max(now - _int(record, "phase_since_ms"), 0) / 1000 if record.get("phase") else 0.0,
        needs_weights=record.get("needs_weights") == "1",
        out_at=_int(record, "out_at"),
        has_said=bool(_int(record, "said")) and _int(record, "said") == _int(record, "token"),
    )


def _member(node: str, job: str, record: dict[str, str]) -> MemberView:
    return MemberView(
        node=node,
        job=job,
        state=record.get("state", "absent"),
        host_bytes=_int(record, "bytes"),
        device_bytes=_int(record, "device_bytes"),
        backend=record.get("backend", ""),
        unheld=record.get("unheld") == "1",
        saved_bytes=_int(record, "saved"),
        why=record.get("why", ""),
        has_left=record.get("left") == "1",
    )


def _node(node: str, deadline: float, record: dict[str, str], now: int) -> NodeView:
    return NodeView(
        node=node,
        alive=deadline >= now,
        heartbeat_age_s=(now - deadline) / 1000,
        swap=_int(record, "swap"),
        step=record.get("step", ""),
        kind=record.get("kind", ""),
        error=record.get("error", ""),
        command=record.get("command", ""),
    )
