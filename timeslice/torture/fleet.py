"""Redis servers of one topology, for tests and torture runs: whole, or with any of them killed or stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from timeslice.errors import UsageError
from timeslice.torture.fleet_base import Fleet, FleetOptions, Tls
from timeslice.torture.fleet_cluster import ClusterFleet
from timeslice.torture.fleet_sentinel import SentinelFleet

__all__ = ["KINDS", "ClusterFleet", "Fleet", "FleetOptions", "SentinelFleet", "StandaloneFleet", "Tls", "make_fleet"]

KINDS = ("standalone", "cluster", "sentinel")


class StandaloneFleet(Fleet):
    """One server, ``redis``."""

    kind = "standalone"

    def __init__(self, options: FleetOptions) -> None:
        super().__init__(options)
        self._add("redis")

    @property
    def url(self) -> str:
        return self.options.url("", [self.ports["redis"]])

    def start(self) -> Self:
        self.start_one("redis")
        return self

    def holder_of(self, key: str) -> str:  # noqa: ARG002 - one server has all keys
        return "redis"


def make_fleet(
    kind: str,
    folder: Path,
    *,
    aof: bool = True,
    binary: str | None = None,
    password: str = "",
    tls: Tls | None = None,
) -> Fleet:
    """A fleet that is not started, with its files under ``folder``.

    ``aof``: what a server is killed with is there again when it is started. ``binary`` as for EmbeddedServer.
    ``tls`` needs a server that was built with it.
    """
    options = FleetOptions(folder, aof, binary, password, tls)
    match kind:
        case "standalone":
            return StandaloneFleet(options)
        case "cluster":
            return ClusterFleet(options)
        case "sentinel":
            return SentinelFleet(options)
    raise UsageError(f"{kind!r} is no topology: choose one of {', '.join(KINDS)}")
