"""Jobs that end at the worst moments, and start again under their old names, on a real device."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.kinds.devices import MIB, Devices, comes_back, ended, inside, leaves, tell
from tests.support.jobs import wait_until
from timeslice.torture.growth_parts import Chain, Spec

pytestmark = pytest.mark.slow

MOVES = {"suspended": "checkpoint", "restored": "restore"}


def _nothing_left(devices: Devices, *jobs: str) -> None:
    """The group knows nothing of these jobs, and nothing of them is on the device."""

    def gone() -> bool:
        view = devices.view()
        known = {*view.jobs, *(member.job for member in view.members), *(name.split("/")[0] for name in view.targets)}
        return known.isdisjoint(jobs)

    wait_until(gone, f"{jobs} are forgotten")
    assert "faulted" not in {job.residency for job in devices.view().jobs.values()}


def test_a_job_that_ends_while_it_is_suspended(devices: Devices) -> None:
    """F05: it is out, and nobody has to move it; nothing of it stays, neither bytes nor names."""
    devices.start("g")
    first = devices.enters("a")
    leaves(first)
    second = devices.enters("b")
    assert devices.residency("a") == "suspended"
    ended(first)
    _nothing_left(devices, "a")
    leaves(second)
    third = devices.enters("c")
    assert devices.residency("b") == "suspended"
    leaves(third)
    assert comes_back(second) == "restored"


@pytest.mark.parametrize("moved", MOVES)
def test_a_job_that_ends_in_the_middle_of_its_move(devices: Devices, moved: str) -> None:
    """F02: killed while its bytes are on the way out, or in: the next one in line gets in, and no fault is seen."""
    devices.start("g")
    first = devices.enters("a")
    leaves(first)
    second = devices.enters("b")
    if moved == "restored":
        tell(first, "hold")
        assert first.line() == "asks"
    third = devices.asks("c")
    devices.misbehave("g", f"{MOVES[moved]}:hang=3")
    leaves(second)
    wait_until(lambda: devices.view().nodes["n1"].step == "begun commit", "it is being moved")
    if moved == "restored":
        wait_until(lambda: devices.residency("b") == "suspended", "b is out, a comes in")
    ended(second if moved == "suspended" else first)
    devices.misbehave("g", "")
    assert inside(third) == "first load"
    _nothing_left(devices, "b" if moved == "suspended" else "a")
    assert not [event for event in devices.events() if event["type"] in {"StepFailed", "GroupBlocked"}]
    assert devices.device("g").used_bytes() < MIB


@pytest.mark.parametrize("state", ["holds", "resident", "suspended"])
def test_a_job_that_starts_again_under_its_name_at_once(devices: Devices, state: str) -> None:
    """F05: killed in whatever state, its next process is a new job: it gets in, with nothing of the old one's. (When
    its state is unknown: tests/agent/test_faults.py.)"""
    devices.start("g")
    old = devices.enters("a")
    if state != "holds":
        leaves(old)
    if state == "suspended":
        other = devices.enters("b")
        leaves(other)
    ended(old)
    new = devices.asks("a")
    assert inside(new) in {"first load", "no-op"}  # it may be granted before the agent tells of the old one's end
    leaves(new)
    assert comes_back(new) == "no-op"


def test_every_end_of_a_job_meets_a_suspend(devices: Devices, clean_environment: Path) -> None:
    """F02: forty jobs yield and exit, at once or up to a quarter of a second later, while the next one waits: it always
    gets in, there is no fault, and the device had room each time."""
    devices.start("g")
    chance = random.Random(2)
    chain = Chain(_spec(devices, clean_environment), "g")
    for _ in range(40):
        chain.turn(exits_after_s=chance.choice([0.0, 0.0, 0.01, chance.uniform(0.0, 0.25)]))
    chain.end()
    assert chain.done.swaps > 20
    _no_fault(devices)


def test_one_flake_in_so_many_locks_poisons_nobody(devices: Devices, clean_environment: Path) -> None:
    """F03: every second lock of a process fails: thirty swaps, all complete, nobody notices."""
    devices.start("g")
    devices.misbehave("g", "lock:1/2")
    chain = Chain(_spec(devices, clean_environment), "g")
    while chain.done.swaps < 30:
        chain.turn(comes_back=True)
    chain.end()
    _no_fault(devices)


def _spec(devices: Devices, runtime: Path) -> Spec:
    return Spec(url=devices.url, prefix=devices.keys.prefix, name="g", groups=("g",), homes={"n1": runtime})


def _no_fault(devices: Devices) -> None:
    bad = {"StepFailed", "SwapDeferred", "GroupBlocked", "LeaseReclaimed"}
    assert [event for event in devices.events() if event["type"] in bad] == []
