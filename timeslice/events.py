"""What happened in a group, as its ``events`` stream tells it: frozen, in the past tense, versioned.

The Lua scripts write the entries; `decode` reads them through one explicit table. What the table does not know,
an entry of a newer version or one that is not well formed, becomes an `UnknownEvent` that still carries its fields.
Times are milliseconds of the Redis server's clock; bytes are bytes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from timeslice.models import BODY_MAX, NUMBER_MAX, TEXT_MAX, Text

VERSION = "1"
_LATEST_MS = 10**14  # beyond it no calendar goes
_FIELDS_MOST = 64

Amount = Annotated[int, Field(ge=-NUMBER_MAX, le=NUMBER_MAX)]
Seconds = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
Plan = Annotated[str, Field(max_length=BODY_MAX)]


class Event(BaseModel):
    """Something that happened in ``group``; ``id`` is its place in the stream."""

    # A field that a newer script adds is no reason to lose the event.
    model_config = ConfigDict(frozen=True, extra="ignore")

    id: Text
    group: Text
    at_ms: int = Field(ge=0, le=_LATEST_MS)

    @property
    def name(self) -> str:
        """What stands as its type in the stream."""
        return type(self).__name__

    def details(self) -> dict[str, Any]:
        """The fields that only this kind of event has."""
        return self.model_dump(exclude=set(Event.model_fields))


class UnknownEvent(Event):
    """An entry that this version can't read."""

    type: Text
    fields: dict[Text, Text] = Field(max_length=_FIELDS_MOST)

    @property
    def name(self) -> str:
        return self.type


class WaiterQueued(Event):
    """A request had to wait."""

    job: Text
    waiter: Text
    priority: Amount = 0
    label: Text = ""


class WaiterCancelled(Event):
    """A request was withdrawn, by its client or an operator; a grant under way was passed on."""

    job: Text
    waiter: Text
    by: Text = ""


class WaiterReaped(Event):
    """A request gave no sign of life for its whole time to live; or a rank of a gang did so, or gave up."""

    job: Text
    waiter: Text
    reason: Text = ""  # which rank, and what became of it


class GangForming(Event):
    """A rank of a gang arrived, and others have not. Told of the first and the last few of a large gang."""

    job: Text
    waiter: Text
    rank: Amount
    arrived: Amount
    world: Amount
    missing: Text = ""


class LeaseGranted(Event):
    """A waiter became the holder."""

    job: Text
    waiter: Text
    token: Amount
    how: Text = ""  # no-op, first load, restored
    host: Text = ""
    pid: Text = ""
    label: Text = ""
    waited_ms: Amount = 0
    swap_ms: Amount = 0


class _LeaseEnded(Event):
    job: Text
    waiter: Text
    token: Amount
    held_ms: Amount = 0
    label: Text = ""


class LeaseYielded(_LeaseEnded):
    """The holder gave the group up, or an operator did so for it."""

    by: Text = ""  # that operator


class LeaseReclaimed(_LeaseEnded):
    """The holder went without a word."""

    why: Text = ""


class GrantExpired(_LeaseEnded):
    """A grant was never confirmed, so no body ran."""


class LeaseRevoked(_LeaseEnded):
    """An operator took the group away from its holder."""

    by: Text = ""
    reason: Text = ""


class _Phase(Event):
    job: Text
    phase: Text
    host: Text = ""
    pid: Text = ""


class PhaseBegan(_Phase):
    """A process of a job began a stretch of work off the device."""


class PhaseEnded(_Phase):
    """That stretch is over; ``seconds`` by the process's own clock."""

    seconds: Seconds = 0.0
    outcome: Text = ""  # ok, or the name of the exception that ended it


class PhaseMeasured(Event):
    """A holder recorded what it moved in its hold, such as the weights of a sync."""

    job: Text
    token: Amount
    label: Text = ""
    bytes: Amount | None = None
    seconds: Seconds | None = None


class LeaseReinstalled(Event):
    """After data loss a holder's renewal put its lease back."""

    job: Text
    waiter: Text
    token: Amount


class SwapStarted(Event):
    """State has to move before the next grant. Without a job it only brings out what ``evict`` names."""

    swap: Amount
    job: Text = ""
    waiter: Text = ""
    evict: Text = ""


class SwapPlanned(Event):
    """A coordinator stored what the swap will do (JSON of `timeslice.models.Plan`)."""

    swap: Amount
    plan: Plan = ""


