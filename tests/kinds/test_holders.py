"""Holders that die or are stopped, and jobs that use the device without a hold, on a real device."""

from __future__ import annotations

import signal

import pytest

from tests.kinds.devices import Devices, comes_back, ended, inside, leaves, metric, tell
from tests.support.jobs import wait_until
from tests.support.ports import free_port

pytestmark = pytest.mark.slow


def test_a_holder_that_is_killed_is_followed_at_once(devices: Devices, capfd: pytest.CaptureFixture[str]) -> None:
    """L04: `kill -9` of a holder with a lease of half a minute: the waiter is in long before that, its memory is free,
    and event, log and metric tell who was reclaimed and why."""
    port = free_port()
    devices.start("g", http_port=port, http_of="coordinator")
    dead = devices.enters("a")
    waiting = devices.asks("b")
    token = devices.view().number("token")
    ended(dead)
    assert inside(waiting) == "first load"
    reclaimed = [event for event in devices.events() if event["type"] == "LeaseReclaimed"]
    assert [(event["job"], event["why"], int(event["token"])) for event in reclaimed] == [
        ("a", "its process ended", token)
    ]
    assert int(reclaimed[0]["held_ms"]) < 20_000
    assert metric(port, "timeslice_reclaims_total") == 1
    assert f"the lease of job a (token {token}) ended without a yield" in capfd.readouterr().err


def test_a_holder_stopped_past_its_lease_is_moved_out_first(devices: Devices) -> None:
    """L08: SIGSTOP of a holder for longer than its lease: its state is suspended before the next one runs; when it
    wakes it is told that the lease is lost, and nothing it sends touches the other's hold."""
    devices.start("g")
    stopped = devices.enters("a", lease_s=1.0)
    waiting = devices.asks("b")
    stopped.signal(signal.SIGSTOP)
    assert inside(waiting) == "first load"
    assert devices.residency("a") == "suspended"
    view = devices.view()
    before = (view.state["lease_id"], view.state["token"])
    stopped.signal(signal.SIGCONT)
    tell(stopped, "look")
    assert stopped.line() == "lost True"
    tell(stopped, "on")
    assert stopped.line() == "out"
    view = devices.view()
    assert (view.holder, (view.state["lease_id"], view.state["token"])) == ("b", before)
    types = [event["type"] for event in devices.events() if event.get("job") == "a"]
    assert types.index("LeaseReclaimed") < types.index("JobSuspended")
    leaves(waiting)
    assert comes_back(stopped) == "restored"


def test_an_idle_job_is_nobodys_trouble_until_it_takes_memory(devices: Devices) -> None:
    """C20, F01: b registers a process with an empty context and never asks; a and c take turns beside it, nothing is
    ever blocked. Then b allocates without a hold: one look flags it, in the group's picture and in the metrics, and
    it is moved out like any other before somebody is let in."""
    port = free_port()
    devices.start("g", http_port=port)
    idle = devices.new("b")
    tell(idle, "register")
    assert idle.line() == "registered"
    first = devices.enters("a")
    leaves(first)
    second = devices.enters("c")
    leaves(second)
    for _ in range(2):
        assert comes_back(first) == "restored"
        leaves(first)
        assert comes_back(second) == "restored"
        leaves(second)
    assert not [event for event in devices.events() if event["type"] in {"GroupBlocked", "JobUnheld"}]
    assert metric(port, "timeslice_unheld_jobs") == 0
    ended(second)
    wait_until(lambda: "c" not in devices.view().jobs, "the device is empty")
    tell(idle, "load")
    assert idle.line() == "loaded"
    wait_until(lambda: ("b", True) in [(m.job, m.unheld) for m in devices.view().members], "the intruder is flagged")
    wait_until(lambda: metric(port, "timeslice_unheld_jobs") == 1, "the metric says so")
    assert comes_back(first) == "restored"
    assert devices.residency("b") == "suspended"
