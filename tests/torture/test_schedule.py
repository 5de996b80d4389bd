"""The schedule of a torture run."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from timeslice.errors import UsageError
from timeslice.torture.schedule import KINDS, LOSS_GAP_S, LOSSES, schedule
from timeslice.torture.stage import TOPOLOGIES, Topology


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_same_seed_same_schedule(topology: Topology) -> None:
    """A seed fixes the schedule; another seed gives another one."""
    first = schedule(7, 120, topology)
    assert first == schedule(7, 120, topology)
    assert first != schedule(8, 120, topology)


def test_ten_minutes_are_more_than_two_hundred_faults() -> None:
    """Runs of 600 s do more than 200 faults each, in order and before the end."""
    for planned in [schedule(seed, 600, "standalone") for seed in range(5)]:
        assert len(planned) > 200
        assert all(0 <= fault.at_s < 600 for fault in planned)
        assert [fault.at_s for fault in planned] == sorted(fault.at_s for fault in planned)
        assert [fault.id for fault in planned] == list(range(1, len(planned) + 1))


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_a_run_has_every_kind(topology: Topology) -> None:
    """Whatever the seed, five minutes have each kind that the topology allows, and ten have it twice; what is done to
    the start comes once, and first."""
    for seed in range(20):
        for seconds, least in ((300, 1), (600, 2)):
            kinds = Counter(fault.kind for fault in schedule(seed, seconds, topology))
            assert set(kinds) == {name for name, kind in KINDS.items() if topology in kind.where}
            once = {name for name, kind in KINDS.items() if kind.victim == "start"}
            assert all(count == 1 if name in once else count >= least for name, count in kinds.items()), kinds
        assert schedule(seed, 300, topology)[0].kind in once


def test_one_fault_of_the_server_at_a_time() -> None:
    """Faults of the one server never overlap: they would undo each other."""
    planned = [fault for fault in schedule(3, 600, "standalone") if KINDS[fault.kind].victim == "server"]
    assert all(first.at_s + first.lasts_s <= then.at_s for first, then in itertools.pairwise(planned))


def test_data_is_lost_now_and_then() -> None:
    """Between two losses of data, which stop all grants for half a minute, the other faults meet traffic."""
    times = [fault.at_s for fault in schedule(2, 600, "standalone") if fault.kind in LOSSES]
    assert len(times) >= 3
    assert all(then - first > LOSS_GAP_S for first, then in itertools.pairwise(times))


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
