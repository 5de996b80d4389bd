"""Jobs that wait before anybody serves their group."""

from __future__ import annotations

from tests.kinds.devices import MIB, Devices, comes_back, inside, leaves
from tests.support.jobs import wait_until
from timeslice.arena.device import Device


def test_jobs_that_waited_before_the_agent_came_take_turns(devices: Devices) -> None:
    """The agent learns of each process before its body starts: who was let in first is moved out before the second."""
    Device.create(devices.path("g"), MIB)
    first = devices.asks("a")
    wait_until(lambda: len(devices.view().queue) == 1, "a waits")
    second = devices.asks("b")
    wait_until(lambda: len(devices.view().queue) == 2, "b waits")
    devices.start("g")
    assert inside(first) == "first load"
    leaves(first)
    assert inside(second) == "first load"
    assert [devices.residency(job) for job in "ab"] == ["suspended", "resident"]
    leaves(second)
    assert comes_back(first) == "restored"
