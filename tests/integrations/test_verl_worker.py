"""The mix-in on a worker of the shape of veRL's hybrid engine."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import pytest

from tests.integrations.conftest import Pools
from tests.support.jobs import wait_until
from timeslice import Client
from timeslice.integrations.verl_worker import TimesliceWorkerMixin, _on_a_thread

F = TypeVar("F", bound=Callable[..., Any])
BOTH, TRAINER, SAMPLER, NONE = ("mine", "mine"), ("mine", ""), ("", "mine"), ("", "")


def register(mode: str) -> Callable[[F], F]:
    """As veRL marks what its controller may dispatch: by an attribute of the function."""

    def mark(function: F) -> F:
        function.attrs_3141562937 = {"dispatch_mode": mode}  # type: ignore[attr-defined]
        return function

    return mark


class HybridWorker:
    """After ``ActorRolloutRefWorker`` of ``verl/workers/fsdp_workers.py`` (veRL 0.7); each method tells who held."""

    def __init__(self, pools: Pools) -> None:
        self.holders = pools.holders

    @register("ONE_TO_ALL")
    def init_model(self) -> tuple[str, str]:
        return self.holders()

    @register("train")
    def update_actor(self, data: str) -> tuple[str, str]:
        if not data:
            raise RuntimeError("no data")
        return self.holders()

    def compute_log_prob(self, data: str) -> tuple[str, str]:
        return self.holders()

    def save_checkpoint(self, local_path: str, global_step: int = 0) -> tuple[str, str]:
        return self.holders()

    @register("rollout")
    def generate_sequences(self, prompts: str) -> tuple[str, str]:
        return self.holders()

    async def update_weights(self) -> tuple[str, str]:
        return self.holders()

    async def rollout_mode(self) -> tuple[str, str]:
        return self.holders()

    async def trainer_mode(self) -> tuple[str, str]:
        return self.holders()

    async def sleep(self) -> tuple[str, str]:
        return self.holders()

    def world(self) -> tuple[str, str]:
        return self.holders()


class Worker(TimesliceWorkerMixin, HybridWorker):
    pass


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """What veRL sets for each worker."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")


@pytest.fixture
def worker(pools: Pools) -> Worker:
    return Worker(pools)


RANK = """
from timeslice.integrations.verl_worker import TimesliceWorkerMixin
os.environ |= {{"RANK": "{rank}", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}}

class Actor:
    def update_actor(self, data):
        say(data)
        hear()

class Worker(TimesliceWorkerMixin, Actor): pass

worker = Worker()
say("made")
hear()
worker.update_actor("inside")
say("out")
hear()
"""


def test_the_ranks_of_a_worker_group_hold_together(pools: Pools) -> None:
    """One lease for both: the first waits for the second, and the group is free when the last one is out."""
    ranks = [pools.start(RANK.format(rank=rank), "a") for rank in range(2)]
    assert [rank.line() for rank in ranks] == ["made"] * 2
    ranks[0].tell()
    wait_until(lambda: [each.missing for each in pools.view("trainers").forming] == [(1,)], "rank 1 is waited for")
    assert pools.holders() == NONE
    ranks[1].tell()
    assert [rank.line() for rank in ranks] == ["inside"] * 2
    ranks[0].tell()
    assert ranks[0].line() == "out"
    assert pools.holders() == ("a", "")
    ranks[1].tell()
    assert ranks[1].line() == "out"
    assert pools.holders() == NONE
    assert pools.grants("trainers") == [("a", "train")]


async def test_each_method_holds_what_it_uses(pools: Pools, worker: Worker) -> None:
    """Inside of a method the groups of its role are held, afterwards none; other methods hold nothing."""
    assert worker.init_model() == BOTH
    assert worker.update_actor("data") == TRAINER
    assert worker.compute_log_prob("data") == TRAINER
    assert worker.save_checkpoint("path", global_step=1) == TRAINER
    assert worker.generate_sequences("prompts") == SAMPLER
    assert await worker.update_weights() == BOTH
    assert worker.world() == NONE
    assert pools.holders() == NONE
    assert pools.phases("trainers", "mine") == ["init", "train", "train", "save", "weight_sync"]


def test_the_controller_finds_its_marks() -> None:
    """veRL dispatches by attributes of the functions; the held ones have them too."""
    assert Worker.update_actor.attrs_3141562937 == {"dispatch_mode": "train"}  # type: ignore[attr-defined]
    assert Worker.update_actor.__name__ == "update_actor"


async def test_the_sampler_is_held_in_rollout_mode(pools: Pools, worker: Worker) -> None:
    """From rollout_mode to trainer_mode, whoever asks for tokens in between; the switch itself needs both."""
    assert await worker.rollout_mode() == BOTH
    assert pools.holders() == SAMPLER
    assert worker.generate_sequences("prompts") == SAMPLER
    assert await worker.rollout_mode() == BOTH  # again: still one hold
    assert await worker.trainer_mode() == SAMPLER
    assert pools.holders() == NONE
    assert pools.phases("samplers", "mine") == ["weight_sync"]


async def test_sleep_without_a_rollout_is_held_for_itself(pools: Pools, worker: Worker) -> None:
    """veRL lets the engine sleep before it loads a checkpoint."""
    assert await worker.sleep() == SAMPLER
    assert pools.holders() == NONE


def test_an_error_lets_go(pools: Pools, worker: Worker) -> None:
    """It comes through, and nothing stays held."""
    with pytest.raises(RuntimeError, match="no data"):
        worker.update_actor("")
    assert pools.holders() == NONE


def test_subclasses_hold_once(pools: Pools) -> None:
    """A class derived from a held one takes each group once a call, also where it overrides and calls super."""

    class Mine(Worker):
        def update_actor(self, data: str) -> tuple[str, str]:
            return super().update_actor(data)

    mine = Mine(pools)
    assert mine.update_actor("data") == TRAINER
    assert mine.save_checkpoint("path") == TRAINER
    assert pools.phases("trainers", "mine") == ["train", "save"]


async def test_the_event_loop_runs_while_a_method_waits(pools: Pools, worker: Worker) -> None:
    """A coroutine method waits without stopping the others; cancelled, it leaves nothing held."""
    with Client(job="rival") as rival:
        rival.acquire("trainers")
        waiting = asyncio.create_task(worker.update_weights())
        async with asyncio.timeout(20):
            while pools.queue("trainers") != ["mine"]:
                await asyncio.sleep(0.005)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    async with asyncio.timeout(20):
        while pools.queue("trainers") or pools.holders() != NONE or not pools.phases("samplers", "mine"):
            await asyncio.sleep(0.005)


class Door(AbstractContextManager[None]):
    """Opens when it is told to."""

    def __init__(self) -> None:
        self.opens, self.left = threading.Event(), threading.Event()

    def __enter__(self) -> None:
        assert self.opens.wait(60)

    def __exit__(self, *_: object) -> None:
        self.left.set()


async def test_what_is_entered_after_a_cancel_is_left() -> None:
    """What a cancelled wait gets in the end is let go by itself, and not when it happens to be collected."""
    door = Door()

    async def enter() -> None:
        async with _on_a_thread(door):
            raise AssertionError("nobody waits any more")

    entering = asyncio.create_task(enter())
    await asyncio.sleep(0)
    entering.cancel()
    with pytest.raises(asyncio.CancelledError):
        await entering
    door.opens.set()
    assert await asyncio.to_thread(door.left.wait, 20)
