"""Typed calls of the Lua verbs. A call is a value: a driver sends it, ``parse`` reads the reply.

Times on the wire are milliseconds of the Redis server's clock. ``floor`` is the highest number (grant, swap or
epoch) that the caller has ever seen for the group; it keeps tokens rising after the server lost data.
"""

from __future__ import annotations

from timeslice.locks.scripts.agent import (
    Exited,
    Observed,
    Pulse,
    Reported,
    accepted,
    ack,
    heartbeat,
    leave,
    report,
)
from timeslice.locks.scripts.base import (
    CALL_DEADLINE_S,
    Arg,
    Call,
    text,
)
from timeslice.locks.scripts.client import (
    Ended,
    Granted,
    Lost,
    NotHolder,
    Queued,
    Renewed,
    Request,
    Yielded,
    acquire,
    cancel,
    register,
    renew,
    yield_,
)
from timeslice.locks.scripts.coordinator import (
    Mine,
    Open,
    OwnedBy,
    Planned,
    Promoted,
    disown,
    own,
    plan,
    poke,
    promote,
    settle,
    step,
)
from timeslice.locks.scripts.operator import (
    configure,
    delete,
    pause,
)

__all__ = [
    "CALL_DEADLINE_S",
    "Arg",
    "Call",
    "Ended",
    "Exited",
    "Granted",
    "Lost",
    "Mine",
    "NotHolder",
    "Observed",
    "Open",
    "OwnedBy",
    "Planned",
    "Promoted",
    "Pulse",
    "Queued",
    "Renewed",
    "Reported",
    "Request",
    "Yielded",
    "accepted",
    "ack",
    "acquire",
    "cancel",
    "configure",
    "delete",
    "disown",
    "heartbeat",
    "leave",
    "own",
    "pause",
    "plan",
    "poke",
    "promote",
    "register",
    "renew",
    "report",
    "settle",
    "step",
    "text",
    "yield_",
]
