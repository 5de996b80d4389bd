"""Callbacks of a job that are called over its own stream."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest

from tests.client.workload.conftest import Agent, Model
from tests.client.world import World
from timeslice.arena import Arena, Device
from timeslice.client.workload import Busy, Moved, Workload, register_arena, register_workload
from timeslice.errors import UsageError
from timeslice.models import Residency


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


class SpeechlessError(Exception):
    def __str__(self) -> str:
        raise ValueError("not even that")


@pytest.mark.parametrize(
    "trouble",
    [
        RuntimeError("out of luck"),
        RuntimeError("can't read /data/\udcff.pt"),
        SpeechlessError(),
        SystemExit(3),
        asyncio.CancelledError(),
        KeyboardInterrupt(),
    ],
)
def test_a_callback_that_fails_is_answered_with_its_words(
    agent: Agent, model: Model, trouble: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    """The thread lives on, and the state is what it was: whatever it raised, and whatever that says."""
    caplog.set_level(logging.CRITICAL, "timeslice")  # pytest-xdist can't pass on a log with a lone surrogate
    model.trouble = [trouble]
    answer = agent.ask("1", "suspend")
    assert (answer.ok, answer.busy) == (False, False)
    assert type(trouble).__name__ in answer.error
    assert agent.ask("2", "probe").state is Residency.RESIDENT
    assert agent.ask("3", "suspend").ok


@pytest.mark.parametrize("result", ["done", float("nan"), float("inf"), -5, 1 << 80, [1, 2], Moved(bytes=-1, saved=-1)])
def test_what_a_callback_returns_undoes_nothing(
    world: World, started: list[Workload], prefix: str, result: object
) -> None:
    """Its state has moved by then, and so it is told, also where what it returned is no number of bytes."""
    world.serve("g")
    calls: list[str] = []

    def suspend(*_: object) -> object:
        calls.append("suspend")
        return result

    def restore(*_: object) -> object:
        calls.append("restore")
        return result

    started.append(register_workload("g", on_suspend=suspend, on_restore=restore, job="a"))
    agent = Agent(world.redis, prefix, started[-1].target)
    out = agent.ask("1", "suspend")
    assert (out.ok, out.state) == (True, Residency.SUSPENDED)
    back = agent.ask("2", "restore")
    assert (back.ok, back.state) == (True, Residency.RESIDENT)
    assert calls == ["suspend", "restore"]


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
