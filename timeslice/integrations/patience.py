"""Whether a lease still stands, for loops that are not given up for a short outage of the server."""

from __future__ import annotations

import time

from timeslice.client.lease import BaseLease
from timeslice.errors import LeaseUncertainError

UNCERTAIN_S = 600.0  # so long may the server be away before the loop is given up
_ASK_S = 1.0


def ensure_held(lease: BaseLease) -> None:
    """Return while the lease stands. LeaseLostError when it is over. While the server can't be asked this waits for it,
    for as long as ten minutes; then LeaseUncertainError."""
    until = time.monotonic() + UNCERTAIN_S
    while True:
        try:
            lease.ensure_held()
            return
        except LeaseUncertainError:
            if time.monotonic() >= until:
                raise
            lease.lost.wait(_ASK_S)
