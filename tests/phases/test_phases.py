"""`timeslice.phase`: stretches off the devices, recorded and never waited for."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import timeslice
from tests.cli.conftest import Cli
from tests.client.world import World
from tests.phases.tale import events, story, told
from tests.support.jobs import wait_until
from timeslice import InvalidNameError, UsageError
from timeslice.client.renewal import renewer_for
from timeslice.events import PhaseBegan, PhaseEnded
from timeslice.locks import scripts
from timeslice.locks.scripts import Stretch
from timeslice.locks.scripts.phases import Kind

SHORT = """
    with timeslice.hold("g", lock_only=True):
        pass
    with timeslice.phase("verify"):
        say("in")
        hear()
"""


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("TIMESLICE_JOB", "a")
    return "a"


def row(cli: Cli, job: str = "a") -> Any:
    return next(each for each in cli.json("jobs")["jobs"] if each["job"] == job)


def test_a_phase_is_told_to_the_groups_that_the_process_has_held(world: World, cli: Cli, job: str) -> None:
    """Who, where, how long and how it ended; between the two `timeslice jobs` shows it."""
    world.serve("g")
    with timeslice.hold("g"), timeslice.hold("h", lock_only=True):
        pass
    with timeslice.phase("verify"):
        (began,) = told(world, PhaseBegan, 1)
        assert (began.job, began.phase, began.host, began.pid) == ("a", "verify", "n1", str(os.getpid()))
        shown = row(cli)
        assert (shown["job_phase"], shown["holds"], shown["phase_s"] >= 0) == ("verify", False, True)
        assert "verify for " in cli("jobs").stdout
        assert cli.json("status", "g")["groups"][0]["jobs"][0]["job_phase"] == "verify"
        assert not events(world, PhaseEnded)
    (ended,) = told(world, PhaseEnded, 1)
    assert (ended.phase, ended.outcome) == ("verify", "ok")
    assert 0 <= ended.seconds <= (ended.at_ms - began.at_ms) / 1000 + 10  # it may have been told late
    assert row(cli)["job_phase"] == ""
    assert [event.phase for event in told(world, PhaseEnded, 1, "h")] == ["verify"]


def test_while_a_job_holds_the_holds_phase_is_shown(world: World, cli: Cli, job: str) -> None:
    """What is done on the device matters more than what another thread does beside it."""
    world.serve("g")
    with timeslice.hold("g", phase="train"), timeslice.phase("verify"):
        told(world, PhaseBegan, 1)
        assert row(cli)["job_phase"] == "train"


@pytest.mark.parametrize("how", ["with", "function", "async with", "async function"])
def test_each_form_records_the_error_that_ended_it(world: World, job: str, how: str) -> None:
    """The exception goes through, and the event has its class's name."""

    @timeslice.phase("verify", groups=["g"])
    def function() -> None:
        """Its own words."""
        raise ZeroDivisionError

    @timeslice.phase("verify", groups=["g"])
    async def coroutine() -> None:
        raise ZeroDivisionError

    async def block() -> None:
        async with timeslice.phase("verify", groups=["g"]):
            raise ZeroDivisionError

    with timeslice.hold("g", lock_only=True):
        pass

    def plain() -> None:
        with timeslice.phase("verify", groups=["g"]):
            raise ZeroDivisionError

    forms: dict[str, Callable[[], Any]] = {
        "with": plain,
        "function": function,
        "async with": lambda: asyncio.run(block()),
        "async function": lambda: asyncio.run(coroutine()),
    }
    with pytest.raises(ZeroDivisionError):
        forms[how]()
    assert [event.outcome for event in told(world, PhaseEnded, 1)] == ["ZeroDivisionError"]
    assert function.__doc__ == "Its own words."


