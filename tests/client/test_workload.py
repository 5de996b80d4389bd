"""Workloads: callbacks of a job that are called over its own stream, whatever happens to the server."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.client.world import World
from tests.conftest import ServerFactory
from tests.support.jobs import wait_until
from tests.support.proxy import Proxy
from timeslice.arena import Arena, Device
from timeslice.client import workload as module
from timeslice.client.identity import this_target
from timeslice.client.workload import Busy, Workload, register_arena, register_workload
from timeslice.errors import InvalidNameError, UsageError
from timeslice.locks.keys import Keys
from timeslice.locks.scripts import text
from timeslice.models import ChannelAnswer, ChannelCommand, Residency, Target


class Model:
    """A workload's state, and what was asked of it."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.trouble: list[BaseException] = []
        self.gate = threading.Event()
        self.gate.set()
        self.threads: set[str] = set()

    def suspend(self, mode: str, tags: tuple[str, ...]) -> int:
        self._note("suspend", mode, tags)
        return 1000

    def restore(self, tags: tuple[str, ...]) -> int:
        self._note("restore", tags)
        return 1000

    def _note(self, *call: Any) -> None:
        self.threads.add(threading.current_thread().name)
        assert self.gate.wait(20)
        if self.trouble:
            raise self.trouble.pop(0)
        self.calls.append(call)


