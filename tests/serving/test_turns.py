"""Two jobs with a server each take turns on a device that fits one: nobody notices but by the time it takes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.cli.conftest import Cli
from tests.client.world import World
from tests.serving.conftest import Daemons, Kind, device, driver, sample
from tests.support.jobs import wait_until
from timeslice.arena import Device


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
@pytest.mark.parametrize("how", ["pid=server.pid", "pid=None"])
def test_servers_take_turns_and_say_what_they_say_alone(
    world: World, daemons: Daemons, alone: Callable[[int], str], how: str, kind: Kind
) -> None:
    """G21: known by the server's own process, or by the driver that stands in for it: the same texts as alone, turn
    after turn, and never both servers on the device."""
    daemons()
    expected = {1: alone(1), 2: alone(2)}
    jobs = {1: driver(world, "a", 1, how, kind), 2: driver(world, "b", 2, how, kind)}
    for _ in range(3):
        for seed, job in jobs.items():
            needs_weights, granted, text = sample(job)
            assert (needs_weights, text) == ("False", expected[seed])
            assert granted == "restored"
    assert world.event_types().count("SwapFinished") >= 5
    assert not [event for event in world.events() if event["type"] == "JobFaulted"]


def test_dropped_weights_are_shown_until_a_weight_sync(
    world: World, daemons: Daemons, cli: Cli, alone: Callable[[int], str]
) -> None:
    """G21: registered with discard alone, the server wakes with garbage: `needs weights` says so to the job and to
    people, until a hold with the phase weight_sync ends well."""
    daemons()
    job = driver(world, "a", 1, "pid=server.pid, modes=('discard',)")
    rival = driver(world, "b", 2)
    assert sample(rival)[0] == "False"
    wait_until(lambda: "needs weights" in cli("jobs").stdout, "it is shown")
    needs_weights, granted, text = sample(job)
    assert (needs_weights, granted) == ("True", "restored")
    assert text != alone(1)
    assert sample(job, "weight_sync 7")[0] == "True"
    assert sample(job) == ["False", "no-op", alone(7)]
    assert "needs weights" not in cli("jobs").stdout


def test_discard_is_used_where_it_was_asked_for(world: World, daemons: Daemons, cli: Cli) -> None:
    """A server that could do both, registered with mode=discard."""
    daemons()
    job = driver(world, "a", 1, "pid=server.pid, modes=('offload', 'discard'), mode='discard'")
    sample(driver(world, "b", 2))
    assert "needs weights" in cli("jobs").stdout
    assert sample(job)[0] == "True"


def test_a_server_that_ends_leaves_its_place(world: World, daemons: Daemons) -> None:
    """F02: known by its own process, its end is seen at once: the other job gets in, and nothing is a fault."""
    daemons()
    job, rival = driver(world, "a", 1), driver(world, "b", 2)
    assert sample(job)[1] == "restored"
    job.end()
    assert sample(rival)[1] in {"restored", "no-op"}
    wait_until(lambda: Device.open(device()).used_bytes() > 0, "the rival is in")
