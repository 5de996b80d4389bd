"""A workload's registration, whatever happens to the server and the process."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

import timeslice
from tests.client.workload.conftest import Agent, Model, registered
from tests.client.world import World
from tests.conftest import ServerFactory
from tests.support.jobs import wait_until
from timeslice.client.identity import this_target
from timeslice.client.workload import Workload, register_workload
from timeslice.errors import InvalidNameError, RefusedError, UsageError
from timeslice.locks.scripts import text
from timeslice.models import ChannelCommand, Residency
from timeslice.torture.proxy import Proxy


def test_a_workload_is_registered_as_a_target(world: World, workload: Workload) -> None:
    """The agent finds this process with its channel and what it can do."""
    (target,) = registered(world)
    assert target == workload.target
    assert (target.pid, target.job, target.host, target.modes) == (os.getpid(), "a", "n1", ("offload",))
    assert target.channel


def test_registering_twice_is_refused(workload: Workload, model: Model) -> None:
    """Two workloads would both answer; after the first is closed the second may."""
    with pytest.raises(UsageError, match="already"):
        register_workload("g", on_suspend=model.suspend, on_restore=model.restore, job="a")
    workload.close()
    register_workload("g", on_suspend=model.suspend, on_restore=model.restore, job="a").close()


def test_names_are_checked_before_anything_is_sent(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """No server is needed to see that a name can't be."""
    monkeypatch.setenv("TIMESLICE_URL", "redis://127.0.0.1:1")
    with pytest.raises(InvalidNameError):
        register_workload("no good", on_suspend=model.suspend, on_restore=model.restore, job="a")


def test_close_ends_it(world: World, workload: Workload, agent: Agent, model: Model) -> None:
    """The process stays a target, without a channel; its thread is gone; a new workload starts afresh."""
    workload.close()
    workload.close()
    (target,) = registered(world)
    assert (target.channel, target.modes) == ("", ())
    assert this_target("g", "a", "n1").channel == ""
    assert "timeslice-workload-g" not in {thread.name for thread in threading.enumerate()}
    agent.send("late", "suspend")  # what nobody answered before is none of the next one's business
    again = register_workload("g", on_suspend=model.suspend, on_restore=model.restore, job="a")
    try:
        assert agent.ask("2", "probe").state is Residency.RESIDENT
        assert (agent.answers("late"), model.calls) == ([], [])
    finally:
        again.close()


def test_close_lets_a_callback_finish(workload: Workload, agent: Agent, model: Model) -> None:
    """State half moved would be lost; the answer is still sent."""
    model.gate.clear()
    agent.send("1", "suspend")
    wait_until(lambda: bool(model.threads), "the callback runs")
    closing = threading.Thread(target=workload.close)
    closing.start()
    model.gate.set()
    closing.join(20)
    assert agent.answers("1")[0].ok


def test_to_close_it_does_not_wait_for_ever_for_a_callback(
    quick: None, workload: Workload, agent: Agent, model: Model, caplog: pytest.LogCaptureFixture
) -> None:
    """One that takes minutes, or hangs: it is told, and the callback goes on."""
    model.gate.clear()
    agent.send("1", "suspend")
    wait_until(lambda: bool(model.threads), "the callback runs")
    workload.close()
    assert [line for line in caplog.messages if "a callback is still at work" in line and "group g" in line]
    model.gate.set()
    assert agent.answer("1").ok
    assert workload._thread
    workload._thread.join(20)


def test_a_server_that_lost_everything_is_told_again(
    quick: None, world: World, agent: Agent, workload: Workload
) -> None:
    """FLUSHALL took the registration and the stream: both are there again, even if the stream's ids began anew."""
    agent.ask("1", "suspend")
    world.redis.delete(agent.stream, world.group().targets)
    world.redis.xadd(agent.stream, {"kind": "command", "body": "the clock stepped back"}, id="1-1")
    body = ChannelCommand(id="2", action="probe").model_dump_json()
    world.redis.xadd(agent.stream, {"kind": "command", "body": body}, id="1-2")
    assert agent.answer("2").state is Residency.SUSPENDED
    assert registered(world) == [workload.target]


def test_a_workload_rides_out_an_outage(
    world: World, model: Model, proxy: Proxy, started: list[Workload], prefix: str
) -> None:
    """Commands sent meanwhile are obeyed when the connection is back."""
    world.serve("g")
    made = register_workload("g", on_suspend=model.suspend, on_restore=model.restore, job="a", url=proxy.url)
    started.append(made)
    agent = Agent(world.redis, prefix, made.target)
    agent.ask("1", "suspend")
    proxy.cut()
    agent.send("2", "restore")
    proxy.heal()
    assert agent.answer("2").ok
    assert len(model.calls) == 2


