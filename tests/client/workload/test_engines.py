"""Objects and engines that are registered as they are."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from tests.client.workload.conftest import Agent
from tests.client.workload.vllm_standin import LLM, AsyncLLM
from tests.client.world import World
from timeslice.client.callbacks import Moved
from timeslice.client.workload import Workload, register_workload
from timeslice.errors import UsageError
from timeslice.models import Residency

KEPT = b"weights as they were loaded"


class Adapters:
    """A workload that moves itself, one adapter at a time."""

    modes = ("offload", "discard")
    tags = ("base", "adapter")
    slots = ("red", "blue")

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.state = Residency.RESIDENT

    def suspend(self, mode: str, tags: tuple[str, ...], slot: str) -> Moved:
        self.calls.append((mode, tags, slot))
        self.state = Residency.SUSPENDED
        return Moved(bytes=30, saved=70)

    async def restore(self, tags: tuple[str, ...], slot: str) -> int:
        self.calls.append((tags, slot))
        self.state = Residency.RESIDENT
        return 100

    def probe(self) -> tuple[str, int, int, dict[str, int]]:
        return self.state, 100, 70, {"base": 60, "adapter": 40}


@pytest.fixture
def served(world: World) -> World:
    world.serve("g")
    return world


def reach(world: World, made: Workload, prefix: str, started: list[Workload]) -> Agent:
    started.append(made)
    return Agent(world.redis, prefix, made.target)


async def test_an_object_is_asked_by_its_methods(served: World, prefix: str, started: list[Workload]) -> None:
    """What it can do is registered; slot, saved bytes and bytes by tag travel; methods may be coroutine functions."""
    thing = Adapters()
    made = register_workload("g", thing, job="a")
    agent = reach(served, made, prefix, started)
    assert (made.target.modes, made.target.tags, made.target.slots) == (thing.modes, thing.tags, thing.slots)
    out = await asyncio.to_thread(agent.ask, "1", "suspend", tags=("adapter",), slot="blue")
    assert (out.state, out.moved_bytes, out.saved_bytes) == (Residency.SUSPENDED, 30, 70)
    assert (out.device_bytes, out.host_bytes, out.parts) == (100, 70, {"base": 60, "adapter": 40})
    back = await asyncio.to_thread(agent.ask, "2", "restore")
    assert (back.state, back.moved_bytes) == (Residency.RESIDENT, 100)
    assert thing.calls == [("offload", ("adapter",), "blue"), ((), "")]
    await asyncio.to_thread(made.close)


def test_what_an_object_can_may_be_narrowed(served: World, started: list[Workload]) -> None:
    """G21: a job that needs its state says "keep only", whatever the object could do."""
    made = register_workload("g", LLM(), job="a", modes=("offload",), tags=())
    started.append(made)
    assert (made.target.modes, made.target.tags) == (("offload",), ())


@pytest.mark.parametrize(
    ("thing", "words"),
    [
        (object(), ["lacks suspend() and restore()", "lacks sleep() and wake_up()", "on_suspend="]),
        (SimpleNamespace(suspend=print), ["has suspend()", "lacks restore()"]),
        (SimpleNamespace(restore=print, suspend=3), ["has restore()", "lacks suspend()"]),
        (SimpleNamespace(wake_up=print), ["has wake_up()", "lacks sleep()"]),
        (LLM(enable_sleep_mode=False), ["enable_sleep_mode=True"]),
        (None, ["on_suspend= and on_restore="]),
    ],
)
def test_a_wrong_object_is_told_what_it_lacks(served: World, thing: Any, words: list[str]) -> None:
    """At registration, not at the first swap; nothing is registered."""
    with pytest.raises(UsageError) as caught:
        register_workload("g", thing, job="a")
    assert [word for word in words if word not in str(caught.value)] == []
    assert not served.redis.hgetall(served.group("g").targets)


def test_an_object_and_callbacks_are_too_much(served: World) -> None:
    """It would not be clear who is asked."""
    with pytest.raises(UsageError, match="not both"):
        register_workload("g", Adapters(), on_suspend=print, on_restore=print, job="a")


def test_an_engine_sleeps_and_wakes_up(served: World, prefix: str, started: list[Workload]) -> None:
    """vLLM's LLM: level 1 for offload, all that sleeps is woken up, and the weights are those from before."""
    llm = LLM()
    agent = reach(served, register_workload("g", llm, job="a"), prefix, started)
    assert agent.ask("1", "suspend").state is Residency.SUSPENDED
    assert not llm.core.weights
    assert agent.ask("2", "restore").state is Residency.RESIDENT
    assert llm.core.weights == KEPT
    assert llm.core.calls == [("sleep", 1, "abort"), ("wake_up", "weights", "kv_cache")]


def test_an_engine_drops_its_weights_only_when_asked(served: World, prefix: str, started: list[Workload]) -> None:
    """G21: level 2 is for discard, and nothing else."""
    llm = LLM()
    agent = reach(served, register_workload("g", llm, job="a"), prefix, started)
    agent.ask("1", "suspend", mode="discard")
    agent.ask("2", "restore")
    assert llm.core.calls[0] == ("sleep", 2, "abort")
    assert llm.core.weights != KEPT


