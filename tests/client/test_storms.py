"""Signals whose handlers raise, at any instruction of a hold: timeouts by SIGALRM, Ctrl-C in a notebook."""

from __future__ import annotations

import pytest

import timeslice
from tests.client.world import World
from tests.support.jobs import wait_until

PROGRAM = """
    import random

    class Interrupt(BaseException):
        pass

    def interrupt(*_):
        raise Interrupt

    signal.signal(signal.SIGALRM, interrupt)
    chance, client = random.Random({seed}), timeslice.Client(job="a")
    options = dict(lock_only=True)

    def plain():
        with client.hold("g", **options):
            for _ in range(50):
                len("body")

    def nested():
        with client.hold("g", **options), client.hold("g", **options):
            pass

    @client.hold("g", **options)
    def decorated():
        pass

    rival = timeslice.Client(job="b")
    over = threading.Event()

    def compete():
        while not over.is_set():
            with rival.hold("g", **options):
                time.sleep(0.0005)
            time.sleep(0.0005)

    if {waits}:
        competing = threading.Thread(target=compete)
        competing.start()
    plain()
    interrupts = 0
    for turn in range({turns}):
        try:
            signal.setitimer(signal.ITIMER_REAL, chance.uniform(1e-5, {longest_s}))
            (plain, nested, decorated)[turn % 3]()
            signal.setitimer(signal.ITIMER_REAL, 0)
        except Interrupt:
            interrupts += 1
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    over.set()
    if {waits}:
        competing.join()
    say("stormed", interrupts > {turns} / 4)
    hear()
    with client.hold("g", **options) as lease:
        say("inside")
        hear()
        lease.ensure_held()
    say("out")
    hear()
"""


@pytest.mark.parametrize(("waits", "longest_s"), [(False, 0.002), (True, 0.006)], ids=["entry, body and exit", "wait"])
def test_a_storm_of_signals_leaves_a_free_group_and_a_process_that_works(
    world: World, waits: bool, longest_s: float
) -> None:
    """Hundreds of interrupts, anywhere in a hold: no segmentation fault, nothing stays held or queued, and the next
    hold is granted, renewed and yielded as usual."""
    job = world.job(PROGRAM.format(seed=7, turns=400, waits=waits, longest_s=longest_s))
    assert job.line() == "stormed True"
    wait_until(lambda: not world.holder() and world.queue() == [], "all is given up")
    job.tell()
    assert job.line() == "inside"
    deadline = world.view().number("deadline_ms")
    wait_until(lambda: world.view().number("deadline_ms") > deadline, "the lease is renewed")
    job.tell()
    assert job.line() == "out"
    assert not world.holder()


CANCELLED = """
    import random

    chance, over = random.Random(7), False

    async def hold():
        async with timeslice.hold("g", lock_only=True):
            await asyncio.sleep(0.0005)

    async def storm():
        async def compete():
            while not over:
                async with timeslice.hold("g", job="b", lock_only=True):
                    await asyncio.sleep(0.0005)
                await asyncio.sleep(0.0005)

        competing = asyncio.create_task(compete())
        loop, cancelled = asyncio.get_running_loop(), 0
        for _ in range(300):
            task = asyncio.create_task(hold())
            loop.call_later(chance.uniform(0, 0.008), task.cancel)
            await asyncio.wait([task])
            cancelled += task.cancelled()
        globals()["over"] = True
        await competing
        say("stormed", cancelled > 75)
        await asyncio.to_thread(hear)
        async with timeslice.hold("g", lock_only=True):
            say("inside")
        say("out")

    asyncio.run(storm())
"""


def test_a_storm_of_cancellations_leaves_a_free_group_and_a_loop_that_works(world: World) -> None:
    """As above, for tasks that are cancelled at any time."""
    job = world.job(CANCELLED)
    assert job.line() == "stormed True"
    wait_until(lambda: not world.holder() and world.queue() == [], "all is given up")
    job.tell()
    assert [job.line(), job.line()] == ["inside", "out"]


HALF_MADE = """
    from redis.connection import AbstractConnection

    class Interrupt(BaseException):
        pass

    real, shots = AbstractConnection.on_connect_check_health, 0

    def interrupted_once(self, *given, **named):
        global shots
        if shots:
            shots -= 1
            raise Interrupt
        return real(self, *given, **named)

    AbstractConnection.on_connect_check_health = interrupted_once
    client = timeslice.Client(job="a")
    with client.hold("other", lock_only=True):
        pass  # what calls need is connected now; what waits need is not
    for turn in range(2):
        hear()
        shots = 1 - turn
        try:
            with client.hold("g", lock_only=True):
                say("inside")
        except Interrupt:
            say("interrupted")
"""


def test_a_connection_that_was_interrupted_half_made_is_not_used_again(world: World) -> None:
    """The next wait of the process makes one of its own, and is woken by its grant."""
    job = world.job(HALF_MADE)
    for said in ("interrupted", "inside"):
        with timeslice.hold("g", job="b", lock_only=True):
            job.tell()
            if said == "inside":
                world.until_queued("a")
            else:
                assert job.line() == said
    assert job.line() == "inside"
