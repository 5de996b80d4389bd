"""Every caller gets the answer to its own question, whatever happened to the ones before on the same connection."""

from __future__ import annotations

import asyncio
import select
import signal
import threading
from collections.abc import Callable, Iterator
from operator import gt
from types import FrameType

import pytest

from tests.locks.lab import Lab
from tests.support.jobs import DEADLINE_S, wait_until
from timeslice.embedded import EmbeddedServer
from timeslice.errors import RedisUnreachableError
from timeslice.locks.drivers import AsyncDriver, SyncDriver
from timeslice.locks.flows import Wait
from timeslice.locks.loader import load
from timeslice.locks.view import GroupView, look
from timeslice.torture.proxy import Proxy

SHA = load("look").sha
LABELS = ("one", "two")  # what their holders do


@pytest.fixture
def labs(server: EmbeddedServer, prefix: str) -> Iterator[tuple[Lab, Lab]]:
    """Two groups that can be told apart."""
    made = Lab(server.url, prefix), Lab(server.url, prefix + "x")
    for lab, label in zip(made, LABELS, strict=True):
        lab.grant("a1", label=label)
    yield made
    for lab in made:
        lab.redis.close()


@pytest.fixture
def way(server: EmbeddedServer) -> Iterator[Proxy]:
    made = Proxy(server.socket)
    yield made
    made.close()


def own(view: GroupView, lab: Lab) -> bool:
    return view.state["label"] == lab.view.state["label"]


def check(driver: SyncDriver, labs: tuple[Lab, Lab]) -> None:
    """Alternating questions get their own answers."""
    for lab in labs * 3:
        assert own(driver.run(look(lab.group)), lab)


def test_a_reply_that_comes_twice_is_nobody_s(labs: tuple[Lab, Lab], way: Proxy) -> None:
    """The second copy is not taken for the answer to the next question."""
    driver = SyncDriver(way.url)
    check(driver, labs)
    for lab in labs:
        way.double_reply_to(lab.group.state)
        assert own(driver.run(look(lab.group)), lab)
        check(driver, labs)
    driver.close()


def test_a_reply_that_comes_late_is_nobody_s(labs: tuple[Lab, Lab], way: Proxy) -> None:
    """The caller had given up on it; it arrives when the next one asks."""
    driver = SyncDriver(way.url, reply_s=0.3)
    check(driver, labs)
    way.stall()
    with pytest.raises(RedisUnreachableError):
        driver.run(look(labs[0].group), deadline_s=0.0)
    way.heal()
    check(driver, labs)
    driver.close()


def test_a_reply_to_one_who_was_interrupted_is_nobody_s(labs: tuple[Lab, Lab], way: Proxy) -> None:
    """Ctrl-C in the middle of reading, in a call and in a wait: the answers come later, to nobody."""
    driver = SyncDriver(way.url)
    check(driver, labs)

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    asks: list[Callable[[], object]] = [
        lambda: driver.run(look(labs[0].group)),
        lambda: driver.wait(Wait(labs[0].group.events, "0-0", 10_000)),
    ]
    try:
        for ask in asks:
            way.stall()
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            with pytest.raises(KeyboardInterrupt):
                ask()
            way.heal()
            check(driver, labs)
            assert driver.wait(Wait(labs[1].group.events, "0-0", 10_000))[0][1]["type"] == "LeaseGranted"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    driver.close()


def test_a_kept_connection_that_the_server_closed_is_not_used(labs: tuple[Lab, Lab], way: Proxy) -> None:
    """The next call does not even fail once."""
    driver = SyncDriver(way.url)
    check(driver, labs)
    way.cut()
    way.heal()
    (kept,) = driver._ready["calls"]
    assert select.select([kept._sock], [], [], DEADLINE_S)[0]
    assert own(driver.run(look(labs[0].group), deadline_s=0.0), labs[0])
    driver.close()


def test_threads_get_their_own_answers(labs: tuple[Lab, Lab], way: Proxy) -> None:
    """Over connections that are cut, interrupted and doubled meanwhile."""
    driver = SyncDriver(way.url)
    wrong: list[str] = []
    answers = [0] * 4
    done = threading.Event()

    def ask(number: int) -> None:
        lab = labs[number % 2]
        label = lab.view.state["label"]
        while not done.is_set():
            if driver.run(look(lab.group)).state["label"] != label:
                wrong.append(lab.group.name)
            answers[number] += 1

    running = [threading.Thread(target=ask, args=(n,), daemon=True) for n in range(4)]
    for thread in running:
        thread.start()
    for _ in range(10):
        way.double_reply_to(SHA)
        way.cut()
        way.heal()
        before = list(answers)
        wait_until(lambda b=before: all(map(gt, answers, b)), "all are answered again")  # type: ignore[misc]
    done.set()
    for thread in running:
        thread.join()
    driver.close()
    assert wrong == []


async def test_a_reply_to_a_cancelled_task_is_nobody_s(labs: tuple[Lab, Lab], way: Proxy) -> None:
    """Tasks cancelled while their answers are on their way: the next ones on the same connections get their own."""
    driver = AsyncDriver(way.url)
    way.delay(0.01)
    for turn in range(40):
        lost = asyncio.create_task(driver.run(look(labs[0].group)))
        waits = asyncio.create_task(driver.wait(Wait(labs[0].group.events, "$", 5_000)))
        await asyncio.sleep(turn * 0.001)
        for task in (lost, waits):
            task.cancel()
        await asyncio.gather(lost, waits, return_exceptions=True)
        found = await asyncio.gather(*(driver.run(look(lab.group)) for lab in labs))
        assert [view.state["label"] for view in found] == list(LABELS)
    await driver.close()
