"""The whole system on a fleet: as in the tests of faults, but the way to the servers is straight."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.faults.stack import CONVERGE_S, Stack
from timeslice.errors import RedisUnreachableError
from timeslice.torture.fleet import Fleet


@dataclass(frozen=True)
class Straight:
    """Stands where others have a proxy."""

    url: str

    def heal(self) -> None:
        """Nothing was cut."""

    close = heal


class System(Stack):
    """Coordinator, agents and jobs reach the fleet by its URL."""

    def __init__(self, fleet: Fleet, folder: Path) -> None:
        server: Any = fleet  # what is needed of a server is its URL
        super().__init__(server, folder)
        self.fleet = fleet

    def proxy(self, party: str) -> Any:
        """None of the parties has a way of its own."""
        return self.proxies.setdefault(party, Straight(self.fleet.url))  # type: ignore[arg-type]

    def master_of(self, group: str) -> str:
        return self.fleet.holder_of(self.keys.group(group).state)

    def neighbour_of(self, group: str) -> str:
        """Another group that lives on the same server."""
        names = (f"samplers-{number}" for number in range(100))
        return next(name for name in names if self.master_of(name) == self.master_of(group))

    def await_new_master(self, group: str, old: str) -> str:
        """The server that took over."""
        until = time.monotonic() + CONVERGE_S
        while True:
            try:
                if (found := self.master_of(group)) != old:
                    return found
            except RedisUnreachableError:
                pass  # the election is under way
            assert time.monotonic() < until, f"nobody takes over from {old}"
            time.sleep(0.05)
