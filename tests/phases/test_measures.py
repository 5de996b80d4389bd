"""`lease.record`: what a hold moved, as an event."""

from __future__ import annotations

from typing import Any

import pytest

import timeslice
from tests.cli.conftest import Cli
from tests.client.faces import Face
from tests.client.world import World
from tests.phases.tale import events, told
from timeslice import UsageError
from timeslice.events import PhaseMeasured


def test_a_weight_sync_over_both_groups_is_recorded(face: Face, world: World, cli: Cli) -> None:
    """Each group is told what was moved under its own token, with the name of the hold's phase."""
    leases = []

    def sync(both: Any) -> None:
        leases.extend(both)
        both[0].record(bytes=3 << 30, seconds=2.5)
        both[1].record(bytes=7)

    held = face.hold(face.client(job="a"), "trainers", "samplers", lock_only=True, phase="weight_sync", body=sync)
    held.result(20)
    (trainers,) = told(world, PhaseMeasured, 1, "trainers")
    (samplers,) = told(world, PhaseMeasured, 1, "samplers")
    assert (trainers.job, trainers.label, trainers.bytes, trainers.seconds) == ("a", "weight_sync", 3 << 30, 2.5)
    assert (samplers.bytes, samplers.seconds) == (7, None)
    assert [trainers.token, samplers.token] == [lease.fencing_token for lease in leases]
    told_to_people = cli("events", "trainers").stdout
    assert told_to_people.count("PhaseMeasured") == 1
    assert "label=weight_sync  bytes=3 GiB  seconds=2.5 s" in told_to_people


@pytest.mark.parametrize(
    "wrong",
    [{}, {"bytes": -1}, {"bytes": 1.5}, {"bytes": True}, {"bytes": 2**53}, {"seconds": -0.1}, {"seconds": float("nan")},
     {"seconds": float("inf")}, {"seconds": "1"}],
)  # fmt: skip
def test_what_is_no_amount_is_refused(world: World, wrong: dict[str, Any]) -> None:
    """Before anything is sent, with the name of the value."""
    with timeslice.hold("g", lock_only=True, job="a") as lease:
        with pytest.raises(UsageError, match=next(iter(wrong), "bytes")):
            lease.record(**wrong)
        lease.record(seconds=0)
    told(world, PhaseMeasured, 1)
    assert len(events(world, PhaseMeasured)) == 1


def test_disabled_it_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """With TIMESLICE_DISABLE=1 the values are checked, and nobody is told."""
    monkeypatch.setenv("TIMESLICE_DISABLE", "1")
    with timeslice.hold("g") as lease:
        lease.record(bytes=1)
        with pytest.raises(UsageError):
            lease.record(bytes=-1)
