"""A job as its author's type checker sees it. Nothing here runs; tests/client/test_types.py checks it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import assert_type

import timeslice
from timeslice import AsyncLease, Hold, Lease, OnLost


def one_group() -> None:
    with timeslice.hold("trainers", phase="train", timeout=5) as lease:
        assert_type(lease, Lease)
        assert_type(lease.fencing_token, int)
        assert_type(lease.lost.is_set(), bool)
        assert_type(lease.grant, timeslice.Grant)
        assert_type(lease.yield_point(min_slice=1), bool)


def several_groups(names: list[str]) -> None:
    with timeslice.hold("trainers", "samplers") as (trainers, samplers):
        assert_type(trainers, Lease)
        assert_type(samplers, Lease)
    with timeslice.hold("a", "b", "c") as leases:
        assert_type(leases, tuple[Lease, Lease, Lease])
    with timeslice.hold(*names) as some:
        print(some)


async def in_a_loop() -> None:
    async with timeslice.hold("trainers") as lease:
        assert_type(lease, AsyncLease)
        assert_type(await lease.yield_point(), bool)
    async with timeslice.AsyncClient() as client, client.hold("a", "b") as both:
        assert_type(both, tuple[AsyncLease, AsyncLease])
        assert_type(await client.acquire("c"), AsyncLease)


def with_a_client() -> None:
    with timeslice.Client(job="a") as client:
        with client.hold("trainers") as lease:
            assert_type(lease, Lease)
        assert_type(client.acquire("trainers"), Lease)


def kept(hold: Hold) -> Lease:
    with hold as lease:
        return lease


def passed_on(client: timeslice.Client) -> None:
    kept(timeslice.hold("trainers"))
    kept(client.hold("trainers"))


@timeslice.hold("trainers")
def train(step: int, *, lr: float = 0.1) -> str:
    return f"{step} {lr}"


@timeslice.hold("trainers", "samplers")
async def sync_weights(step: int) -> bytes:
    return bytes(step)


@timeslice.phase("verify")
def score(answer: str) -> float:
    return float(answer)


class Trainer:
    @timeslice.hold("trainers")
    def step(self, number: int) -> float:
        return number / 2

    @timeslice.hold("trainers")
    @staticmethod
    def load(path: str) -> bytes:
        return path.encode()


async def decorated() -> None:
    assert_type(train(3, lr=0.5), str)
    assert_type(await sync_weights(3), bytes)
    assert_type(score("1"), float)
    assert_type(Trainer().step(1), float)
    assert_type(Trainer.load("x"), bytes)
    assert_type(timeslice.hold("trainers")(functools.partial(train, 1))(), str)


def save(lease: Lease) -> None:
    print(lease.group)


def losses(stop: Callable[[], None]) -> None:
    on_lost: OnLost = save
    timeslice.hold("trainers", on_lost=on_lost)
    timeslice.hold("trainers", on_lost=lambda lease: print(lease.group))
    timeslice.Client().acquire("trainers", on_lost=save)


def suspend(mode: str, tags: tuple[str, ...]) -> int:
    return len(mode) + len(tags)


def registered() -> timeslice.Workload:
    made = timeslice.register_workload(
        "trainers",
        on_suspend=suspend,
        on_restore=len,
        probe=lambda: (timeslice.Residency.RESIDENT, 1, 0),
        leave=timeslice.Leave(mode="discard"),
    )
    assert_type(made, timeslice.Workload)
    return made


def as_in_llm_d(client: timeslice.TimeSliceOrchestratorClient) -> None:
    with client.on_accelerators(group_id="trainers") as result:
        assert_type(result, timeslice.AcquireResult)
    assert_type(client.release(), timeslice.YieldResult)
    try:
        client.get_status()
    except (timeslice.RefusedError, timeslice.ServerUnsuitableError) as error:
        assert_type(error.group, str | None)
