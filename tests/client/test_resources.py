"""What a process may run out of, and what must not pile up in it."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from pathlib import Path

import pytest

import timeslice
from tests.client.world import World
from tests.support.jobs import wait_until
from timeslice.client import defaults
from timeslice.locks import scripts

NO_DESCRIPTOR_LEFT = """
    import resource

    resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
    leaked = []
    try:
        with timeslice.hold("g", lock_only=True):
            while True:
                leaked.append(open("/dev/null"))
    except OSError as error:
        said = error.strerror, error.filename
    leaked.clear()
    say(*said)
    hear()
    with timeslice.hold("g", lock_only=True):
        say("inside")
"""


def test_a_body_that_uses_up_all_descriptors_leaves_the_group(world: World) -> None:
    """In the first hold of a process: the user sees the error of the body, and the group is free at once."""
    job = world.job(NO_DESCRIPTOR_LEFT)
    assert job.line() == "Too many open files /dev/null"
    assert "LeaseYielded" in world.event_types()
    assert not world.holder()
    job.tell()
    assert job.line() == "inside"


def test_a_renewal_thread_that_could_not_start_is_started_by_the_next_hold(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hold that has nobody to renew it fails and holds nothing; once there is room the next one is renewed."""
    renewal = timeslice.client.renewal
    monkeypatch.setattr(renewal, "_renewers", {})
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "timeslice-renewal":
            raise RuntimeError("can't start new thread")
        start(thread)

    with timeslice.Client(job="a") as client:
        monkeypatch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            client.acquire("g", lock_only=True, lease=3)
        assert not world.holder()
        monkeypatch.setattr(threading.Thread, "start", start)
        with client.hold("g", lock_only=True, lease=3) as lease:
            deadline = world.view().number("deadline_ms")
            wait_until(lambda: world.view().number("deadline_ms") > deadline, "it is renewed")
            lease.ensure_held()


def test_a_loss_is_told_once_a_thread_can_be_started(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """No error of ours comes out of the body's end, and `on_lost` is called when there is room."""
    start, told, full = threading.Thread.start, threading.Event(), [True]

    def refuse(thread: threading.Thread) -> None:
        if full and thread.name == "timeslice-on-lost":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with timeslice.Client(job="a") as client, client.hold("g", lock_only=True, on_lost=lambda _: told.set()) as lease:
        world.run(scripts.revoke(world.group("g"), "a", lease.lease_id, lease.fencing_token, "ops", "drill"))
        wait_until(lambda: not world.holder(), "it is taken away")
    assert lease.lost.is_set()
    assert not told.is_set()
    full.clear()
    assert told.wait(20)


FIRST_HOLD_WITHOUT_DESCRIPTORS = """
    import resource, threading, time

    client = timeslice.Client(job="a")
    client.host, client.renewer  # what a program has used before
    resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
    leaked = []
    def free():
        hear()
        leaked.clear()
    thread = threading.Thread(target=free)
    thread.start()
    try:
        while True:
            leaked.append(open("/dev/null"))
    except OSError:
        pass
    say("full")
    with client.hold("g", lock_only=True, timeout=30) as lease:
        say(lease.state)
"""


def test_a_first_hold_waits_until_there_are_descriptors(world: World) -> None:
    """As for a server that is away: it enters once it can, within its timeout."""
    job = world.job(FIRST_HOLD_WITHOUT_DESCRIPTORS)
    assert job.line() == "full"
    job.tell()
    assert job.line() == "held"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # connections that nobody could close
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_event_loops_that_are_just_closed_leave_no_clients(world: World) -> None:
    """Also without `shutdown_asyncgens`, which `asyncio.run` calls: only the last loop's client is still there."""
    clients = []
    for _ in range(5):
        loop = asyncio.new_event_loop()
        clients.append(loop.run_until_complete(_hold_once()))
        loop.close()
        del loop
    gc.collect()
    assert sum(client() is not None for client in clients) <= 1
    defaults._loops.clear()
    gc.collect()  # what is warned of comes now, and not in another test


async def _hold_once() -> weakref.ref[object]:
    async with timeslice.hold("g", job="a", lock_only=True):
        return weakref.ref(await defaults.default_async_client())


def test_a_process_that_changes_its_job_over_and_over_keeps_few_clients(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither clients nor connections pile up; a hold under way goes on when its client is no default any more."""
    clients = []
    with timeslice.hold("first", job="x", lock_only=True) as lease:
        before = len(list(Path("/proc/self/fd").iterdir()))
        for number in range(30):
            monkeypatch.setenv("TIMESLICE_JOB", f"job-{number}")
            with timeslice.hold("g", lock_only=True) as inner:
                assert inner.job == f"job-{number}"
            clients.append(weakref.ref(defaults.default_client()))
        gc.collect()
        assert sum(client() is not None for client in clients) <= 10
        assert len(list(Path("/proc/self/fd").iterdir())) - before <= 12
        lease.ensure_held()
    assert not world.holder("first")


def test_a_body_whose_coroutine_is_closed_ends_quietly(world: World) -> None:
    """Its exit awaits nothing, for nobody would resume it: no RuntimeError, and the group is given up behind."""

    async def body() -> None:
        async with timeslice.hold("g", job="a", lock_only=True):
            await asyncio.Event().wait()

    loop = asyncio.new_event_loop()
    coroutine = body()
    task = loop.create_task(coroutine)
    loop.run_until_complete(asyncio.to_thread(world.until_held, "a"))
    coroutine.close()
    wait_until(lambda: not world.holder(), "it is given up")
    task.cancel()
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()
