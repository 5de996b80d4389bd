"""Gangs through both clients: one lease for all, errors that name the rank, calls whose answer is lost."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

import timeslice
from tests.client.faces import Face
from tests.client.world import World
from tests.support.jobs import DEADLINE_S, wait_until
from timeslice.client.gang import find_gang
from timeslice.errors import (
    AcquireTimeoutError,
    CancelledByOperatorError,
    DeadlockError,
    GangEndedError,
    LeaseLostError,
)
from timeslice.locks import scripts
from timeslice.locks.loader import load
from timeslice.locks.scripts import Party, Request
from timeslice.torture.proxy import Proxy


def got(future: Future[Any]) -> Any:
    return future.result(DEADLINE_S)


def ask(face: Face, world: World, rank: int, world_size: int = 2, **options: Any) -> Future[Any]:
    """A rank's own client asks."""
    client = face.client(url=options.pop("url", world.url), job=options.pop("job", "a"))
    return face.acquire(client, "g", lock_only=True, rank=rank, world_size=world_size, **options)


def until_forming(world: World, arrived: int) -> None:
    wait_until(lambda: [len(gang.parties) for gang in world.view().forming] == [arrived], f"{arrived} have arrived")


def test_all_ranks_have_one_lease(face: Face, world: World) -> None:
    """The same id and token; the group is free when the last of them has left."""
    waits = [ask(face, world, rank, 3) for rank in (2, 0)]
    until_forming(world, 2)
    assert not any(wait.done() for wait in waits)
    leases = [got(wait) for wait in (*waits, ask(face, world, 1, 3))]
    assert len({(lease.lease_id, lease.fencing_token) for lease in leases}) == 1
    for lease in leases:
        lease.ensure_held()
    for lease in leases:
        assert world.holder() == "a"
        face.give_up(lease)
    assert world.holder() == ""
    assert {lease.state for lease in leases} == {"yielded"}