class Agent:
    """The other end of the stream."""

    def __init__(self, client: Any, prefix: str, target: Target) -> None:
        self._redis = client
        self.stream = Keys(prefix).channel(target.job, target.channel)

    def send(self, id: str, action: str, **fields: Any) -> str:  # noqa: A002
        """Place of the command on the stream."""
        command = ChannelCommand.model_validate({"id": id, "action": action, **fields})
        return text(self._redis.xadd(self.stream, {"kind": "command", "body": command.model_dump_json()}))

    def answers(self, id: str, after: str = "-") -> list[ChannelAnswer]:  # noqa: A002
        entries = [fields for _, fields in self._redis.xrange(self.stream, min=after)]
        bodies = [fields[b"body"] for fields in entries if fields.get(b"kind") == b"answer"]
        return [answer for answer in map(ChannelAnswer.model_validate_json, bodies) if answer.id == id]

    def answer(self, id: str, after: str = "-") -> ChannelAnswer:  # noqa: A002
        wait_until(lambda: bool(self.answers(id, after)), f"{id} is answered")
        return self.answers(id, after)[0]

    def ask(self, id: str, action: str, **fields: Any) -> ChannelAnswer:  # noqa: A002
        """The answer to just this command."""
        return self.answer(id, self.send(id, action, **fields))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look after the registration more often than a test wants to wait for."""
    monkeypatch.setattr(module, "REFRESH_S", 0.2)


@pytest.fixture
def model() -> Model:
    return Model()


@pytest.fixture
def started() -> Iterator[list[Workload]]:
    """Workloads to close after the test."""
    made: list[Workload] = []
    yield made
    for each in made:
        each.close()


@pytest.fixture
def workload(world: World, model: Model, started: list[Workload]) -> Workload:
    """One of job ``a`` in the served group ``g``."""
    world.serve("g")
    made = register_workload("g", on_suspend=model.suspend, on_restore=model.restore, job="a")
    started.append(made)
    return made


@pytest.fixture
def agent(world: World, workload: Workload, prefix: str) -> Agent:
    return Agent(world.redis, prefix, workload.target)


def registered(world: World, group: str = "g") -> list[Target]:
    records = world.redis.hgetall(world.group(group).targets).values()
    return [Target.model_validate_json(record) for record in records]


def test_a_workload_is_registered_as_a_target(world: World, workload: Workload) -> None:
    """The agent finds this process with its channel and what it can do."""
    (target,) = registered(world)
    assert target == workload.target
    assert (target.pid, target.job, target.host, target.modes) == (os.getpid(), "a", "n1", ("offload",))
    assert target.channel


def test_callbacks_are_called_on_a_thread_of_their_own(agent: Agent, model: Model) -> None:
    """Suspend and restore with their arguments; the answers carry state, bytes and time."""
    out = agent.ask("1", "suspend", tags=())
    assert (out.ok, out.state, out.moved_bytes, out.host_bytes) == (True, Residency.SUSPENDED, 1000, 1000)
    assert agent.ask("2", "probe").state is Residency.SUSPENDED
    back = agent.ask("3", "restore")
    assert (back.ok, back.state, back.device_bytes) == (True, Residency.RESIDENT, 1000)
    assert model.calls == [("suspend", "offload", ()), ("restore", ())]
    assert model.threads == {"timeslice-workload-g"}


def test_a_command_that_arrives_twice_is_done_once(agent: Agent, model: Model) -> None:
    """The same id gets the same answer."""
    first = agent.ask("1", "suspend")
    assert agent.ask("1", "suspend") == first
    assert len(model.calls) == 1


def test_old_answers_are_repeated_after_many_others(agent: Agent, model: Model) -> None:
    """The last 64 are kept."""
    first = agent.ask("first", "suspend")
    agent.ask("back", "restore")
    for number in range(62):
        agent.ask(f"p{number}", "probe")
    assert agent.ask("first", "suspend") == first
    assert len(model.calls) == 2


def test_what_is_done_already_is_not_done_again(agent: Agent, model: Model) -> None:
    """Under a new id too: a repeat of a whole step by an agent that lost its memory."""
    agent.ask("1", "suspend")
    again = agent.ask("2", "suspend")
    assert (again.ok, again.moved_bytes, again.state) == (True, 0, Residency.SUSPENDED)
    agent.ask("3", "restore")
    agent.ask("4", "restore")
    assert len(model.calls) == 2


@pytest.mark.parametrize("trouble", [Busy(), Busy("in a batch")])
def test_busy_asks_to_be_asked_again(agent: Agent, model: Model, trouble: Busy) -> None:
    """The answer says busy, nothing is recorded as done, and the next attempt works."""
    model.trouble = [trouble]
    first = agent.ask("1", "suspend")
    assert (first.ok, first.busy) == (False, True)
    assert str(trouble) in first.error
    assert agent.ask("2", "probe").state is Residency.RESIDENT
    assert agent.ask("3", "suspend").ok


@pytest.mark.parametrize("trouble", [RuntimeError("out of luck"), SystemExit(3)])
def test_a_callback_that_fails_is_answered_with_its_words(agent: Agent, model: Model, trouble: BaseException) -> None:
    """The thread lives on, and the state is what it was."""
    model.trouble = [trouble]
    answer = agent.ask("1", "suspend")
    assert (answer.ok, answer.busy) == (False, False)
    assert type(trouble).__name__ in answer.error
    assert agent.ask("2", "probe").state is Residency.RESIDENT
    assert agent.ask("3", "suspend").ok


def test_a_mode_that_was_not_registered_is_refused(agent: Agent, model: Model) -> None:
    """Whoever sends it: nothing is dropped that the job did not offer to drop."""
    answer = agent.ask("1", "suspend", mode="discard")
    assert not answer.ok
    assert "discard" in answer.error
    assert model.calls == []


def test_nonsense_on_the_stream_is_passed_over(world: World, agent: Agent) -> None:
    """Wire input is validated; the next command is heard."""
    for body in ("", "{", '{"id": "1", "action": "format"}'):
        world.redis.xadd(agent.stream, {"kind": "command", "body": body})
    world.redis.xadd(agent.stream, {"other": "field"})
    assert agent.ask("2", "probe").ok


def test_tags_are_parts_of_the_state(world: World, model: Model, started: list[Workload], prefix: str) -> None:
    """A part that is out already is not moved again; with one part out the job can't run."""
    world.serve("g")
    made = register_workload(
        "g", on_suspend=model.suspend, on_restore=model.restore, job="a", tags=("weights", "kv"), modes=("discard",)
    )
    started.append(made)
    agent = Agent(world.redis, prefix, made.target)
    agent.ask("1", "suspend", mode="discard", tags=("kv",))
    agent.ask("2", "suspend", mode="discard", tags=("kv",))
    agent.ask("3", "suspend", mode="discard")
    agent.ask("4", "restore", tags=("weights",))
    assert agent.ask("5", "probe").state is Residency.SUSPENDED
    agent.ask("6", "restore")
    assert agent.ask("7", "probe").state is Residency.RESIDENT
    assert model.calls == [
        ("suspend", "discard", ("kv",)),
        ("suspend", "discard", ()),
        ("restore", ("weights",)),
        ("restore", ()),
    ]


