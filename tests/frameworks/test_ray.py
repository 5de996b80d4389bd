"""Ray jobs: two of them by turns, actors whose state moves, calls that are held for. One real Ray cluster for all."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import ray

import timeslice
from tests.frameworks.ray_cluster import SAMPLERS, TRAINERS, Make, job, make, rival, stack
from tests.frameworks.ray_workers import (
    DRIVER,
    STATE_BYTES,
    Async,
    HalfCallbacks,
    Known,
    Loads,
    MovesItself,
    Plain,
    Shares,
    await_file,
)
from tests.support.jobs import wait_until
from timeslice.client.aio import AsyncClient
from timeslice.client.sync import Client
from timeslice.errors import AcquireTimeoutError, LeaseLostError, UsageError
from timeslice.integrations.ray import runtime_env, share
from timeslice.integrations.ray_holder import LOST_S, Place, Turn
from timeslice.locks import scripts
from timeslice.up import LocalStack

__all__ = ["job", "make", "rival", "stack"]

EXAMPLE = Path(__file__).parents[2] / "examples" / "ray_jobs.py"


def targets(client: Client, group: str, job: str) -> set[int]:
    """The processes that the group knows of a job."""
    return {int(name.split("/")[2]) for name in client.status(group).targets if name.startswith(f"{job}/")}


def free(client: Client, group: str = SAMPLERS) -> None:
    wait_until(lambda: not client.status(group).holder, f"group {group} is free")


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_two_ray_jobs_of_one_cluster_take_turns(tmp_path: Path) -> None:
    """Two drivers with a sampler and a trainer each compute the same as alone, never both on one device, whether the
    driver holds or its calls are held for; nothing is left of Ray, server or devices."""
    report = tmp_path / "ray.json"
    command = [sys.executable, str(EXAMPLE), "--steps", "2", "--json", str(report)]
    environment = {**os.environ, "TMPDIR": tempfile.gettempdir()}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=220, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(report.read_text())
    assert (found["overlaps"], found["results_equal"], found["device"]) == (0, True, "emulated")
    assert found["swaps"] >= 2
    assert found["bytes_moved"] > 10 << 20
    assert {len(job["rewards"]) for job in found["jobs"].values()} == {2}
    assert found["jobs"]["a"]["sha256"] != found["jobs"]["b"]["sha256"]


@pytest.mark.parametrize("kind", [Known, MovesItself])
def test_the_state_of_actors_moves_while_a_rival_holds(
    stack: LocalStack, job: str, rival: Client, make: Make, kind: type
) -> None:
    """The driver holds, two actors of one role load; when another job holds, none of their state is on the device and
    all of it is saved; in the next hold it is back with the same content, and so it is for a shared call."""
    actors = [make(kind, SAMPLERS) for _ in range(2)]
    with timeslice.hold(SAMPLERS, timeout=60):
        digests = ray.get([actor.load.remote(seed) for seed, actor in enumerate(actors)])
    with rival.hold(SAMPLERS, timeout=60):
        for where in ray.get([actor.where.remote() for actor in actors]):
            assert where == ("checkpointed", 0, STATE_BYTES)
    with timeslice.hold(SAMPLERS, timeout=60) as lease:
        assert lease.grant.how == "restored"
        assert ray.get([actor.digest.remote() for actor in actors]) == digests
    assert ray.get([share(actor, SAMPLERS).digest.remote() for actor in actors]) == digests
    if kind is MovesItself:
        assert sorted(ray.get(actors[0].were.remote())) == ["probe", "restore", "suspend offload"]


def test_roles_of_one_job_on_one_node_are_told_apart(job: str, rival: Client, make: Make) -> None:
    """A process is known in the groups that its actor was given and in no other, and one that Ray restarts is known
    under its new number."""
    sampler, other = (make(Known, SAMPLERS, max_restarts=1, max_task_retries=1) for _ in range(2))
    trainer = make(Known, TRAINERS)
    first, second, third = ray.get([each.pid.remote() for each in (sampler, other, trainer)])
    assert {first, second} <= targets(rival, SAMPLERS, job)
    assert third in targets(rival, TRAINERS, job)
    assert not {first, second} & targets(rival, TRAINERS, job)
    assert third not in targets(rival, SAMPLERS, job)
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(sampler.die.options(max_task_retries=0).remote())
    again = ray.get(sampler.pid.remote())
    assert again != first
    assert again in targets(rival, SAMPLERS, job)


def test_an_actor_killed_inside_of_a_hold_of_its_driver(stack: LocalStack, job: str, rival: Client, make: Make) -> None:
    """The driver gets Ray's error and leaves its hold; the rival gets in, for what the actor had is gone with it."""
    actor = make(Known, SAMPLERS)

    def use() -> None:
        for _ in range(1000):  # Ray kills a moment later
            ray.get(actor.digest.remote())

    with timeslice.hold(SAMPLERS, timeout=60):
        ray.get(actor.load.remote(0))
        ray.kill(actor)
        with pytest.raises(ray.exceptions.RayActorError):
            use()
    with rival.hold(SAMPLERS, timeout=60):
        assert rival.status(SAMPLERS).resident == (rival.job,)


