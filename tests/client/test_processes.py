"""Holders in processes of their own, with real signals: killed, stopped, starved."""

from __future__ import annotations

import signal

import pytest

import timeslice
from tests.client.world import World
from tests.support.jobs import wait_until
from timeslice.arena.process import start_time_of
from timeslice.models import Target


def test_a_killed_holder_is_replaced_within_its_lease(world: World) -> None:
    """L04: after `kill -9` the next job of a lock-only group is in when the lease is over; an event names the dead."""
    dead = world.job("""
        with timeslice.hold("g", lock_only=True, lease=2):
            say("inside")
            hear()
    """)
    assert dead.line() == "inside"
    dead.signal(signal.SIGKILL)
    left_ms = world.view().number("deadline_ms") - world.view().now_ms
    assert left_ms <= 2000
    with timeslice.hold("g", job="b", lock_only=True) as lease:
        granted = world.view().number("granted_at_ms")
        reclaimed = next(event for event in world.events() if event["type"] == "LeaseReclaimed")
        assert (reclaimed["job"], reclaimed["why"]) == ("a", "expired")
        assert lease.fencing_token > int(reclaimed["token"])
        assert granted == int(reclaimed["at_ms"])  # no time passes between the two


def test_a_stopped_holder_sees_its_loss_and_can_do_no_harm(world: World) -> None:
    """L08: a holder stopped past its lease learns on waking that it lost; nothing it sends touches the next hold."""
    sleeper = world.job("""
        lost = []
        with timeslice.hold("g", lock_only=True, lease=1, on_lost=lambda lease: lost.append(lease.job)) as lease:
            say("inside", lease.fencing_token)
            hear()
            try:
                lease.ensure_held()
            except timeslice.LeaseLostError as error:
                say("lost:", error)
            lease.lost.wait(20)
            say("told", lease.lost.is_set())
        say("out", lease.state)
        lease.yield_()
        say("again", lease.state)
    """)
    token = int(sleeper.line().split()[1])
    sleeper.signal(signal.SIGSTOP)
    with timeslice.hold("g", job="b", lock_only=True) as lease:
        assert lease.fencing_token > token
        before = world.view().state
        sleeper.signal(signal.SIGCONT)
        sleeper.tell()
        assert sleeper.line().startswith("lost: group g: the lease of job a")
        assert [sleeper.line(), sleeper.line(), sleeper.line()] == ["told True", "out lost", "again lost"]
        after = world.view().state
        assert (after["job"], after["token"], after["lease_id"]) == ("b", before["token"], before["lease_id"])
        lease.ensure_held()


# Leases long enough for renewals that a busy machine holds up for a second.
STARVED = {
    "a sleep of several leases": (2, "time.sleep(5)"),
    "a sync sleep in async code": (2, "time.sleep(5)"),
    "the GIL held for half a lease": (4, "ctypes.PyDLL(None).sleep(2)"),
}


@pytest.mark.timing
@pytest.mark.parametrize("case", STARVED)
def test_a_busy_holder_keeps_its_hold(world: World, case: str) -> None:
    """L11 (1 to 3): what the body does to its thread, event loop or, for less than a lease, the GIL, is no loss."""
    lease, starves = STARVED[case]
    code = f"""
    import ctypes
    {"async " if "async" in case else ""}def main():
        {"async " if "async" in case else ""}with timeslice.hold("g", lock_only=True, lease={lease}) as lease:
            say("inside")
            {starves}
            lease.ensure_held()
            say("held", lease.lost.is_set())
    {"asyncio.run(main())" if "async" in case else "main()"}
    """
    job = world.job(code)
    assert job.line() == "inside"
    with timeslice.hold("g", job="b", lock_only=True):
        assert job.line() == "held False"
    assert "LeaseReclaimed" not in world.event_types()


@pytest.mark.timing
def test_a_holder_that_keeps_the_gil_beyond_its_lease_loses_it(world: World) -> None:
    """L11 (4): a stall of two leases ends in a loss that the holder is told of, and never are two inside."""
    job = world.job("""
        import ctypes
        with timeslice.hold("g", lock_only=True, lease=1) as lease:
            say("inside")
            ctypes.PyDLL(None).sleep(2)  # in one call: between two of them a renewal could slip through
            try:
                lease.ensure_held()
                say("held")
            except timeslice.LeaseLostError:
                say("lost")
        say(lease.lost.is_set())
    """)
    assert job.line() == "inside"
    with timeslice.hold("g", job="b", lock_only=True) as lease:
        assert job.line() == "lost"
        assert job.line() == "True"
        lease.ensure_held()
        assert world.holder() == "b"
    assert "LeaseReclaimed" in world.event_types()


def test_a_holder_that_exits_without_a_word_is_replaced(world: World) -> None:
    """A process that ends inside its hold leaves nothing behind but its lease."""
    gone = world.job("""
        timeslice.Client().acquire("g", lock_only=True, lease=1)
        say("inside")
        os._exit(3)
    """)
    assert gone.line() == "inside"
    with timeslice.hold("g", job="b", lock_only=True):
        assert world.holder() == "b"


def test_two_processes_of_one_job_are_never_both_inside(world: World) -> None:
    """The same job id in two processes makes two waiters, which take turns."""
    code = """
        with timeslice.hold("g", lock_only=True) as lease:
            say("inside", lease.fencing_token)
            hear()
    """
    first = world.job(code)
    token = int(first.line().split()[1])
    second = world.job(code)
    world.until_queued("a")
    first.tell()
    assert int(second.line().split()[1]) > token
    second.tell()
    wait_until(lambda: not world.holder(), "the group is free")


def test_a_process_whose_name_is_cut_within_a_character_holds_like_any(world: World) -> None:
    """As the kernel cuts that of a script with a long name in any script but the Latin one: after fifteen bytes."""
    world.serve("g")
    job = world.job("""
        import ctypes
        ctypes.CDLL(None).prctl(15, "обучение_модели".encode(), 0, 0, 0)
        with timeslice.hold("g"):
            say(open("/proc/self/comm", "rb").read())
    """)
    assert job.line() == repr("обучение_модели".encode()[:15] + b"\n")
    (record,) = world.view().targets.values()
    assert Target.model_validate_json(record).start == start_time_of(job.pid)
