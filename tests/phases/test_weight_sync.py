"""Weights that are missed stay missed until a hold with `phase="weight_sync"` has done its work to the end."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import pytest

import timeslice
from tests.cli.conftest import Cli
from tests.client.faces import in_thread
from tests.client.world import World
from tests.support.jobs import DEADLINE_S, wait_until
from timeslice import AcquireTimeoutError, AsyncClient, Client
from timeslice.integrations.phases import PhaseCallback
from timeslice.integrations.verl_worker import TimesliceWorkerMixin


@pytest.fixture(autouse=True)
def missed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Job a's content of g and h was dropped while it was out; it is back."""
    monkeypatch.setenv("TIMESLICE_JOB", "a")
    world.serve("g", "h")
    for group in ("g", "h"):
        world.redis.hset(world.group(group).jobs, mapping={"a/residency": "resident", "a/needs_weights": "1"})


def misses(world: World, group: str = "g") -> bool:
    wait_until(lambda: not world.holder(group), f"{group} is free")
    return world.view(group).jobs["a"].needs_weights


def sync(**options: Any) -> Any:
    return timeslice.hold("g", phase="weight_sync", **options)


@pytest.mark.parametrize("fails", [0, 1, None])
def test_each_rank_of_a_gang_must_have_brought_them(world: World, fails: int | None) -> None:
    """Whoever leaves last: one that failed keeps the flag. Of the gang nothing is left behind."""
    with Client() as one, Client() as two:
        holds = [
            client.hold("g", phase="weight_sync", rank=rank, world_size=2) for rank, client in enumerate((one, two))
        ]
        for entering in [in_thread(hold.__enter__) for hold in holds]:
            entering.result(DEADLINE_S)
        for rank, hold in enumerate(holds):
            error = ZeroDivisionError() if rank == fails else None
            hold.__exit__(type(error) if error else None, error, None)
    assert misses(world) is (fails is not None)
    assert world.redis.hgetall(world.group().waiters) == {}


def test_a_body_that_never_ran_has_brought_none(world: World) -> None:
    """The second group can't be had in time: the first is given back as it was."""
    with Client() as other, other.hold("h"):
        both = in_thread(lambda: timeslice.hold("g", "h", phase="weight_sync", timeout=0.2).__enter__())
        with pytest.raises(AcquireTimeoutError):
            both.result(DEADLINE_S)
    assert misses(world)


def test_an_interrupt_before_the_body(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the grant and the body nothing was brought."""

    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("timeslice.client.hold.put", interrupt)
    with pytest.raises(KeyboardInterrupt):
        sync().__enter__()
    assert misses(world)


def test_a_client_that_closes_tells_of_no_end(world: World) -> None:
    """What it yields for its user may have failed half-way; who yields a lease by hand says nothing either."""
    with contextlib.suppress(ZeroDivisionError), Client() as client:
        client.acquire("g", phase="weight_sync")
        raise ZeroDivisionError
    assert misses(world)
    with Client() as client:
        client.acquire("g", phase="weight_sync").yield_()
    assert misses(world)


@pytest.mark.parametrize(("command", "fails"), [("false", True), ("no-such-interpreter", True), ("true", False)])
def test_the_exit_code_of_a_command_tells(world: World, cli: Cli, tmp_path: Path, command: str, fails: bool) -> None:
    """`timeslice hold g --phase weight_sync -- COMMAND`: one that failed, or could not be run, has brought none."""
    if command.startswith("no"):
        script = tmp_path / "script"
        script.write_text("#!/no/such/interpreter\n")
        script.chmod(0o700)
        command = str(script)
    process = cli.start("hold", "g", "--job", "a", "--phase", "weight_sync", "--", command)
    process.communicate(timeout=DEADLINE_S)
    assert bool(process.returncode) is fails
    assert misses(world) is fails


def test_a_sync_inside_another_hold_clears_nothing(world: World) -> None:
    """The hold is the outer one's; of a group that only the sync holds it is the sync's."""
    with timeslice.hold("g", phase="train"), timeslice.hold("g", "h", phase="weight_sync"):
        pass
    assert (misses(world), misses(world, "h")) == (True, False)


def test_an_error_that_the_body_handles(world: World) -> None:
    """In a hold inside the sync: whether it came to its end, the sync itself says."""
    with sync():
        with contextlib.suppress(ZeroDivisionError), timeslice.hold("g"):
            raise ZeroDivisionError
        with timeslice.hold("g"):
            pass
    assert not misses(world)


@pytest.mark.parametrize("outer", ["fails", "ends"])
@pytest.mark.parametrize("child", ["fails", "ends"])
async def test_a_task_that_outlives_the_sync(world: World, outer: str, child: str) -> None:
    """It shares the hold and yields it: both must have come to their ends."""
    async with AsyncClient() as client:
        inside, leave = asyncio.Event(), asyncio.Event()

        async def work() -> None:
            async with client.hold("g"):
                inside.set()
                await leave.wait()
                if child == "fails":
                    raise ZeroDivisionError

        with contextlib.suppress(ZeroDivisionError):
            async with client.hold("g", phase="weight_sync"):
                task = asyncio.create_task(work())
                await inside.wait()
                if outer == "fails":
                    raise ZeroDivisionError
        leave.set()
        await asyncio.gather(task, return_exceptions=True)
    assert await asyncio.to_thread(misses, world) is ("fails" in (outer, child))


@pytest.mark.parametrize("how", ["ends", "fails", "is closed"])
def test_a_driver_whose_phases_are_calls(world: World, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """A phase that ends by a `finally`, with an error on its way, has failed; so has one that `close` ends."""
    monkeypatch.setenv("TIMESLICE_SAMPLER_GROUP", "g")
    callback = PhaseCallback()
    callback.on_phase_begin("weight_sync", "sampler")
    callback.on_phase_begin("eval", "sampler")  # which is the last to leave
    if how == "fails":
        with contextlib.suppress(ZeroDivisionError):
            try:
                raise ZeroDivisionError
            finally:
                callback.on_phase_end("weight_sync", "sampler")
    elif how == "ends":
        callback.on_phase_end("weight_sync", "sampler")
    callback.on_phase_end("eval", "sampler")
    callback.close()
    assert misses(world) is (how != "ends")


class Rollout:
    async def update_weights(self) -> None:
        raise AssertionError("it was cancelled before")


class Worker(TimesliceWorkerMixin, Rollout):
    pass


async def test_a_worker_whose_wait_is_cancelled(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread gets in all the same, and leaves at once: nothing was brought."""
    for name, value in {"TIMESLICE_SAMPLER_GROUP": "g", "RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    with Client() as other:
        lease = other.acquire("g")
        waiting = asyncio.create_task(Worker().update_weights())
        await asyncio.to_thread(world.until_queued, "a")
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        lease.yield_()

        def synced() -> bool:
            return [e["label"] for e in world.events() if e["type"] == "LeaseYielded"] == ["", "weight_sync"]

        await asyncio.to_thread(wait_until, synced, "it was in and has left")
    assert misses(world)
