"""The schedule of a torture run."""

from __future__ import annotations

import itertools

import pytest

from timeslice.errors import UsageError
from timeslice.torture.schedule import KINDS, schedule
from timeslice.torture.stage import TOPOLOGIES, Topology


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_same_seed_same_schedule(topology: Topology) -> None:
    """A seed fixes the schedule; another seed gives another one."""
    first = schedule(7, 120, topology)
    assert first == schedule(7, 120, topology)
    assert first != schedule(8, 120, topology)


@pytest.mark.parametrize("seed", range(5))
def test_ten_minutes_are_more_than_two_hundred_faults(seed: int) -> None:
    """A run of 600 s does more than 200 faults, of every kind that the topology allows, all before its end."""
    planned = schedule(seed, 600, "standalone")
    assert len(planned) > 200
    assert {fault.kind for fault in planned} == set(KINDS)
    assert all(0 < fault.at_s < 600 for fault in planned)
    assert [fault.at_s for fault in planned] == sorted(fault.at_s for fault in planned)


def test_one_fault_of_the_server_at_a_time() -> None:
    """Faults of the one server never overlap: they would undo each other."""
    planned = [fault for fault in schedule(3, 600, "standalone") if KINDS[fault.kind].victim == "server"]
    assert all(first.at_s + first.lasts_s <= then.at_s for first, then in itertools.pairwise(planned))


@pytest.mark.parametrize("topology", ["cluster", "sentinel"])
def test_only_what_the_topology_allows(topology: Topology) -> None:
    """Data is not thrown away where a replica would be asked next, and there is no proxy in front of many servers."""
    kinds = {fault.kind for fault in schedule(1, 600, topology)}
    assert {"kill-server", "stop-server", "kill-agent"} <= kinds
    assert not kinds & {"flush", "wipe", "cut", "clock"}


def test_narrowed() -> None:
    """Only the named kinds come; a name that is none is refused with those that are."""
    assert {fault.kind for fault in schedule(1, 60, "standalone", ["flush", "kill-job"])} == {"flush", "kill-job"}
    with pytest.raises(UsageError, match=r"no such kind of fault: boom; there are: kill-job, "):
        schedule(1, 60, "standalone", ["boom"])
    with pytest.raises(UsageError, match="none of flush can be done to a cluster server"):
        schedule(1, 60, "cluster", ["flush"])
