"""Two drivers of slime's shape, in processes of their own, on two pools that one job at a time may use."""

from __future__ import annotations

import signal

import pytest

from tests.client.world import Job
from tests.integrations.conftest import Pools
from tests.support.jobs import wait_until
from timeslice.integrations.phases import PhaseCallback

DRIVER = """
from tests.integrations.miniatures import device, slime
def pause(phase):
    if phase in {stops!r}:
        say(phase)
        assert hear()
{loop}("timeslice.integrations.slime.PhaseCallback", {rollouts}, pause=pause{more})
say("done")
"""


def driver(
    pools: Pools,
    job: str,
    stops: tuple[str, ...] = (),
    loop: str = "slime.train",
    more: str = "",
    rollouts: int = 3,
    *,
    dies: bool = False,
) -> Job:
    return pools.start(DRIVER.format(stops=stops, loop=loop, rollouts=rollouts, more=more), job, dies=dies)


ROLLOUT = {
    ("slime.train", ""): (["train", "weight_sync"], ["generate", "weight_sync", "eval"]),
    ("slime.train", ", offload=True"): (
        ["train", "weight_sync"],
        ["generate", "offload", "onload", "weight_sync", "onload", "eval"],
    ),
}


@pytest.mark.parametrize(("loop", "more"), ROLLOUT)
def test_two_drivers_take_turns_to_the_end(pools: Pools, loop: str, more: str) -> None:
    """Neither uses devices that the other uses (that would end it), and each holds in the order of its phases."""
    drivers = [driver(pools, job, loop=loop, more=more) for job in "ab"]
    assert [each.line() for each in drivers] == ["done", "done"]
    trainers, samplers = ROLLOUT[loop, more]
    for job in "ab":
        assert pools.phases("trainers", job) == ["init", *trainers * 3]
        assert pools.phases("samplers", job) == ["init", "eval", *samplers * 3]
    assert pools.holders() == ("", "")


def test_one_generates_while_the_other_trains(pools: Pools, callback: PhaseCallback) -> None:
    """Two pools, two jobs: each has one, and a weight sync waits until both are free."""
    a = driver(pools, "a", ("train", "weight_sync"), rollouts=1)
    assert a.line() == "train"
    callback.on_phase_begin("generate", "sampler")
    assert pools.holders() == ("a", "mine")
    a.tell()
    pools.until_queued("a", group="samplers")
    assert pools.holders() == ("a", "mine")
    callback.on_phase_end("generate", "sampler")
    assert a.line() == "weight_sync"
    assert pools.holders() == ("a", "a")


def test_pipelined_drivers_overlap_without_a_hang(pools: Pools) -> None:
    """The next generation begins inside training: trainers first, then samplers, as in a weight sync; so two that
    share both pools never wait for each other in a circle."""
    drivers = [driver(pools, job, loop="slime.train_async", rollouts=5) for job in "ab"]
    assert [each.line() for each in drivers] == ["done", "done"]
    for job in "ab":
        assert pools.phases("trainers", job) == ["init", *["train", "weight_sync"] * 5]
        assert pools.phases("samplers", job).count("generate") == 5


def test_colocated_drivers_hold_one_group(pools: Pools, monkeypatch: pytest.MonkeyPatch) -> None:
    """One name for both roles: phases of both take it once, and generation inside training takes nothing more."""
    monkeypatch.setenv("TIMESLICE_SAMPLER_GROUP", "trainers")
    drivers = [driver(pools, job, loop="slime.train_async", rollouts=2) for job in "ab"]
    assert [each.line() for each in drivers] == ["done", "done"]
    assert pools.grants("samplers") == []
    rollout = ["train", "weight_sync", "eval"]
    assert pools.phases("trainers", "a") == ["init", "generate", *rollout, *rollout]


def test_a_driver_killed_in_mid_phase_lets_the_other_in(pools: Pools) -> None:
    """`kill -9` during a weight sync, which holds both pools: the other job gets both when the lease is over."""
    a = driver(pools, "a", ("weight_sync",), dies=True)
    assert a.line() == "weight_sync"
    b = driver(pools, "b", ("init",))
    pools.until_queued("b", group="trainers")
    a.signal(signal.SIGKILL)
    assert b.line() == "init"
    assert pools.holders() == ("b", "b")


def test_a_driver_that_fails_in_mid_phase_lets_go_as_it_exits(pools: Pools) -> None:
    """slime does not call close after an exception; the groups are yielded all the same, not reclaimed later."""
    a = pools.job(
        """
        from tests.integrations.miniatures import slime
        def pause(phase):
            if phase == "weight_sync":
                say(phase)
                raise RuntimeError("out of memory")
        slime.train("timeslice.integrations.slime.PhaseCallback", 1, pause=pause)
        """,
        job="a",
    )
    assert a.line() == "weight_sync"
    assert a.process.wait() == 1
    assert pools.holders() == ("", "")
    assert "LeaseReclaimed" not in pools.event_types("trainers") + pools.event_types("samplers")


def test_a_forked_child_has_no_phase(pools: Pools) -> None:
    """A child forked in mid-phase neither ends the phase of its parent nor counts as being in it."""
    a = pools.job(
        """
        from timeslice.integrations.slime import PhaseCallback
        callback = PhaseCallback()
        callback.on_phase_begin("train", "trainer")
        if not os.fork():
            try:
                callback.on_phase_end("train", "trainer")
            except timeslice.UsageError as error:
                say(error)
            callback.close()
            os._exit(0)
        os.wait()
        hear()
        say("waited")
        hear()
        callback.on_phase_end("train", "trainer")
        """,
        job="a",
    )
    assert a.line().startswith("phase train of trainer ends but has not begun; open: none")
    a.tell()
    assert a.line() == "waited"
    assert pools.holder("trainers") == "a"
    a.tell()
    wait_until(lambda: pools.holder("trainers") == "", "the parent lets go")