class SwapFinished(Event):
    """What had to leave is out, what had to come is in."""

    swap: Amount
    job: Text = ""
    how: Text = ""  # as of a grant, or out: nobody was to come in
    swap_ms: Amount = 0


class SwapDeferred(Event):
    """The swap was refused or undone; its waiter keeps its place and is tried again."""

    swap: Amount
    job: Text = ""
    waiter: Text = ""
    reason: Text = ""


class StepFailed(Event):
    """One node could not do its part of a swap."""

    node: Text
    swap: Amount
    kind: Text = ""  # of the fault
    error: Text = ""


class _JobMoved(Event):
    node: Text
    job: Text
    bytes: Amount = 0
    saved: Amount = 0  # not copied, since host memory had a valid copy already
    swap: Amount = 0


class JobSuspended(_JobMoved):
    """A job's device state, or the part of it that was to leave, is in host memory."""


class JobRestored(_JobMoved):
    """A job's device state is on the device."""


class JobGone(_JobMoved):
    """A job's processes on the node ended, and its device memory is free."""


class JobUnheld(Event):
    """A job uses the device without holding the group."""

    node: Text
    job: Text
    device_bytes: Amount = 0


class JobUnknown(Event):
    """Nobody can see whether a job that was granted is still on the node's devices."""

    node: Text
    job: Text
    reason: Text = ""


class NodeJoined(Event):
    """An agent serves the group from now on."""

    node: Text


class _OfNode(Event):
    node: Text
    by: Text = ""
    reason: Text = ""


class NodeLeft(_OfNode):
    """An agent left, or an operator forgot its node."""

    lost: Text = ""  # jobs whose state on it was given up


class NodeDrained(_OfNode):
    """An operator takes a node out of use for maintenance: nobody is granted meanwhile."""


class NodeUndrained(_OfNode):
    """The maintenance of a node is over."""


class EvictionOrdered(Event):
    """An operator orders a job's state off the device."""

    job: Text
    by: Text = ""
    reason: Text = ""
    force: Amount = 0  # 1: whether its workload answers or not


class _OfGroup(Event):
    by: Text = ""
    reason: Text = ""


class GroupRepaired(_OfGroup):
    """An operator had put right what needed no guess."""

    did: Text = ""


class OwnerChanged(Event):
    """Another coordinator drives the group's swaps."""

    owner: Text
    epoch: Amount = 0


class GroupPaused(_OfGroup):
    """No grants until the group is resumed."""


class GroupResumed(_OfGroup):
    """Grants go on."""


class GroupConfigured(Event):
    """The group was created or its settings changed."""

    mode: Text = ""


class GroupBlocked(Event):
    """Nobody can be granted until the reason is gone."""

    reason: Text = ""


class ClockStepped(Event):
    """The server's clock went back: every deadline got its full term again."""

    from_ms: Amount = 0


class TermsRenewed(Event):
    """For so long nobody could be heard that somebody's time ran out: the server was away, or its clock went ahead.
    Everybody got a full term again."""

    silent_ms: Amount = 0


class StateLost(Event):
    """The server knew less than a caller: no grants for one lease while everybody comes back."""

    floor: Amount = 0


KINDS: Mapping[str, type[Event]] = {
    "WaiterQueued": WaiterQueued,
    "WaiterCancelled": WaiterCancelled,
    "WaiterReaped": WaiterReaped,
    "GangForming": GangForming,
    "LeaseGranted": LeaseGranted,
    "LeaseYielded": LeaseYielded,
    "LeaseReclaimed": LeaseReclaimed,
    "GrantExpired": GrantExpired,
    "LeaseRevoked": LeaseRevoked,
    "PhaseBegan": PhaseBegan,
    "PhaseEnded": PhaseEnded,
    "PhaseMeasured": PhaseMeasured,
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
    "JobUnknown": JobUnknown,
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
    "TermsRenewed": TermsRenewed,
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
    at_ms = min(int(stamp), _LATEST_MS) if re.fullmatch(r"[0-9]{1,20}", stamp) else 0
    shown = {name[:TEXT_MAX]: value[:TEXT_MAX] for name, value in list(fields.items())[:_FIELDS_MOST]}
    return UnknownEvent(id=entry_id, group=group, at_ms=at_ms, type=kind[:TEXT_MAX], fields=shown)
