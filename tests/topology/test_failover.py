"""A master is lost while jobs take turns: everything goes on by itself."""

from __future__ import annotations

import pytest

from tests.support.jobs import wait_until
from tests.topology.conftest import FleetFactory, SystemFactory
from tests.topology.system import System

pytestmark = pytest.mark.slow
KINDS = pytest.mark.parametrize("kind", ["cluster", "sentinel"])


def served(system: System, *groups: str) -> None:
    system.coordinate()
    system.serve("n1", *groups)


@KINDS
def test_jobs_take_turns(kind: str, fleet_factory: FleetFactory, system_factory: SystemFactory) -> None:
    """R03: groups on every shard, each with agent, coordinator and swaps."""
    system = system_factory(fleet_factory(kind))
    groups = ("trainers", "samplers", "a.b_c-9")
    served(system, *groups)
    for group in groups:
        first = system.enter(group, f"{group}-a")
        second = system.queue(group, f"{group}-b")
        system.leave(first)
        system.await_inside(second)
        system.leave(second)
        system.leave(system.enter(group, f"{group}-a"))
    system.judge()


@KINDS
@pytest.mark.timeout(240)
def test_the_master_dies_in_the_middle_of_a_swap(
    kind: str, fleet_factory: FleetFactory, system_factory: SystemFactory
) -> None:
    """R02: the swap is carried out, a waiter that blocks on the dead server gets its grant, a holder keeps its lease.

    The server comes back, as a replica, and harms nobody.
    """
    system = system_factory(fleet_factory(kind))
    neighbour = system.neighbour_of("trainers")
    served(system, "trainers", neighbour)
    first, holder = system.enter("trainers", "a"), system.enter(neighbour, "c")
    second, waiter = system.queue("trainers", "b"), system.queue(neighbour, "d")
    system.fake("trainers").knob("suspend", delay=1.0)
    system.let_go(first)
    wait_until(lambda: "suspend a" in system.fake("trainers").calls(), "the swap moves state")
    old = system.master_of("trainers")
    system.fleet.kill(old)
    system.await_inside(second)
    assert not holder.over.is_set()
    assert system.await_new_master("trainers", old)
    system.fleet.start_one(old)
    system.leave(second, holder)
    system.await_inside(waiter)
    system.leave(waiter, system.enter("trainers", "a"))
    system.judge()


@KINDS
@pytest.mark.timeout(240)
def test_a_stopped_master_is_replaced_and_wakes_as_a_replica(
    kind: str, fleet_factory: FleetFactory, system_factory: SystemFactory
) -> None:
    """Connections to it stay open all the time: they are given up, both when it hangs and when it answers again."""
    system = system_factory(fleet_factory(kind))
    served(system, "trainers")
    first = system.enter("trainers", "a")
    second = system.queue("trainers", "b")
    old = system.master_of("trainers")
    system.fleet.pause(old)
    system.await_new_master("trainers", old)
    system.leave(first)
    system.await_inside(second)
    system.fleet.go_on(old)
    third = system.queue("trainers", "a")
    system.leave(second)
    system.await_inside(third)
    system.leave(third)
    system.judge()
