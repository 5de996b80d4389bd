"""What the renewal thread makes of news: leases come first, and the queue is bounded."""

from __future__ import annotations

import multiprocessing
import threading
from typing import Any

import pytest

import timeslice
from tests.client.world import World
from tests.phases.tale import story, told
from tests.support.jobs import DEADLINE_S, wait_until
from timeslice.client import renewal
from timeslice.client.renewal import Renewer
from timeslice.events import PhaseEnded
from timeslice.locks import scripts
from timeslice.locks.scripts import Stretch


@pytest.fixture(autouse=True)
def job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIMESLICE_JOB", "a")


def hold(*groups: str) -> None:
    for group in groups:
        with timeslice.hold(group, lock_only=True):
            pass


def test_a_job_that_tells_without_end_keeps_its_lease(world: World) -> None:
    """Faster than the server answers: the lease is renewed all the same, and the news go on."""
    over = threading.Event()

    def tell() -> None:
        while not over.is_set():
            with timeslice.phase("verify"):
                pass

    with timeslice.hold("g", lock_only=True, lease=3) as lease:
        teller = threading.Thread(target=tell)
        teller.start()
        try:
            stood = lease.expires_at
            wait_until(lambda: lease.expires_at > stood + 3, "it was renewed past its first term")
            lease.ensure_held()
            assert story(world)
        finally:
            over.set()
            teller.join(DEADLINE_S)
    told(world, PhaseEnded, 1)


def test_what_is_on_its_way_is_not_taken_for_the_next(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the oldest is being sent so many more come that it is dropped: once answered, all of these are sent."""
    sent: list[Any] = []
    begun, go_on = threading.Event(), threading.Event()

    class Slow:
        def run(self, call: Any, *, deadline_s: float) -> None:
            begun.set()
            assert go_on.wait(DEADLINE_S)
            sent.append(call)

    renewer = Renewer(world.url)
    monkeypatch.setattr(renewer, "_connection", Slow)
    first, *rest = (
        scripts.phase(world.group(), Stretch(f"s{number}", "a", "verify", "n1", 1), "began")
        for number in range(renewal._NEWS_MOST + 1)
    )
    renewer.tell(first, "the first")
    assert begun.wait(DEADLINE_S)
    for call in rest:
        renewer.tell(call, "one more")
    go_on.set()
    wait_until(lambda: sent[-1:] == rest[-1:], "the last is sent")
    assert sent == [first, *rest]


def test_of_many_groups_the_last_held_are_told(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that goes through more and more groups remembers a bounded number of them."""
    monkeypatch.setattr(renewal, "_HELD_MOST", 2)
    renewal.renewer_for(world.url)._held.clear()
    hold("g", "h", "g", "i")
    with timeslice.phase("verify"):
        pass
    for group in ("g", "i"):
        told(world, PhaseEnded, 1, group)
    assert story(world, "h") == []


def test_a_worker_process_that_ends_at_once_has_told_its_end(world: World) -> None:
    """Also one of multiprocessing, which runs no exit functions but its own."""
    hold("g")

    def work() -> None:
        with timeslice.phase("verify", groups=["g"]):
            pass

    child = multiprocessing.get_context("fork").Process(target=work)
    child.start()
    child.join(DEADLINE_S)
    assert child.exitcode == 0
    assert story(world) == ["began verify", "ended verify"]


def test_the_name_of_an_error_is_cut_by_bytes(world: World) -> None:
    """A long one in another alphabet ends the phase like any other."""
    world.serve("g")
    with timeslice.hold("g"):
        pass
    wrong = type("Ж" * 200, (Exception,), {})
    with pytest.raises(wrong), timeslice.phase("verify"):
        raise wrong
    (ended,) = told(world, PhaseEnded, 1)
    assert ended.outcome == "Ж" * 100
    assert world.view().jobs["a"].phase == ""


def test_each_thread_ends_its_own_entry_of_one_object(world: World) -> None:
    """The first to begin ends first: what the second one does is shown until it ends itself."""
    world.serve("g")
    with timeslice.hold("g"):
        pass
    same, second_may_end, second_in = timeslice.phase("verify"), threading.Event(), threading.Event()

    def second() -> None:
        with same:
            second_in.set()
            second_may_end.wait(DEADLINE_S)

    thread = threading.Thread(target=second)
    with same:
        thread.start()
        assert second_in.wait(DEADLINE_S)
    told(world, PhaseEnded, 1)
    assert world.view().jobs["a"].phase == "verify"
    second_may_end.set()
    thread.join()
    told(world, PhaseEnded, 2)
    assert world.view().jobs["a"].phase == ""


def test_a_group_without_devices_keeps_no_phase(world: World) -> None:
    """Nobody would take it back from a job that was killed: only jobs whose state an agent follows show it."""
    hold("g")
    with timeslice.phase("verify"):
        pass
    told(world, PhaseEnded, 1)
    stretch = Stretch("s", "a", "killed in it", "n1", 1)
    assert world.run(scripts.phase(world.group(), stretch, "began"))
    assert world.redis.hgetall(world.group().jobs) == {}


def test_news_notice_that_the_server_has_lost_data(world: World) -> None:
    """Like any other word of one who knows a higher number; else they would hide it, and a long silence too."""
    hold("g")
    known = world.view().counter + 1000
    world.run(scripts.phase(world.group(), Stretch("s", "a", "verify", "n1", 1), "began", floor=known))
    assert "StateLost" in world.event_types()
    assert world.view().counter >= known
