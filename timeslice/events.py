"""What happened in a group, as its ``events`` stream tells it: frozen, in the past tense, versioned.

The Lua scripts write the entries; `decode` reads them through one explicit table. What the table does not know,
an entry of a newer version or one that is not well formed, becomes an `UnknownEvent` that still carries its fields.
Times are milliseconds of the Redis server's clock; bytes are bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

VERSION = "1"


class Event(BaseModel):
    """Something that happened in ``group``; ``id`` is its place in the stream."""

    # A field that a newer script adds is no reason to lose the event.
    model_config = ConfigDict(frozen=True, extra="ignore")

    id: str
    group: str
    at_ms: int

    @property
    def name(self) -> str:
        """What stands as its type in the stream."""
        return type(self).__name__

    def details(self) -> dict[str, Any]:
        """The fields that only this kind of event has."""
        return self.model_dump(exclude=set(Event.model_fields))


class UnknownEvent(Event):
    """An entry that this version can't read."""

    type: str
    fields: dict[str, str]

    @property
    def name(self) -> str:
        return self.type


class WaiterQueued(Event):
    """A request had to wait."""

    job: str
    waiter: str
    priority: int = 0
    label: str = ""


class WaiterCancelled(Event):
    """A request was withdrawn, by its client or an operator; a grant under way was passed on."""

    job: str
    waiter: str
    by: str = ""


class WaiterReaped(Event):
    """A request gave no sign of life for its whole time to live."""

    job: str
    waiter: str


class LeaseGranted(Event):
    """A waiter became the holder."""

    job: str
    waiter: str
    token: int
    how: str = ""  # no-op, first load, restored
    host: str = ""
    pid: str = ""
    label: str = ""
    waited_ms: int = 0
    swap_ms: int = 0


class _LeaseEnded(Event):
    job: str
    waiter: str
    token: int
    held_ms: int = 0
    label: str = ""


class LeaseYielded(_LeaseEnded):
    """The holder gave the group up, or an operator did so for it."""


class LeaseReclaimed(_LeaseEnded):
    """The holder went without a word."""

    why: str = ""


class GrantExpired(_LeaseEnded):
    """A grant was never confirmed, so no body ran."""


class LeaseRevoked(_LeaseEnded):
    """An operator took the group away from its holder."""

    by: str = ""
    reason: str = ""


class LeaseReinstalled(Event):
    """After data loss a holder's renewal put its lease back."""

    job: str
    waiter: str
    token: int


class SwapStarted(Event):
    """State has to move before the next grant. Without a job it only brings out what ``evict`` names."""

    swap: int
    job: str = ""
    waiter: str = ""
    evict: str = ""


class SwapPlanned(Event):
    """A coordinator stored what the swap will do (JSON of `timeslice.models.Plan`)."""

    swap: int
    plan: str = ""


class SwapFinished(Event):
    """What had to leave is out, what had to come is in."""

    swap: int
    job: str = ""
    how: str = ""
    swap_ms: int = 0


class SwapDeferred(Event):
    """The swap was refused or undone; its waiter keeps its place and is tried again."""

    swap: int
    job: str = ""
    waiter: str = ""
    reason: str = ""


class StepFailed(Event):
    """One node could not do its part of a swap."""

    node: str
    swap: int
    kind: str = ""  # of the fault
    error: str = ""


class _JobMoved(Event):
    node: str
    job: str
    bytes: int = 0
    swap: int = 0


class JobSuspended(_JobMoved):
    """A job's device state is in host memory."""


class JobRestored(_JobMoved):
    """A job's device state is on the device."""


class JobGone(_JobMoved):
    """A job's processes on the node ended, and its device memory is free."""


class JobUnheld(Event):
    """A job uses the device without holding the group."""

    node: str
    job: str
    device_bytes: int = 0


class NodeJoined(Event):
    """An agent serves the group from now on."""

    node: str


class NodeLeft(Event):
    """An agent left, or an operator forgot its node."""

    node: str
    by: str = ""
    reason: str = ""
    lost: str = ""  # jobs whose state on it was given up


class NodeDrained(Event):
    """An operator takes a node out of use for maintenance: nobody is granted meanwhile."""

    node: str
    by: str = ""
    reason: str = ""


class NodeUndrained(Event):
    """The maintenance of a node is over."""

    node: str
    by: str = ""
    reason: str = ""


class EvictionOrdered(Event):
    """An operator orders a job's state off the device."""

    job: str
    by: str = ""
    reason: str = ""
    force: int = 0  # 1: whether its workload answers or not


class GroupRepaired(Event):
    """An operator had put right what needed no guess."""

    by: str = ""
    reason: str = ""
    did: str = ""


class OwnerChanged(Event):
    """Another coordinator drives the group's swaps."""

    owner: str
    epoch: int = 0


class GroupPaused(Event):
    """No grants until the group is resumed."""

    by: str = ""


class GroupResumed(Event):
    """Grants go on."""

    by: str = ""


class GroupConfigured(Event):
    """The group was created or its settings changed."""

    mode: str = ""


class GroupBlocked(Event):
    """Nobody can be granted until the reason is gone."""

    reason: str = ""


class ClockStepped(Event):
    """The server's clock jumped or the server was away: every deadline got its full term again."""

    from_ms: int = 0


class StateLost(Event):
    """The server knew less than a caller: no grants for one lease while everybody comes back."""

    floor: int = 0


KINDS: Mapping[str, type[Event]] = {
    "WaiterQueued": WaiterQueued,
    "WaiterCancelled": WaiterCancelled,
    "WaiterReaped": WaiterReaped,
    "LeaseGranted": LeaseGranted,
    "LeaseYielded": LeaseYielded,
    "LeaseReclaimed": LeaseReclaimed,
    "GrantExpired": GrantExpired,
    "LeaseRevoked": LeaseRevoked,
    "LeaseReinstalled": LeaseReinstalled,
    "SwapStarted": SwapStarted,
    "SwapPlanned": SwapPlanned,
    "SwapFinished": SwapFinished,
    "SwapDeferred": SwapDeferred,
    "StepFailed": StepFailed,
    "JobSuspended": JobSuspended,
    "JobRestored": JobRestored,
    "JobGone": JobGone,
    "JobUnheld": JobUnheld,
    "NodeJoined": NodeJoined,
    "NodeLeft": NodeLeft,
    "NodeDrained": NodeDrained,
    "NodeUndrained": NodeUndrained,
    "EvictionOrdered": EvictionOrdered,
    "GroupRepaired": GroupRepaired,
    "OwnerChanged": OwnerChanged,
    "GroupPaused": GroupPaused,
    "GroupResumed": GroupResumed,
    "GroupConfigured": GroupConfigured,
    "GroupBlocked": GroupBlocked,
    "ClockStepped": ClockStepped,
    "StateLost": StateLost,
}


def decode(group: str, entry_id: str, fields: Mapping[str, str]) -> Event:
    """The event of one stream entry. Never raises for what the entry holds."""
    kind = fields.get("type", "")
    found = KINDS.get(kind) if fields.get("v") == VERSION else None
    if found is not None:
        try:
            return found.model_validate(dict(fields) | {"id": entry_id, "group": group})
        except ValidationError:
            pass  # shown as it stands, below
    stamp = entry_id.partition("-")[0]
    return UnknownEvent(
        id=entry_id, group=group, at_ms=int(stamp) if stamp.isdigit() else 0, type=kind, fields=dict(fields)
    )