def test_a_lost_reply_does_nothing_twice(
    world: World, model: Model, proxy: Proxy, started: list[Workload], prefix: str
) -> None:
    """The answer was written and its confirmation lost: it may stand there twice, and the callback ran once."""
    world.serve("g")
    made = register_workload("g", on_suspend=model.suspend, on_restore=model.restore, job="a", url=proxy.url)
    started.append(made)
    agent = Agent(world.redis, prefix, made.target)
    proxy.lose_reply_to("answer")
    answer = agent.ask("1", "suspend")
    assert agent.ask("2", "probe").state is Residency.SUSPENDED
    assert {copy.model_dump_json() for copy in agent.answers("1")} == {answer.model_dump_json()}
    assert len(model.calls) == 1
    assert proxy.lost_replies == 1


def test_a_workload_may_register_before_its_server_is_there(
    server_factory: ServerFactory,
    tmp_path: Path,
    model: Model,
    started: list[Workload],
    monkeypatch: pytest.MonkeyPatch,
    prefix: str,
    quick: None,
) -> None:
    """It registers when the server comes, and again with one that was restarted empty."""
    monkeypatch.setenv("TIMESLICE_PREFIX", prefix)
    monkeypatch.setenv("TIMESLICE_NODE", "n1")
    url = f"unix://{tmp_path}/redis.sock"
    made = register_workload("g", on_suspend=model.suspend, on_restore=model.restore, job="a", url=url)
    started.append(made)
    for _ in range(2):
        server = server_factory(folder=tmp_path)
        assert server.url == url
        world = World(url, prefix)
        world.serve("g")
        wait_until(lambda w=world: registered(w) == [made.target], "registered")  # type: ignore[misc]
        assert Agent(world.redis, prefix, made.target).ask("1", "probe").ok
        world.close()
        server.kill()


def test_a_forked_child_has_no_workload(world: World, workload: Workload, agent: Agent) -> None:
    """Its close touches nothing of its parent's, and it counts as a process without a channel."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        workload.close()
        os.write(write, this_target("g", "a", "n1").channel.encode() + b"|")
        os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(read, 100) == b"|"
    os.close(read)
    os.close(write)
    assert registered(world) == [workload.target]
    assert agent.ask("1", "suspend").ok


def test_with_holds_disabled_nothing_is_registered(world: World, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """TIMESLICE_DISABLE=1: no server is asked for, and close does nothing."""
    monkeypatch.setenv("TIMESLICE_DISABLE", "1")
    monkeypatch.delenv("TIMESLICE_URL")
    register_workload("g", on_suspend=model.suspend, on_restore=model.restore, job="a").close()
    assert "timeslice-workload-g" not in {thread.name for thread in threading.enumerate()}


def test_the_stream_has_a_cap_and_an_end(world: World, agent: Agent) -> None:
    """It neither grows nor stays for ever."""
    for number in range(300):
        agent.ask(f"{number}", "probe")
    assert world.redis.xlen(agent.stream) < 300
    assert 0 < world.redis.ttl(agent.stream) <= 3600
    assert text(world.redis.type(agent.stream)) == "stream"


def test_a_registration_that_is_refused_may_be_made_again(world: World, model: Model, started: list[Workload]) -> None:
    """Its record was too long: nobody has an object to close, so nothing of it stays, and holds don't tell it."""
    world.serve("g")
    many = tuple(f"{number:060}" for number in range(64))
    with pytest.raises(RefusedError, match="too long"):
        register_workload("g", on_suspend=model.suspend, on_restore=model.restore, job="a", tags=many, slots=many)
    with timeslice.hold("g", job="a"):
        assert [target.channel for target in registered(world)] == [""]
    started.append(register_workload("g", on_suspend=model.suspend, on_restore=model.restore, job="a", tags=many))
    assert registered(world) == [started[0].target]


def test_to_close_it_while_its_state_is_out_is_told(
    workload: Workload, agent: Agent, caplog: pytest.LogCaptureFixture
) -> None:
    """Its next grant brings nothing back."""
    agent.ask("1", "suspend")
    workload.close()
    assert [line for line in caplog.messages if "closed while its state is out" in line and "group g" in line]


def test_to_close_it_with_its_state_in_place_is_nothing_to_tell(
    workload: Workload, agent: Agent, caplog: pytest.LogCaptureFixture
) -> None:
    """Also after it was out and back."""
    agent.ask("1", "suspend")
    agent.ask("2", "restore")
    workload.close()
    assert not [line for line in caplog.messages if "its state is out" in line]