def test_only_what_sleeps_is_woken_up(served: World, prefix: str, started: list[Workload]) -> None:
    """By tags: weights first, the cache later; the job can't run before. Waking what is awake would end the engine."""
    llm = LLM()
    agent = reach(served, register_workload("g", llm, job="a"), prefix, started)
    agent.ask("1", "suspend")
    assert agent.ask("2", "restore", tags=("weights",)).state is Residency.SUSPENDED
    assert agent.ask("3", "restore", tags=("weights",)).ok
    back = agent.ask("4", "restore")
    assert (back.ok, back.state) == (True, Residency.RESIDENT)
    assert llm.core.calls[1:] == [("wake_up", "weights"), ("wake_up", "kv_cache")]


def test_an_engine_sleeps_as_a_whole(served: World, prefix: str, started: list[Workload]) -> None:
    """It can't part with one tag only; it says so, and is awake."""
    llm = LLM()
    agent = reach(served, register_workload("g", llm, job="a"), prefix, started)
    answer = agent.ask("1", "suspend", tags=("kv_cache",))
    assert not answer.ok
    assert "as a whole" in answer.error
    assert agent.ask("2", "suspend", tags=("kv_cache", "weights")).ok


def test_an_engine_with_work_is_busy(served: World, prefix: str, started: list[Workload]) -> None:
    """G19: no memory is freed under a request, and none is aborted."""
    llm = LLM()
    agent = reach(served, register_workload("g", llm, job="a"), prefix, started)
    llm.core.requests = ["r1"]
    answer = agent.ask("1", "suspend")
    assert (answer.ok, answer.busy) == (False, True)
    assert "unfinished requests" in answer.error
    assert llm.core.calls == []
    llm.core.requests = []
    assert agent.ask("2", "suspend").ok
    assert llm.core.aborted == []


def test_an_engine_whose_cache_is_in_use_is_busy(
    served: World, prefix: str, started: list[Workload], monkeypatch: pytest.MonkeyPatch
) -> None:
    """G19: a prefix cache that can't be emptied has blocks that somebody reads."""
    llm = LLM()
    agent = reach(served, register_workload("g", llm, job="a"), prefix, started)
    monkeypatch.setattr(llm.core, "reset_prefix_cache", lambda: False)
    assert agent.ask("1", "suspend").busy
    assert llm.core.calls == []


def test_a_paused_scheduler_is_no_sleep(served: World, prefix: str, started: list[Workload]) -> None:
    """The engine says "sleeping" with all its memory on the device: it is still to be suspended."""
    llm = LLM()
    agent = reach(served, register_workload("g", llm, job="a"), prefix, started)
    llm.core.sleep(0, "keep")
    assert agent.ask("1", "probe").state is Residency.RESIDENT
    agent.ask("2", "suspend")
    assert llm.core.weights is None


def test_an_engine_that_the_job_woke_up_is_awake(served: World, prefix: str, started: list[Workload]) -> None:
    """What is observed counts: it is not woken up twice, and may be put to sleep again."""
    llm = LLM()
    agent = reach(served, register_workload("g", llm, job="a"), prefix, started)
    agent.ask("1", "suspend")
    llm.wake_up()
    assert agent.ask("2", "restore").state is Residency.RESIDENT
    assert agent.ask("3", "suspend").state is Residency.SUSPENDED
    assert llm.core.weights is None


async def test_an_async_engine_is_awaited_on_its_loop(served: World, prefix: str, started: list[Workload]) -> None:
    """AsyncLLM: its methods run on the loop that it was registered on."""
    llm = AsyncLLM()
    made = register_workload("g", llm, job="a")
    agent = reach(served, made, prefix, started)
    llm.core.requests = ["r1"]
    assert (await asyncio.to_thread(agent.ask, "1", "suspend")).busy
    llm.core.requests = []
    assert (await asyncio.to_thread(agent.ask, "2", "suspend")).state is Residency.SUSPENDED
    assert (await asyncio.to_thread(agent.ask, "3", "restore")).state is Residency.RESIDENT
    assert (llm.core.weights, llm.loops) == (KEPT, {asyncio.get_running_loop()})
    await asyncio.to_thread(made.close)


async def test_an_async_engine_lets_late_requests_end(
    served: World, prefix: str, started: list[Workload], monkeypatch: pytest.MonkeyPatch
) -> None:
    """G19: one that arrives between the look and the sleep is waited for; by itself vLLM would abort it."""
    llm = AsyncLLM()
    made = register_workload("g", llm, job="a")
    agent = reach(served, made, prefix, started)

    async def arrives(reset_running_requests: bool = False) -> bool:
        llm.core.requests.append("late")
        asyncio.get_running_loop().call_later(0.05, llm.core.requests.clear)
        return True

    monkeypatch.setattr(llm, "reset_prefix_cache", arrives)
    assert (await asyncio.to_thread(agent.ask, "1", "suspend")).ok
    assert llm.core.aborted == []
    assert llm.core.calls == [("sleep", 1, "wait")]
    await asyncio.to_thread(made.close)


def test_an_async_engine_needs_a_loop(served: World) -> None:
    """Said at registration."""
    with pytest.raises(UsageError, match="event loop"):
        register_workload("g", AsyncLLM(), job="a")
