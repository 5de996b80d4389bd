"""Who may have a server asked, and what becomes of a server whose stand-in is gone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import timeslice
from tests.cli.conftest import Cli
from tests.client.world import World
from tests.servers.processes import ServerProcess
from tests.serving.conftest import Daemons, arguments, driver, sample, stand_in
from tests.support.jobs import wait_until
from timeslice.errors import InvalidNameError, UsageError
from timeslice.models import Target


@pytest.fixture
def engine(daemons: Daemons) -> Iterator[ServerProcess]:
    """One that nobody's job started."""
    daemons()
    made = ServerProcess("vllm", *arguments(1))
    yield made
    made.end()


def test_without_a_good_bye_the_state_is_unknown_until_somebody_speaks_for_it(
    world: World, engine: ServerProcess
) -> None:
    """The driver that stood in for the server is killed, and the server lives with its memory: nobody is let in over
    it. A new driver of the job registers it again, and the turns go on."""
    job = stand_in(world, "a", engine)
    text = sample(job)[2]
    wait_until(lambda: not world.holder(), "it let go")
    job.end()
    rival = world.job("""
        say("up")
        with timeslice.hold("g", timeout=60) as lease:
            say(lease.grant.how)
    """, job="b")  # fmt: skip
    assert rival.line() == "up"
    wait_until(lambda: "state of job a is unknown" in world.view().state.get("reason", ""), "blocked, and why")
    assert world.holder() != "b"
    again = stand_in(world, "a", engine)
    assert rival.line() == "first load"
    wait_until(lambda: world.holder() == "", "it was in")
    assert engine.ask("/is_sleeping")[1] == {"is_sleeping": True}
    assert sample(again)[1:] == ["restored", text]


def test_after_a_good_bye_nobody_waits_for_it(world: World, engine: ServerProcess) -> None:
    """close() says that the servers are gone; the process may end then, and the device is free."""
    job = stand_in(world, "a", engine)
    sample(job)
    engine.end()
    job.tell("close")
    job.process.wait(60)
    assert sample(driver(world, "b", 2))[1] == "no-op"


def test_a_strangers_process_is_not_taken(world: World, engine: ServerProcess, cli: Cli) -> None:
    """A process that was not started for the job and group is refused, its server is never asked, and people are
    told what it lacks."""
    log = world.job(f"""
        timeslice.register_server("g", {engine.url!r}, dialect="vllm", pid={engine.pid}, job="a")
        say("up")
        hear()
    """, job="a")  # fmt: skip
    assert log.line() == "up"
    wait_until(lambda: "TIMESLICE_GROUPS=g" in cli("doctor").stdout, "the doctor tells")
    assert engine.ask("/stand-in")[1]["log"] == []


def test_an_address_that_is_not_allowed_blocks_with_the_option_to_set(world: World, daemons: Daemons) -> None:
    """The agent was started for servers elsewhere: nothing reaches this one, and the reason says what to set."""
    daemons("http://10.1.2.3:8000")
    server = ServerProcess("vllm", *arguments(1))
    try:
        job = stand_in(world, "a", server)
        job.tell("generate")
        assert job.line()
        world.job('with timeslice.hold("g", timeout=60): pass', job="b")
        wait_until(lambda: f"http:allow={server.url}" in world.view().state.get("reason", ""), "the reason")
        assert [call["path"] for call in server.ask("/stand-in")[1]["log"]] == ["/v1/completions"]
    finally:
        server.end()


@pytest.mark.parametrize(
    ("urls", "fields", "error", "why"),
    [
        ((), {}, UsageError, "at least one server"),
        (("10.1.2.3:8000",), {}, UsageError, "endpoints"),
        (("http://user:secret@10.1.2.3",), {}, UsageError, "endpoints"),
        (("http://10.1.2.3",), {"dialect": "tgi"}, UsageError, "none of vllm, sglang"),
        (("http://10.1.2.3",), {"pid": 2**22 - 1}, UsageError, "can't be looked at"),
        (("http://10.1.2.3",), {"modes": ("forget",)}, UsageError, "modes"),
        (("http://10.1.2.3",), {"job": "a b"}, InvalidNameError, "a b"),
    ],
)
def test_what_can_not_be_meant_is_refused(
    world: World, urls: tuple[str, ...], fields: dict[str, Any], error: type[Exception], why: str
) -> None:
    """Before anything is written, and without the password that somebody put into an address."""
    with pytest.raises(error, match=why) as caught:
        timeslice.register_server("g", *urls, **{"dialect": "vllm", "job": "a", **fields})
    assert "secret" not in str(caught.value)
    assert world.view().state.get("job", "") == ""


def test_a_registration_says_all_and_survives_a_hold(world: World) -> None:
    """What was registered stands, also after this process held the group; a second one is refused; close ends it."""
    world.serve("g")

    def record() -> Target:
        (raw,) = world.redis.hvals(world.group().targets)
        return Target.model_validate_json(raw)

    url = "http://10.1.2.3:8000"
    registered = timeslice.register_server("g", url, dialect="sglang", job="a", modes=("discard",), mode="discard")
    with timeslice.hold("g", job="a"), pytest.raises(UsageError, match="has a workload"):
        timeslice.register_server("g", url, dialect="vllm", job="a")
    found = record()
    assert (found.backend, found.endpoints, found.dialect) == ("http", (url,), "sglang")
    assert (found.modes, found.leave.mode, found.tags) == (
        ("discard",),
        "discard",
        ("weights", "kv_cache", "cuda_graph"),
    )
    assert found.channel
    registered.close()
    registered.close()
    assert (record().backend, record().endpoints, record().channel) == ("http", (), "")
