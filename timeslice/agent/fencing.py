"""The fence: the highest number (grant or swap) that a group was ever seen at. Orders below it are never carried out.

It lies on disk, because Redis may lose data and go on with old orders while the agent remembers newer grants.
The epoch of an owner is no part of it: the group's own script compares epochs, and they may restart below.
"""

from __future__ import annotations

from timeslice.agent.state import Ledger
from timeslice.errors import StaleCommandError
from timeslice.models import Command


def check(ledger: Ledger, command: Command) -> None:
    """Raise StaleCommandError, with the floor as its token, for an order older than the fence."""
    if command.swap < ledger.fence:
        raise StaleCommandError(
            f"group {command.group}: order {command.id} belongs to swap {command.swap}, but swap or grant "
            f"{ledger.fence} was seen already; nothing was touched",
            group=command.group,
            node=command.node,
            token=ledger.floor,
        )


def raised(ledger: Ledger, *, floor: int = 0, fence: int = 0) -> Ledger:
    """The ledger with what was seen now. ``fence``: a grant's token or a swap's number, never an epoch."""
    fence = max(ledger.fence, fence)
    return ledger.model_copy(update={"fence": fence, "floor": max(ledger.floor, floor, fence)})
