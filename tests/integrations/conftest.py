"""Drivers of the shape of slime's and veRL's, against groups that are plain locks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.client.world import Job, World
from timeslice.integrations.phases import PhaseCallback
from timeslice.locks import scripts

MINIATURES = Path(__file__).parent / "miniatures"
Grants = list[tuple[str, str]]


class Pools(World):
    """A trainers' and a samplers' group, and jobs that use them."""

    def __init__(self, url: str, prefix: str) -> None:
        super().__init__(url, prefix)
        for name in ("trainers", "samplers"):
            self.redis.sadd(self.keys.groups, name)
            self.run(scripts.configure(self.group(name), {}, mode="lock"))

    def grants(self, group: str) -> Grants:
        """Job and phase of each grant, in order."""
        return [(event["job"], event["label"]) for event in self.events(group) if event["type"] == "LeaseGranted"]

    def phases(self, group: str, job: str) -> list[str]:
        return [phase for whose, phase in self.grants(group) if whose == job]

    def holders(self) -> tuple[str, str]:
        return self.holder("trainers"), self.holder("samplers")

    def cancel(self, group: str) -> None:
        """What an operator does to the only waiter."""
        (waiter,) = self.view(group).queue
        self.run(scripts.cancel(self.group(group), waiter.waiter, by="operator"))

    def take_away(self, group: str) -> None:
        """Another job gets the group at once; its holder learns of that with the next renewal, or as it yields."""
        state = self.view(group).state
        self.run(
            scripts.revoke(
                self.group(group), state["job"], state["lease_id"], int(state["token"]), "ops", "drill", at_once=True
            )
        )

    def start(self, code: str, job: str, *, dies: bool = False) -> Job:
        """A process that runs ``code``. One that dies in mid-phase is out after two seconds; others may stand still
        for longer than that on a busy machine."""
        return self.job(f"timeslice.Client.hold.__kwdefaults__['lease'] = 2\n{code}" if dies else code, job=job)


@pytest.fixture
def pools(redis_url: str, prefix: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Pools]:
    monkeypatch.setenv("TIMESLICE_URL", redis_url)
    monkeypatch.setenv("TIMESLICE_PREFIX", prefix)
    monkeypatch.setenv("TIMESLICE_NODE", "n1")
    monkeypatch.setenv("TIMESLICE_JOB_ID", "mine")
    monkeypatch.setenv("TIMESLICE_TRAINER_GROUP", "trainers")
    monkeypatch.setenv("TIMESLICE_SAMPLER_GROUP", "samplers")
    monkeypatch.setenv("TEST_DEVICES", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(MINIATURES), os.environ.get("PYTHONPATH")))))
    made = Pools(redis_url, prefix)
    yield made
    made.close()


@pytest.fixture
def callback(pools: Pools) -> Iterator[PhaseCallback]:
    made = PhaseCallback()
    yield made
    made.close()
