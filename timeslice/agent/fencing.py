"""The fence: the highest number (grant or swap) that a group was ever seen at. Orders below it are never carried out.

It lies on disk, because Redis may lose data and go on with old orders while the agent remembers newer grants.
The epoch of an owner is no part of it: the group's own script compares epochs, and they may restart below.
"""

from __future__ import annotations

from timeslice.agent.state import Ledger
from timeslice.errors import ServerUnsuitableError, StaleCommandError
from timeslice.locks.view import GroupView
from timeslice.models import Command

AHEAD_MS = 366 * 24 * 3_600_000  # as in locks/lua/include/group.lua


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


def check_server(ledger: Ledger, view: GroupView) -> None:
    """Raise ServerUnsuitableError for numbers that neither the server's clock nor this node explains: once on disk,
    one near the end of all numbers would stop tokens from rising for ever."""
    highest = max(view.counter, view.number("token"))
    if highest > max(view.now_ms, ledger.floor) + AHEAD_MS:
        raise ServerUnsuitableError(
            f"group {view.name}: it counts {highest}, more than a year ahead of the server's clock ({view.now_ms} ms "
            "since 1970); this node does not take that over, and does not serve the group. Set the clock if it is "
            f"wrong; else stop what uses the group and run: timeslice group delete {view.name}",
            group=view.name,
        )


def raised(ledger: Ledger, *, floor: int = 0, fence: int = 0) -> Ledger:
    """The ledger with what was seen now. ``fence``: a grant's token or a swap's number, never an epoch."""
    fence = max(ledger.fence, fence)
    return ledger.model_copy(update={"fence": fence, "floor": max(ledger.floor, floor, fence)})
