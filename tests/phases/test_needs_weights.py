"""A workload that drops its content when it is suspended: nobody may compute with it before a weight sync."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.conftest import Cli
from tests.client.world import World
from tests.faults.stack import Background
from tests.phases.tale import events
from timeslice.agent.service import AgentOptions, run_agent
from timeslice.coordinator.service import CoordinatorOptions, run_coordinator
from timeslice.events import JobRestored
from timeslice.locks import scripts
from timeslice.locks.scripts import Granted, Observed, Request

SAMPLER = """
    modes = []
    workload = timeslice.register_workload(
        "g",
        on_suspend=lambda mode, tags: modes.append(mode) or 1000,
        on_restore=lambda tags: 1000,
        modes={modes},
    )
    say("up")
    while True:
        phase, error = hear().split()
        try:
            with timeslice.hold("g", phase=phase) as lease:
                told = [lease.needs_weights, lease.grant.how, *modes]
                if error == "raise":
                    raise ValueError
                if error == "point":
                    lease.yield_point(ready=lambda answers=iter([False, True]): next(answers))
                    told += ["still", lease.needs_weights]
        except ValueError:
            pass
        say(*told)
"""
RIVAL = """
    workload = timeslice.register_workload("g", on_suspend=lambda *_: 10, on_restore=lambda *_: 10)
    say("up")
    while hear():
        with timeslice.hold("g"):
            pass
        say("was in")
"""


@pytest.fixture
def daemons(world: World, prefix: str, tmp_path: Path) -> Iterator[None]:
    """A coordinator and the agent of node n1, which serves g."""
    coordinator = CoordinatorOptions(url=world.url, prefix=prefix, name="c1")
    agent = AgentOptions(url=world.url, prefix=prefix, node="n1", groups=("g",), state_dir=tmp_path, backends={})
    running = [
        Background("c1", lambda stop, ready: run_coordinator(coordinator, stop=stop, ready=ready)),
        Background("n1", lambda stop, ready: run_agent(agent, stop=stop, ready=ready)),
    ]
    yield
    for each in reversed(running):
        each.stop()


@pytest.mark.usefixtures("daemons")
def test_dropped_content_is_missed_until_a_weight_sync_ends_well(world: World, cli: Cli) -> None:
    """The job is told at its grants, people by `timeslice jobs`. A sync that raises, or is at a yield point, has not
    brought the weights; one that ends well has."""
    sampler = world.job(SAMPLER.format(modes=("discard",)), job="a")
    rival = world.job(RIVAL, job="b")
    assert (sampler.line(), rival.line()) == ("up", "up")

    def hold(phase: str, error: str = "-") -> str:
        sampler.tell(f"{phase} {error}")
        return sampler.line()

    def shown() -> bool:
        jobs = cli.json("jobs")["jobs"]
        return bool(next(each for each in jobs if each["job"] == "a")["needs_weights"])

    assert hold("generate") == "False first load"
    rival.tell()
    assert rival.line() == "was in"
    assert shown()
    assert "suspended, needs weights" in cli("jobs").stdout
    assert "suspended, needs weights" in cli("status", "g").stdout
    (status,) = cli.json("status", "g")["groups"]
    assert [each["needs_weights"] for each in status["jobs"]] == [True, False]
    assert hold("generate") == "True restored discard"
    assert len(events(world, JobRestored)) == 1
    assert hold("weight_sync", "raise") == "True no-op discard"
    assert hold("generate") == "True no-op discard"
    assert hold("weight_sync", "point") == "True no-op discard still True"
    assert not shown()
    assert hold("generate") == "False no-op discard"


@pytest.mark.usefixtures("daemons")
def test_content_that_is_kept_is_not_missed(world: World) -> None:
    """Who can keep it in host memory is asked to, whatever else it can do."""
    sampler = world.job(SAMPLER.format(modes=("discard", "offload")), job="a")
    rival = world.job(RIVAL, job="b")
    assert (sampler.line(), rival.line()) == ("up", "up")
    sampler.tell("generate -")
    assert sampler.line() == "False first load"
    rival.tell()
    assert rival.line() == "was in"
    sampler.tell("generate -")
    assert sampler.line() == "False restored offload"


def discarded(world: World) -> None:
    """Job a's content was dropped, by a swap that let b in; b is in."""
    world.serve("g")
    world.run(scripts.acquire(world.group(), Request("a1", "a", "n1", 1, 1)))
    world.run(scripts.acquire(world.group(), Request("b1", "b", "n1", 2, 1)))
    world.run(scripts.yield_(world.group(), "a1", None))
    world.swap("a", "first load", discarded=True)


def test_it_goes_with_the_job(world: World) -> None:
    """A job that is gone leaves nothing, and one of its name begins with a first load."""
    discarded(world)
    assert world.view().jobs["a"].needs_weights
    world.run(scripts.report(world.group(), "n1", world.view().counter, [Observed("a", "gone")]))
    assert world.redis.hget(world.group().jobs, "a/needs_weights") is None


def test_an_operators_yield_does_not_clear_it(world: World) -> None:
    """An operator's yield in the middle of a sync; its own end of the next one does."""
    discarded(world)
    world.run(scripts.yield_(world.group(), "b1", None))
    world.run(scripts.acquire(world.group(), Request("a2", "a", "n1", 1, 1, label="weight_sync")))
    world.swap("b", "restored")
    world.run(scripts.yield_(world.group(), "a2", None, by="ops"))
    again = world.run(scripts.acquire(world.group(), Request("a3", "a", "n1", 1, 1, label="weight_sync")))
    assert isinstance(again, Granted)
    assert again.needs_weights
    world.run(scripts.yield_(world.group(), "a3", again.token, done=True))
    last = world.run(scripts.acquire(world.group(), Request("a4", "a", "n1", 1, 1)))
    assert isinstance(last, Granted)
    assert not last.needs_weights
