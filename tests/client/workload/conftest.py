"""A workload in this process, and the other end of its stream."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.client.world import World
from tests.support.jobs import wait_until
from timeslice.client import workload as module
from timeslice.client.workload import Workload, register_workload
from timeslice.locks.keys import Keys
from timeslice.locks.scripts import text
from timeslice.models import ChannelAnswer, ChannelCommand, Target


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