def test_a_rank_that_asks_anew_learns_how_its_round_ended(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """While it registered its process, which agents did not know yet, another rank gave up: it is told which."""
    world.serve("g")
    gang = find_gang(gang=True, rank=0, world_size=3)
    assert gang
    other = Request("other", "a", "n2", 7, 8, party=Party(gang.name, 0, 3))
    client = timeslice.Client(world.url, job="a", prefix=world.keys.prefix)
    register = client._register

    def register_late(*arguments: Any) -> Any:
        world.run(scripts.cancel(world.group(), "other", why="no patience"))
        return register(*arguments)

    monkeypatch.setattr(client, "_register", register_late)
    world.run(scripts.join(world.group(), other))
    with client, pytest.raises(GangEndedError, match=r"rank 0 \(process 7 on node n2\) gave up: no patience"):
        client.acquire("g", rank=1, world_size=3, timeout=DEADLINE_S)


def test_no_body_runs_without_the_others(world: World) -> None:
    """Round after round all meet inside, as at an all-reduce; one alone would wait there for ever."""
    meeting = threading.Barrier(2, timeout=DEADLINE_S)

    def rounds(rank: int) -> list[int]:
        tokens = []
        for _ in range(5):
            with timeslice.hold("g", job="a", lock_only=True, rank=rank, world_size=2) as lease:
                meeting.wait()
                tokens.append(lease.fencing_token)
        return tokens

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(rounds, (0, 1))
    assert first == second == sorted(set(first))
    assert world.holder() == ""


def test_the_error_of_a_timeout_names_who_has_not_arrived(face: Face, world: World) -> None:
    """And ends the wait of those who had, with an error that names the rank that gave up."""
    patient = ask(face, world, 2, 4)
    until_forming(world, 1)
    with pytest.raises(AcquireTimeoutError, match=r"ranks 1, 3 of 4 have not arrived"):
        got(ask(face, world, 0, 4, timeout=0.3))
    with pytest.raises(
        GangEndedError, match=r"rank 0 \(process \d+ on node n1\) gave up: it was not granted within 0.3"
    ):
        got(patient)
    assert world.view().forming == ()


def test_a_timeout_in_the_queue_ends_the_wait_for_all(face: Face, world: World) -> None:
    """The others are told; the holder is not touched."""
    with timeslice.hold("g", job="b", lock_only=True) as other:
        first = ask(face, world, 0)
        until_forming(world, 1)
        second = ask(face, world, 1, timeout=0.5)
        with pytest.raises(AcquireTimeoutError, match="job b holds it"):
            got(second)
        with pytest.raises(GangEndedError, match="rank 1"):
            got(first)
        assert world.queue() == []
        other.ensure_held()


def test_an_operator_who_cancels_is_named_to_all(face: Face, world: World) -> None:
    """By the gang's id, which `timeslice queue` shows."""
    waits = [ask(face, world, rank, 3) for rank in (0, 1)]
    until_forming(world, 2)
    world.run(scripts.cancel(world.group(), world.view().forming[0].waiter, by="alice"))
    for wait in waits:
        with pytest.raises(CancelledByOperatorError, match="alice"):
            got(wait)


def test_a_revoked_gang_learns_by_whom(face: Face, world: World) -> None:
    """Each rank at its next renewal."""
    leases = [got(wait) for wait in (ask(face, world, 0, lease=3), ask(face, world, 1, lease=3))]
    view = world.view()
    call = scripts.revoke(world.group(), "a", view.state["lease_id"], view.number("token"), "alice", "", at_once=True)
    world.run(call)
    for lease in leases:
        assert lease.lost.wait(DEADLINE_S)
        with pytest.raises(LeaseLostError, match="alice revoked it"):
            lease.ensure_held()


def test_two_groups_are_taken_by_all_ranks_in_one_order(face: Face, world: World) -> None:
    """Whatever order each names them in."""
    names = (("samplers", "trainers"), ("trainers", "samplers"))

    def body(leases: Any) -> set[tuple[str, int]]:
        return {(lease.group, lease.fencing_token) for lease in leases}

    holds = [
        face.hold(
            face.client(url=world.url, job="a"), *groups, lock_only=True, rank=rank, world_size=2, timeout=20, body=body
        )
        for rank, groups in enumerate(names)
    ]
    first, second = (got(hold) for hold in holds)
    assert first == second
    assert {group for group, _ in first} == {"samplers", "trainers"}


@pytest.mark.parametrize("verb", ["join", "renew", "yield"])
def test_a_lost_reply_changes_nothing(proxy: Proxy, face: Face, world: World, verb: str) -> None:
    """The call is sent again: the rank is in the same gang, has the same lease, leaves once."""
    for script in ("join", "renew", "yield"):  # the proxy finds them by their names, which the server has to know
        world.redis.script_load(load(script).source)
    if verb == "join":
        proxy.lose_reply_to(load(verb).sha)
    first = ask(face, world, 0, url=proxy.url, job="c")
    until_forming(world, 1)
    if verb == "renew":
        proxy.lose_reply_to(load(verb).sha)
    leases = [got(wait) for wait in (ask(face, world, 1, job="c"), first)]
    assert len({lease.lease_id for lease in leases}) == 1
    if verb == "yield":
        proxy.lose_reply_to(load(verb).sha)
    face.give_up(leases[1])
    assert not proxy.armed
    assert world.holder() == "c"
    face.give_up(leases[0])
    assert world.holder() == ""


def test_a_cancelled_wait_ends_the_gang_s(world: World) -> None:
    """A task that is cancelled withdraws before CancelledError goes on."""
    import asyncio

    async def main() -> str:
        clients = [timeslice.AsyncClient(world.url, job="a") for _ in range(2)]
        tasks = [
            asyncio.create_task(client.acquire("g", lock_only=True, rank=rank, world_size=3))
            for rank, client in enumerate(clients)
        ]
        async with asyncio.timeout(DEADLINE_S):
            while [len(gang.parties) for gang in (await clients[0].status("g")).forming] != [2]:
                await asyncio.sleep(0.01)
            tasks[0].cancel()
            error = (await asyncio.gather(*tasks, return_exceptions=True))[1]
        for client in clients:
            await client.close()
        return f"{type(error).__name__}: {error}"

    assert "GangEndedError: group g: the gang of job a is over, so rank 1 waits no longer: rank 0" in asyncio.run(
        main()
    )


def test_a_gang_that_would_wait_in_a_circle_is_told_so(world: World) -> None:
    """Both jobs hold what the other wants: the one out of order withdraws, all its ranks go on with an error."""
    inside = threading.Barrier(3, timeout=DEADLINE_S)

    def rank(number: int) -> str:
        client = timeslice.Client(world.url, job="a")
        options: dict[str, Any] = {"lock_only": True, "rank": number, "world_size": 2}
        with client.hold("samplers", **options):
            inside.wait()
            try:
                client.hold("trainers", **options).__enter__()
            except (DeadlockError, GangEndedError) as error:
                return f"{type(error).__name__}: {error}"
            return "entered"

    def other() -> str:
        client = timeslice.Client(world.url, job="b")
        with client.hold("trainers", lock_only=True):
            inside.wait()
            with client.hold("samplers", lock_only=True, timeout=DEADLINE_S):
                return "entered"

    with ThreadPoolExecutor(3) as pool:
        b = pool.submit(other)
        told = sorted(pool.map(rank, (0, 1)))
        assert b.result(DEADLINE_S) == "entered"
    assert told[0].startswith("DeadlockError: group trainers: nobody in this circle could ever go on")
    assert told[1].startswith(("DeadlockError", "GangEndedError"))
    assert told[1].startswith("DeadlockError") or "it would wait in a circle" in told[1]