def test_what_an_actor_must_be_told(job: str, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """An actor without a job, without a group, with half of the callbacks or with too many groups for them ends, and
    says what to do."""
    for actor, words in [
        (make(HalfCallbacks), "does not know which job"),
        (make(HalfCallbacks, runtime_env=runtime_env()), "names no group"),
        (make(MovesItself, SAMPLERS, TRAINERS), "can't tell for which of samplers, trainers its callbacks"),
        (make(HalfCallbacks, SAMPLERS), "has on_suspend only; it needs on_suspend and on_restore"),
    ]:
        with pytest.raises(ray.exceptions.RayActorError, match=words):
            ray.get(actor.__ray_ready__.remote())


def test_a_shared_call_to_an_actor_that_still_loads(job: str, rival: Client, make: Make, tmp_path: Path) -> None:
    """It waits without the group, so that others have it meanwhile."""
    loads = make(Loads, arguments=[tmp_path / "loaded"])
    call = share(loads, SAMPLERS).note.remote(1)
    assert ray.get(share(make(Plain), SAMPLERS).note.remote(2)) == 2
    with rival.hold(SAMPLERS, timeout=10):
        (tmp_path / "loaded").touch()
    assert ray.get(call) == 1


def test_a_shared_call_keeps_a_rival_out(job: str, rival: Client, make: Make, tmp_path: Path) -> None:
    """While calls run the job holds, though its driver does nothing for it; two to the same groups are inside together;
    when both have ended, the rival that waited gets in, and not before, though one of them returns nothing. The
    processes of the actors are known."""
    one, other = (make(Plain) for _ in range(2))
    call = share(one, SAMPLERS, TRAINERS, phase="generate").stay.remote(str(tmp_path), "one", "go")
    stay = share(other, TRAINERS, SAMPLERS, phase="generate").stay.options(num_returns=0)
    assert stay.remote(str(tmp_path), "other", "end") is None
    for name in ("one", "other"):
        await_file(tmp_path / f"{name}-inside")
    view = rival.status(SAMPLERS)
    assert view.holder == job
    assert view.state["label"] == "generate"
    with pytest.raises(AcquireTimeoutError, match=job):
        rival.acquire(SAMPLERS, timeout=0)
    (tmp_path / "go").touch()
    assert ray.get(call) == "one"
    with pytest.raises(AcquireTimeoutError, match=job):
        rival.acquire(SAMPLERS, timeout=1)  # many times as long as a swap of nothing takes
    (tmp_path / "end").touch()
    with rival.hold(SAMPLERS, timeout=60):
        assert (tmp_path / "other-left").exists()
    assert set(ray.get([one.pid.remote(), other.pid.remote()])) <= targets(rival, SAMPLERS, job)


def test_a_shared_call_that_loses_its_lease(job: str, rival: Client, make: Make, tmp_path: Path) -> None:
    """An operator takes the group away while it runs: its result is not passed off as computed inside of a hold, but
    the error names who took it and why. It ran once, and the next call gets in and returns what it should."""
    shared = share(make(Plain), SAMPLERS)
    call = shared.stay.remote(str(tmp_path), "it", "go")
    await_file(tmp_path / "it-inside")
    state = rival.status(SAMPLERS).state
    token = int(state["token"])
    rival.driver.run(scripts.revoke(rival.group_keys(SAMPLERS), job, state["lease_id"], token, "eve", "a drill"))
    with rival.hold(SAMPLERS, timeout=60):
        (tmp_path / "go").touch()
        with pytest.raises(LeaseLostError, match=r"samplers.*mine.*eve revoked it \(a drill\)"):
            ray.get(call, timeout=60)
    assert (tmp_path / "it-left").exists()
    assert ray.get(shared.note.remote(1)) == 1


def test_a_shared_actor_that_ray_restarts_is_known_again(job: str, rival: Client, make: Make) -> None:
    """An error of the call and the death of the actor come out of ray.get as they would without us; the hold is left,
    the next call goes through, and the new process is known, though its class knows nothing of timeslice."""
    actor = make(Plain, max_restarts=1)
    shared = share(actor, SAMPLERS)
    assert ray.get(shared.pid.remote()) in targets(rival, SAMPLERS, job)
    with pytest.raises(ValueError, match="no luck"):
        ray.get(shared.fail.remote())
    free(rival)
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(shared.die.remote())
    free(rival)
    assert ray.get(shared.pid.remote()) in targets(rival, SAMPLERS, job)


def test_a_holder_that_ends_with_who_made_it(
    stack: LocalStack, job: str, rival: Client, make: Make, tmp_path: Path
) -> None:
    """The call that it made is told as lost and not made again, and the rival gets in once the state of the actor is
    moved out, though the call runs on. The next call finds another holder, and the state as it was."""
    actor = make(Known, SAMPLERS, max_concurrency=2, runtime_env=runtime_env("owned", groups=[SAMPLERS]))
    owner = make(Shares)
    digest = ray.get(owner.load.remote(actor, "owned"))
    shared = share(actor, SAMPLERS, job="owned")
    call = shared.stay.remote(str(tmp_path), "it", "go")
    await_file(tmp_path / "it-inside")
    ray.kill(owner)
    with pytest.raises(ray.exceptions.ActorDiedError, match=r"timeslice-holder-.*-owned"):
        ray.get(call)
    with rival.hold(SAMPLERS, timeout=60):
        assert not (tmp_path / "it-left").exists()
        assert ray.get(actor.where.remote()) == ("checkpointed", 0, STATE_BYTES)
    (tmp_path / "go").touch()
    assert ray.get(shared.digest.remote()) == digest
    assert ray.get(share(actor, SAMPLERS, job="owned").digest.remote()) == digest


def test_a_shared_call_that_is_cancelled_while_it_waits(job: str, rival: Client, make: Make) -> None:
    """ray.cancel takes it out of the queue, it never runs, and calls made after it do."""
    shared = share(make(Plain), SAMPLERS)
    assert ray.get(shared.note.remote(0)) == 0
    with rival.hold(SAMPLERS, timeout=60):
        waiting = shared.note.remote(1)
        wait_until(lambda: any(waiter.job == job for waiter in rival.status(SAMPLERS).queue), "the call is queued")
        ray.cancel(waiting)
        with pytest.raises(ray.exceptions.TaskCancelledError):
            ray.get(waiting)
        wait_until(lambda: not rival.status(SAMPLERS).queue, "the call left the queue")
        following = shared.note.remote(2)
    assert ray.get(following) == 2
    assert ray.get(shared.noted.remote()) == [0, 2]


def test_a_shared_call_that_is_cancelled_while_it_runs(job: str, rival: Client, make: Make, tmp_path: Path) -> None:
    """Its caller is released at once, and the rival only when the actor is really done."""
    call = share(make(Plain), SAMPLERS).stay.remote(str(tmp_path), "it", "go")
    await_file(tmp_path / "it-inside")
    assert rival.status(SAMPLERS).state["label"] == "stay"
    ray.cancel(call)
    with pytest.raises(ray.exceptions.TaskCancelledError):
        ray.get(call)
    with pytest.raises(AcquireTimeoutError):
        rival.acquire(SAMPLERS, timeout=1)  # many times as long as a swap of nothing takes
    (tmp_path / "go").touch()
    with rival.hold(SAMPLERS, timeout=60):
        assert (tmp_path / "it-left").exists()


async def test_there_is_no_way_into_a_hold_that_was_left(job: str, rival: Client) -> None:
    """From the moment on in which its last call ended, though it is yet to be yielded."""
    async with AsyncClient() as client:
        turn = Turn(client, Place(job, (SAMPLERS,), None))
        turn.calls += 1
        await turn.granted
        before = turn.open
        turn.leave()
        assert (before, turn.open) == (True, False)
        await asyncio.to_thread(free, rival)


def test_shared_calls_keep_their_order(job: str, rival: Client, make: Make, tmp_path: Path) -> None:
    """One actor takes many calls in the order in which they were made, as Ray promises it without us; also where it is
    busy as they are made, and the first of them waits until it can be registered again in their hold."""
    actor = make(Plain)
    shared = share(actor, SAMPLERS)
    ray.wait([shared.note.remote(number) for number in range(400)], num_returns=400)
    free(rival)
    busy = actor.stay.remote(str(tmp_path), "it", "go")  # not shared
    await_file(tmp_path / "it-inside")
    calls = [shared.note.remote(number) for number in range(400, 410)]
    wait_until(lambda: rival.status(SAMPLERS).holder == job, "the calls have their hold")
    time.sleep(1.5 * LOST_S)
    (tmp_path / "go").touch()
    ray.wait([busy, *calls], num_returns=11)
    assert ray.get(shared.noted.remote()) == list(range(410))


def test_what_can_be_shared(job: str, make: Make, tmp_path: Path) -> None:
    """Coroutine methods, several results, options, references as arguments, remote functions, and a handle that is
    sent to another actor's process; a generator and a class are refused with what to do instead."""
    shared = share(make(Plain), SAMPLERS, methods=["pair", "stream"])
    assert ray.get(shared.pair.remote(ray.put("large"))) == ["large", 2]
    assert ray.get(shared.pair.options(num_returns=1).remote("one")) == ("one", 2)
    assert ray.get(shared.pair.options(num_returns=None).remote("two")) == ["two", 2]
    assert ray.get(share(make(Async), SAMPLERS).double.remote(21)) == 42
    power = share(ray.remote(num_cpus=0)(_power), SAMPLERS, TRAINERS)
    assert ray.get(power.remote(2, ray.put(5))) == 32
    assert share(ray.remote(num_cpus=0, num_returns=0)(_touch), SAMPLERS).remote(tmp_path / "touched") is None
    await_file(tmp_path / "touched")
    knows_no_server = {"env_vars": {"TIMESLICE_URL": "ftp://none"}}
    assert ray.get(ray.remote(num_cpus=0, runtime_env=knows_no_server)(_call_there).remote([shared])) == ["there", 2]
    assert type(shared.note) is ray.actor.ActorMethod
    with pytest.raises(UsageError, match="returns a generator"):
        shared.stream.remote()
    with pytest.raises(UsageError, match="give the handle of an actor"):
        share(ray.remote(Plain), SAMPLERS)
    with pytest.raises(UsageError, match="needs the name of a group"):
        share(make(Plain))
    with pytest.raises(AttributeError):
        share(make(Plain), SAMPLERS, methods=["nope"])
    with pytest.raises(UsageError, match=r"methods='pair': give a list of names, as in methods=\['pair'\]"):
        share(make(Plain), SAMPLERS, methods="pair")


def _touch(path: Path) -> None:
    path.touch()


def _power(base: int, exponent: int) -> int:
    return int(base**exponent)


def _call_there(shared: list[Any]) -> Any:
    return ray.get(shared[0].pair.remote("there"))


def test_shared_calls_inside_of_a_hold(job: str, make: Make) -> None:
    """A driver that holds calls straight through, for its own hold would keep the call out; with a part of the groups
    it is told."""
    shared = share(make(Plain), SAMPLERS, TRAINERS)
    with timeslice.hold(SAMPLERS, TRAINERS, timeout=60):
        assert ray.get(shared.note.remote(1), timeout=30) == 1
    with timeslice.hold(SAMPLERS, timeout=60), pytest.raises(UsageError, match="holds samplers, and the call needs"):
        shared.note.remote(2)


def test_a_driver_that_dies_in_a_shared_call(stack: LocalStack, job: str, rival: Client, tmp_path: Path) -> None:
    """Its hold ends with it, and its place goes to who waits."""
    address = ray.get_runtime_context().gcs_address
    command = [sys.executable, "-c", DRIVER, address, str(tmp_path)]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as process:
        try:
            await_file(tmp_path / "dies-inside")
            assert rival.status(SAMPLERS).holder == "dies"
        finally:
            process.kill()
    with rival.hold(SAMPLERS, timeout=60):
        assert not (tmp_path / "dies-left").exists()


def test_holds_that_are_switched_off(job: str, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """With TIMESLICE_DISABLE=1 a shared actor is the actor itself, and workers are told."""
    actor = make(Plain)
    monkeypatch.setenv("TIMESLICE_DISABLE", "1")
    assert share(actor, SAMPLERS) is actor
    assert runtime_env()["env_vars"] == {"TIMESLICE_JOB": job, "TIMESLICE_PREFIX": "ts", "TIMESLICE_DISABLE": "1"}
    assert ray.get(make(HalfCallbacks, runtime_env=runtime_env()).ready.remote())
