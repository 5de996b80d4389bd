"""Where a torture run plays: its groups, nodes, seats of job processes, sizes and terms."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from timeslice.models import GroupConfig

Topology = Literal["standalone", "cluster", "sentinel"]
TOPOLOGIES: tuple[Topology, ...] = ("standalone", "cluster", "sentinel")

SERVED = {"trainers": ("n1", "n2"), "samplers": ("n2", "n3")}  # group -> nodes whose devices it has
LOCK_GROUP = "ledger"
GROUPS = (*SERVED, LOCK_GROUP)
NODES = ("n1", "n2", "n3")
COORDINATORS = ("c1", "c2", "c3")

JOB_BYTES = 4 << 20  # of a job on one device
DEVICE_BYTES = 6 << 20  # two jobs do not fit, and the kernel sees to it
ROOM = {"samplers": 5 * JOB_BYTES}  # here they would: only the product keeps them apart, and the judge looks
NODE_TTL_S = 4.0  # of a silent agent
OWNER_LEASE_MS = 4_000  # of a coordinator's groups
LEASES_S = (3.0, 5.0)
CONFIG = GroupConfig(prepare_timeout_ms=3_000, suspend_timeout_ms=6_000, restore_timeout_ms=6_000, host_reserve_bytes=0)


def served_by(node: str) -> tuple[str, ...]:
    """Groups that have a device on ``node``."""
    return tuple(group for group, nodes in SERVED.items() if node in nodes)


@dataclass(frozen=True)
class Seat:
    """A place for one job process after another. Seats of one ``pair`` run processes of one job, and with ``rank`` they
    hold together, as a gang."""

    node: str
    asynchronous: bool
    proxied: bool
    pair: int
    rank: int | None = None


# The first two are one job with processes on two nodes.
_SEATS = (
    Seat("n1", asynchronous=False, proxied=False, pair=0),
    Seat("n2", asynchronous=False, proxied=True, pair=0),
    Seat("n2", asynchronous=True, proxied=False, pair=1),
    Seat("n3", asynchronous=False, proxied=True, pair=2),
    Seat("n1", asynchronous=True, proxied=True, pair=3),
    Seat("n3", asynchronous=True, proxied=False, pair=4),
)


GANG_RANKS, GANG_GROUP = 2, "trainers"  # which has a device on the nodes of both


def seats(count: int) -> tuple[Seat, ...]:
    """The first ``count`` places; more than there are repeat them as further jobs, whose first two are a gang."""
    found = []
    for index in range(count):
        turn, place = divmod(index, len(_SEATS))
        seat = _SEATS[place]
        of_gang = turn % 2 == 1 and place < GANG_RANKS and index - place + GANG_RANKS <= count
        pair = seat.pair + turn * (1 + max(each.pair for each in _SEATS))
        found.append(replace(seat, pair=pair, rank=place if of_gang else None))
    return tuple(found)