def test_one_object_may_be_entered_by_several_threads(world: World, job: str) -> None:
    """Each entry is a phase of its own, and ends with who began it."""
    with timeslice.hold("g", lock_only=True):
        pass
    same, met = timeslice.phase("verify"), threading.Barrier(2, timeout=60)

    def work(error: type[Exception] | None) -> None:
        try:
            with same:
                met.wait()
                if error:
                    raise error
        except ValueError:
            pass

    threads = [threading.Thread(target=work, args=[error]) for error in (None, ValueError)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(event.outcome for event in told(world, PhaseEnded, 2)) == ["ValueError", "ok"]


def test_only_groups_that_are_there_are_told(world: World, job: str) -> None:
    """Nothing was held: nobody is told. A group that is named by mistake does not come into being."""
    with timeslice.hold("h", lock_only=True, job="b"):
        pass
    with timeslice.phase("verify"), timeslice.phase("other", groups=["nowhere", "h"]):
        pass
    told(world, PhaseEnded, 1, "h")
    assert story(world, "h") == ["began other", "ended other"]
    assert world.redis.exists(*world.group("nowhere").all) == 0
    with timeslice.phase("third", job="b"):
        pass
    assert [event.job for event in told(world, PhaseEnded, 2, "h")] == ["a", "b"]


def test_a_process_that_ends_at_once_has_told_its_end(world: World) -> None:
    """The last words of a short process are waited for, about a second."""
    process = world.job(SHORT, job="a")
    assert process.line() == "in"
    told(world, PhaseBegan, 1)
    process.tell()
    assert process.process.wait(60) == 0
    (ended,) = events(world, PhaseEnded)
    assert (ended.job, ended.pid) == ("a", str(process.pid))


def test_the_phase_goes_with_the_job(world: World, cli: Cli, job: str) -> None:
    """Nothing stays of a job that is gone everywhere."""
    world.serve("g")
    with timeslice.hold("g"):
        pass
    with timeslice.phase("verify"):
        told(world, PhaseBegan, 1)
        seen = world.view().counter
        assert world.run(scripts.report(world.group(), "n1", seen, [scripts.Observed("a", "gone")]))
        assert world.redis.hgetall(world.group().jobs) == {}
    told(world, PhaseEnded, 1)
    assert world.redis.hgetall(world.group().jobs) == {}


def test_a_forked_child_ends_no_phase_of_its_parents(world: World, job: str) -> None:
    """Leaving the block in the child tells nothing; its own phases it tells."""
    with timeslice.hold("g", lock_only=True):
        pass
    with timeslice.phase("verify") as stretch:
        told(world, PhaseBegan, 1)
        pid = os.fork()
        if not pid:
            stretch.__exit__(None, None, None)
            with timeslice.phase("child", groups=["g"]):
                pass
            renewer_for(world.url).flush(20)
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        assert story(world) == ["began verify", "began child", "ended child"]
    told(world, PhaseEnded, 2)


def test_the_last_one_begun_is_shown(world: World, cli: Cli) -> None:
    """Of several processes that say different things; when that one ends, what the others do is not known."""
    world.serve("g")
    world.run(scripts.acquire(world.group(), scripts.Request("w", "a", "n1", 1, 1)))
    world.run(scripts.yield_(world.group(), "w", None))
    first, second = (Stretch(f"s{number}", "a", f"p{number}", "n1", number) for number in (1, 2))
    steps: list[tuple[Stretch, Kind, str]] = [
        *((first, "began", "p1"), (second, "began", "p2")),
        *((first, "ended", "p2"), (second, "ended", "")),
    ]
    for stretch, kind, shown in steps:
        assert world.run(scripts.phase(world.group(), stretch, kind))
        assert row(cli)["job_phase"] == shown


def test_disabled_it_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """No server is needed with TIMESLICE_DISABLE=1; without one and without it, the error says what to set."""
    with pytest.raises(UsageError, match="TIMESLICE_URL"), timeslice.phase("verify"):
        pass
    monkeypatch.setenv("TIMESLICE_DISABLE", "1")
    with timeslice.phase("verify"):
        pass


def test_bad_calls_are_refused() -> None:
    """Names by the naming rule; groups as a list; functions, and no generators."""

    def numbers() -> Iterator[int]:
        yield 1

    with pytest.raises(InvalidNameError):
        timeslice.phase("no spaces")
    with pytest.raises(InvalidNameError):
        timeslice.phase("verify", groups=["{g}"])
    with pytest.raises(UsageError, match=r"groups=\['g'\]"):
        timeslice.phase("verify", groups="g")
    for wrong in (numbers, int, 3):
        with pytest.raises(UsageError):
            timeslice.phase("verify")(wrong)  # type: ignore[type-var]


def test_the_end_that_comes_after_a_hold_elsewhere_is_told_where_it_began(world: World, job: str) -> None:
    """Begin and end are told to the same groups."""
    with timeslice.hold("g", lock_only=True):
        pass
    with timeslice.phase("verify"), timeslice.hold("h", lock_only=True):
        pass
    told(world, PhaseEnded, 1)
    wait_until(lambda: story(world) == ["began verify", "ended verify"], "both are told")
    assert story(world, "h") == []
