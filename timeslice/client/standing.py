"""How what the running code holds stands: looked at before a body runs, for a lease may be lost while its holder waits
for the next group, and while it waits, for it may be what it waits for."""

from __future__ import annotations

import logging
import math
import time
from typing import TYPE_CHECKING, Any

from timeslice.client import context
from timeslice.client.steps import Steps
from timeslice.errors import DeadlockError, LeaseLostError, LeaseUncertainError, TimeSliceError
from timeslice.locks.cycles import with_itself

if TYPE_CHECKING:
    from timeslice.client.core import BaseClient
    from timeslice.client.lease import BaseLease
    from timeslice.locks.keys import GroupKeys

log = logging.getLogger("timeslice")

_POLL_S = 0.05


def ask_all(client: BaseClient[Any, Any], leases: list[BaseLease]) -> Steps[None]:
    """Let the server say how those stand that it was last asked of before the newest of them was waited for."""
    since = last_wait(leases)
    for lease in leases:
        yield from _ask(client, lease, since)


def last_wait(leases: list[BaseLease]) -> float:
    """When the last wait for one of them ended. Who had no wait pays nothing: the server was asked a moment ago."""
    return max((lease.told_at for lease in leases if lease.waited), default=-math.inf)


def stands(client: BaseClient[Any, Any], lease: BaseLease, since: float, until: float) -> Steps[bool]:
    """Whether a lease that this code took still stands after a wait that ended at ``since``. While the server can't be
    asked past the lease, this waits for it; at ``until`` LeaseUncertainError."""
    yield from _ask(client, lease, since)
    while True:
        try:
            lease.ensure_held()
            return True
        except LeaseUncertainError:
            if time.monotonic() >= until:
                raise
            yield client._pause(_POLL_S)  # noqa: SLF001
        except LeaseLostError:
            return False


def _ask(client: BaseClient[Any, Any], lease: BaseLease, since: float) -> Steps[None]:
    """Let the server say whether the lease still stands, unless it did after the wait. While it does not answer, what
    is known here counts."""
    known = lease.at_point or lease.state != "held" or lease.told_at >= since
    if known or client.disabled or lease._client.url != client.url:  # noqa: SLF001
        return
    lease_id, sent = lease.lease_id, time.monotonic()
    try:
        reply: Any = yield client.driver.run(lease.renewal(), deadline_s=max(lease.expires_at - sent, 0.0))
    except TimeSliceError as error:
        log.info("group %s: the lease of job %s is not confirmed: %s", lease.group, lease.job, error)
    else:
        lease.note_renewal(reply, sent, lease_id)


def around(*more: BaseLease) -> list[BaseLease]:
    """The leases of the holds around this code, and ``more``, that stand now, as far as is known here."""
    leases = dict.fromkeys([*context.leases(), *more])
    return [lease for lease in leases if lease.state == "held" and not lease.inherited]


def own_wait(client: BaseClient[Any, Any], keys: GroupKeys, job: str) -> DeadlockError | None:
    """If the running code, which waits for the group, has it itself from a call before, and so can't yield it.

    Only for the same job: code that plays several, such as a server's, has others that yield.
    """
    takers = (client._taker(), context.here())  # noqa: SLF001
    for lease in (*context.leases(), *context.acquired()):
        own = lease.stands_on(client.url, keys) and any(lease.taken_by is taker for taker in takers)
        if own and lease.job == job:
            how = "a hold" if lease.holding else "acquire"
            return with_itself(keys.name, job, lease.job, lease.fencing_token, how=how)
    return None


def whose_child_waits(client: BaseClient[Any, Any], keys: GroupKeys) -> str:
    """What to add to why a wait goes on, if the code that started this task or thread has the group from ``acquire``.
    It may yield it at any time, so that this is no deadlock; if it waits for us, it is one."""
    for lease in context.acquired():
        if lease.stands_on(client.url, keys):
            return (
                f". The code that started this task or thread has it from acquire (token {lease.fencing_token}): if it "
                "waits for this here, neither goes on; yield the lease before, or take the group by `hold`, which "
                "child tasks share"
            )
    return ""


def ensure_around(client: BaseClient[Any, Any], leases: list[BaseLease], since: float) -> Steps[None]:
    """LeaseLostError if one of them was lost in a wait that ended at ``since``. One that was left is nobody's loss."""
    for lease in leases:
        yield from _ask(client, lease, since)
        if lease.state == "lost":
            lease.ensure_held()  # raises