def test_two_roles_in_one_process_do_not_hear_each_other(
    world: World, model: Model, workload: Workload, started: list[Workload], prefix: str
) -> None:
    """F04: the trainer's command leaves the sampler of the same job alone."""
    world.serve("samplers")
    sampler = Model()
    made = register_workload("samplers", on_suspend=sampler.suspend, on_restore=sampler.restore, job="a")
    started.append(made)
    Agent(world.redis, prefix, workload.target).ask("1", "suspend")
    assert Agent(world.redis, prefix, made.target).ask("2", "probe").state is Residency.RESIDENT
    assert (len(model.calls), sampler.calls) == (1, [])


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


async def test_coroutine_callbacks_run_on_the_loop(world: World, started: list[Workload], prefix: str) -> None:
    """Registered inside of one, they run on it, with its timers and locks."""
    world.serve("g")
    loops = []

    async def move(*_: Any) -> int:
        await asyncio.sleep(0)
        loops.append(asyncio.get_running_loop())
        return 7

    made = register_workload("g", on_suspend=move, on_restore=move, job="a")
    started.append(made)
    agent = Agent(world.redis, prefix, made.target)
    answer = await asyncio.to_thread(agent.ask, "1", "suspend")
    assert (answer.ok, answer.moved_bytes) == (True, 7)
    assert loops == [asyncio.get_running_loop()]
    await asyncio.to_thread(made.close)


def test_a_coroutine_callback_needs_a_loop(world: World, model: Model) -> None:
    """Said at registration, not at the first swap."""

    async def move(*_: Any) -> None: ...

    with pytest.raises(UsageError, match="event loop"):
        register_workload("g", on_suspend=move, on_restore=model.restore, job="a")


def test_an_arena_moves_as_a_whole(world: World, started: list[Workload], prefix: str, tmp_path: Path) -> None:
    """register_arena: bytes leave the device and come back; with nothing allocated it is absent (F01)."""
    world.serve("g")
    device = Device.create(tmp_path / "device", 4 << 20)
    with Arena(device) as arena:
        made = register_arena("g", arena, job="a")
        started.append(made)
        agent = Agent(world.redis, prefix, made.target)
        assert agent.ask("1", "probe").state is Residency.ABSENT
        view = arena.allocate(1 << 20)
        view[:3] = b"abc"
        out = agent.ask("2", "suspend")
        assert (out.state, out.moved_bytes, out.device_bytes, out.host_bytes) == (
            Residency.SUSPENDED, 1 << 20, 0, 1 << 20,
        )  # fmt: skip
        assert device.used_bytes() == 0
        assert agent.ask("3", "restore").state is Residency.RESIDENT
        assert bytes(view[:3]) == b"abc"
        del view
    assert agent.ask("4", "probe").state is Residency.ABSENT  # closed
    device.destroy()


def test_a_probe_sees_what_the_job_did_by_itself(world: World, started: list[Workload], prefix: str) -> None:
    """Observed state beats what the workload was last told."""
    world.serve("g")
    state = [Residency.RESIDENT]
    calls = []
    made = register_workload(
        "g",
        on_suspend=lambda *_: calls.append("suspend"),
        on_restore=lambda *_: calls.append("restore"),
        probe=lambda: (state[0], 5, 6),
        job="a",
    )
    started.append(made)
    agent = Agent(world.redis, prefix, made.target)
    state[0] = Residency.SUSPENDED
    answer = agent.ask("1", "suspend")
    assert (answer.ok, answer.state, answer.device_bytes, answer.host_bytes) == (True, Residency.SUSPENDED, 5, 6)
    agent.ask("2", "restore")
    assert calls == ["restore"]


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
