"""A group is granted to one at a time, as the scripts themselves tell it."""

from __future__ import annotations

from collections.abc import Iterator

from timeslice.torture.checks.story import SECOND, Story, Terms, Violation
from timeslice.torture.history import Told

ENDS = frozenset({"LeaseYielded", "LeaseReclaimed", "LeaseRevoked", "GrantExpired", "WaiterCancelled"})


def granted_twice(story: Story, terms: Terms) -> Iterator[Violation]:
    """Nobody is granted before the end of the grant before is told.

    The event stream is the scripts' own order, and the same script that ends a lease tells it. Only where the server
    lost data, or was replaced by one that knows less, may the end be lost, too: what is told from then until a lease
    term later is not counted. A replacement may come a moment after the old one is back.
    """
    for group in story.groups:
        losses = [(loss.at, loss.until + terms.lease_s * SECOND) for loss in story.losses(group)]
        holder: Told | None = None
        for event in story.told[group]:
            lost = any(start <= event.at <= end for start, end in losses)
            forgotten = holder is not None and any(holder.at <= start <= event.at for start, _ in losses)
            if event.type == "StateLost" or lost or forgotten or _is_end(event, holder):
                holder = None
            if event.type not in {"LeaseGranted", "LeaseReinstalled"}:
                continue
            if holder is not None:
                yield Violation(
                    "granted",
                    event.at,
                    group,
                    f"{event.type} for job {event.fields.get('job')} (token {event.fields.get('token')}) although that "
                    f"of job {holder.fields.get('job')} (token {holder.fields.get('token')}) had not ended",
                )
            holder = None if lost else event


def _is_end(event: Told, holder: Told | None) -> bool:
    """Ends tell waiter and token; the end of a waiter that holds only the waiter."""
    return holder is not None and event.type in ENDS and event.fields.get("waiter") == holder.fields.get("waiter")
