"""A group's slot is moved to another server of the cluster while it is in use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from redis.crc import key_slot

from tests.locks.conftest import cluster, face
from tests.locks.faces import Face
from tests.locks.lab import Lab
from tests.locks.test_drivers import blocked, in_thread
from tests.support.jobs import wait_until
from timeslice.locks import flows, scripts
from timeslice.locks.flows import Grant
from timeslice.torture.fleet import Fleet
from timeslice.torture.fleet_base import HOST

__all__ = ["cluster", "face"]  # fixtures
pytestmark = pytest.mark.slow


class Move:
    """The slot of a key, on its way from one server to the next."""

    def __init__(self, fleet: Fleet, key: str) -> None:
        self.slot, source = key_slot(key.encode()), fleet.holder_of(key)
        target = next(name for name in fleet.names() if name != source)
        self.port = fleet.ports[target]
        self.source: Any = fleet.client(source)
        self.target: Any = fleet.client(target)
        self.ids = [each.execute_command("CLUSTER MYID").decode() for each in self._both()]

    def _both(self) -> tuple[Any, ...]:
        return self.source, self.target

    def begin(self) -> None:
        self.target.execute_command("CLUSTER SETSLOT", self.slot, "IMPORTING", self.ids[0])
        self.source.execute_command("CLUSTER SETSLOT", self.slot, "MIGRATING", self.ids[1])

    def refused(self) -> bool:
        """Whether somebody was told to try again."""
        told: Any = self.source.info("errorstats")
        return "errorstat_TRYAGAIN" in told

    def end(self) -> None:
        keys = self.source.execute_command("CLUSTER GETKEYSINSLOT", self.slot, 1000)
        self.source.execute_command("MIGRATE", HOST, self.port, "", 0, 5000, "KEYS", *keys)
        for client in (self.target, self.source):
            client.execute_command("CLUSTER SETSLOT", self.slot, "NODE", self.ids[1])
            client.close()


def test_calls_and_waits_follow_the_slot(face: Callable[[str], Face], cluster: Fleet, prefix: str) -> None:
    """A yield that comes in between is tried again until all keys have arrived; the waiter is woken where they are."""
    lab = Lab(cluster.url, prefix)
    token = lab.grant("a1")
    waiter, holder = face(cluster.url), face(cluster.url)
    join = in_thread(lambda: waiter.drive(flows.acquire(lab.group, lab.request("b1"))))
    wait_until(lambda: blocked(lab) == 1, "b waits")
    move = Move(cluster, lab.group.state)
    move.source.config_resetstat()
    move.begin()
    yielded = in_thread(lambda: holder.run(scripts.yield_(lab.group, "a1", token)))
    wait_until(move.refused, "the yield meets the move")
    move.end()
    assert isinstance(yielded(), scripts.Yielded)
    grant = join()
    assert isinstance(grant, Grant)
    assert grant.token > token
    lab.redis.close()
