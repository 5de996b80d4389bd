from __future__ import annotations

import asyncio
import logging
import threading
import time
from concurrent.futures import Future
from typing import Any

import pytest

import timeslice
from tests.client.faces import Face
from tests.client.world import World
from tests.support.jobs import DEADLINE_S, wait_until
from timeslice.errors import LeaseLostError, LeaseUncertainError
from timeslice.locks import scripts
from timeslice.torture.proxy import Proxy

AHEAD = int((time.time() + 86_400) * 1000)  # a counter of tomorrow: more than this server can know


def got(future: Future[Any]) -> Any:
    return future.result(DEADLINE_S)


def take_over(world: World, job: str = "thief") -> None:
    """Let the lease run out on the server, and another job take the group."""
    world.redis.hset(world.group().state, "deadline_ms", 1)
    granted = world.run(scripts.acquire(world.group(), scripts.Request("w", job, "n9", 1, 1)))
    assert isinstance(granted, scripts.Granted)


@pytest.mark.timing
def test_a_short_lease_outlives_a_long_body(face: Face, world: World) -> None:
    """Renewal keeps a lease of two seconds for longer, and the deadline moves on."""
    lease = got(face.acquire(face.client(job="a"), "g", lock_only=True, lease=2))
    first = world.view().number("deadline_ms")
    wait_until(lambda: world.view().number("deadline_ms") > first + 4000, "the deadline moved by two leases")
    lease.ensure_held()
    assert not lease.lost.is_set()


def test_many_leases_share_one_thread(face: Face, world: World) -> None:
    """However many leases a process has, one thread renews them."""
    client = face.client(job="a")
    leases = [got(face.acquire(client, f"g{number}", lock_only=True, lease=3)) for number in range(10)]
    renewers = [thread for thread in threading.enumerate() if thread.name == "timeslice-renewal"]
    assert len(renewers) == len({thread.ident for thread in renewers})
    before = {lease.group: world.view(lease.group).number("deadline_ms") for lease in leases}
    wait_until(
        lambda: all(world.view(group).number("deadline_ms") > at for group, at in before.items()), "all were renewed"
    )
    for lease in leases:
        lease.ensure_held()


def test_a_lease_taken_away_is_noticed(face: Face, world: World, caplog: pytest.LogCaptureFixture) -> None:
    """If somebody else holds, `lost` is set, `on_lost` runs once off the main thread, and the log names the holder."""
    told: list[tuple[str, str]] = []

    def on_lost(lease: Any) -> None:
        told.append((lease.group, threading.current_thread().name))
        raise ZeroDivisionError("a callback that fails harms nobody")

    lease = got(face.acquire(face.client(job="a"), "g", lock_only=True, lease=1, on_lost=on_lost))
    take_over(world)
    assert lease.lost.wait(DEADLINE_S)
    with pytest.raises(LeaseLostError, match=r"job a .* job thief holds the group now") as caught:
        lease.ensure_held()
    assert (caught.value.group, caught.value.job, caught.value.token) == ("g", "a", lease.fencing_token)
    wait_until(lambda: "the on_lost callback of job a failed" in caplog.text, "the failure is logged")
    assert told == [("g", "timeslice-on-lost")]
    assert "job a lost its lease" in caplog.text
    assert face.give_up(lease) is None
    assert world.holder() == "thief"


def test_a_loss_is_noticed_by_the_yield_too(face: Face, world: World, caplog: pytest.LogCaptureFixture) -> None:
    """A yield that the server refuses tells that the lease had been lost; the body's result stands."""

    def body(lease: Any) -> Any:
        take_over(world)
        return lease

    lease = got(face.hold(face.client(job="a"), "g", lock_only=True, body=body))
    assert lease.lost.is_set()
    assert "job a lost its lease" in caplog.text
    assert world.holder() == "thief"


def test_the_bodys_error_is_not_hidden_by_a_lost_lease(face: Face, world: World) -> None:
    """Losing the lease does not replace what the body raised."""

    def body(_: Any) -> None:
        take_over(world)
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        got(face.hold(face.client(job="a"), "g", lock_only=True, body=body))


def test_a_renewal_puts_a_forgotten_lease_back(face: Face, world: World) -> None:
    """After the server lost its data, the holder's next renewal makes it the holder again, with its token."""
    lease = got(face.acquire(face.client(job="a"), "g", lock_only=True, lease=3))
    world.redis.delete(*world.group().all)
    wait_until(lambda: world.holder() == "a", "the lease is back")
    assert world.view().number("token") == lease.fencing_token
    assert world.view().mode == "lock"
    lease.ensure_held()
    assert face.give_up(lease) is not None
    assert not world.holder()


def test_a_grant_after_data_loss_has_a_higher_token(face: Face, world: World) -> None:
    """A client remembers the highest number it has seen, so tokens rise although the server forgot them."""
    client = face.client(job="a")
    client.raise_floor("g", AHEAD)
    waiting = face.acquire(client, "g", lock_only=True)
    wait_until(lambda: world.view().counter >= AHEAD, "the server has learnt the number")
    assert "StateLost" in world.event_types()
    world.redis.hset(world.group().state, "quiet_until_ms", 1)
    assert got(waiting).fencing_token > AHEAD


def test_a_renewal_tells_the_server_the_highest_number(face: Face, world: World) -> None:
    """A holder that knows more than the server says so with its next renewal: the loss is noticed, tokens rise on."""
    client = face.client(job="a")
    lease = got(face.acquire(client, "g", lock_only=True, lease=3))
    client.raise_floor("g", AHEAD)
    wait_until(lambda: world.view().counter >= AHEAD, "the server has learnt the number")
    lease.ensure_held()


def test_a_renewed_lease_counts_from_when_it_was_asked_for(face: Face, world: World) -> None:
    """However late the answer to a renewal comes, the holder's lease is over before the server's."""
    lease = got(face.acquire(face.client(job="a"), "g", lock_only=True, lease=24))
    asked = time.monotonic() - 3
    lease.note_renewal(scripts.Renewed(counter=1, pending=0), asked)
    assert lease.expires_at == asked + 24
    assert lease.renew_at == asked + 8


def test_a_long_lease_is_renewed_every_ten_seconds(face: Face, world: World) -> None:
    """However long it is: after data loss the group is closed for 30 s, in which each holder must have renewed."""
    sent = time.monotonic()
    lease = got(face.acquire(face.client(job="a"), "g", lock_only=True, lease=3600))
    assert lease.renew_at <= time.monotonic() + 10
    lease.note_renewal(scripts.Renewed(counter=1, pending=0), sent)
    assert (lease.renew_at, lease.expires_at) == (sent + 10, sent + 3600)


def test_without_a_server_a_lock_only_lease_ends_with_its_time(proxy: Proxy, face: Face, world: World) -> None:
    """Nothing but the lock keeps rivals out, so past the lease it counts as lost, for good."""
    lease = got(face.acquire(face.client(url=proxy.url, job="a"), "g", lock_only=True, lease=1))
    proxy.cut()
    assert lease.lost.wait(DEADLINE_S)
    with pytest.raises(LeaseLostError, match="did not confirm it for 1 s"):
        lease.ensure_held()
    proxy.heal()
    with timeslice.Client(job="b") as other:
        other.acquire("g", lock_only=True)
    assert lease.state == "lost"


def test_a_stalled_server_is_as_good_as_none(
    proxy: Proxy, face: Face, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that keeps the connection and says nothing does not make the loss go unseen."""
    monkeypatch.setattr("timeslice.client.renewal.REPLY_TIMEOUT_S", 10 * DEADLINE_S)
    lease = got(face.acquire(face.client(url=proxy.url, job="a"), "g", lock_only=True, lease=1))
    proxy.stall()
    assert lease.lost.wait(DEADLINE_S)
    proxy.heal()


def test_without_a_server_a_served_lease_is_uncertain(proxy: Proxy, face: Face, world: World) -> None:
    """Past the lease of a served group nobody knows; when the server answers, it is held again."""
    world.serve("g")
    lease = got(face.acquire(face.client(url=proxy.url, job="a"), "g", lease=3))
    lease.ensure_held()
    world.redis.hset(world.group().state, "lease_ms", 60_000)  # as an agent's vouching would keep it
    world.run(scripts.heartbeat(world.group(), "n1", 60_000, vouch=lease.lease_id))
    proxy.cut()

    def uncertain() -> bool:
        try:
            lease.ensure_held()
        except LeaseUncertainError:
            return True
        return False

    wait_until(uncertain, "the lease is uncertain")
    assert not lease.lost.is_set()
    proxy.heal()
    wait_until(lambda: not uncertain(), "the lease is held again")


async def test_async_code_can_await_the_loss(world: World) -> None:
    """`wait_lost` ends when the lease is lost, and at once when it was lost before."""
    async with timeslice.AsyncClient(job="a") as client:
        lease = await client.acquire("g", lock_only=True, lease=1)
        waiting = asyncio.create_task(lease.wait_lost())
        await asyncio.sleep(0)
        assert not waiting.done()
        await asyncio.to_thread(take_over, world)
        await asyncio.wait_for(waiting, DEADLINE_S)
        await asyncio.wait_for(lease.wait_lost(), DEADLINE_S)


def test_an_idle_renewal_thread_serves_the_next_short_lease(proxy: Proxy, face: Face, world: World) -> None:
    """A short lease after a long one is renewed in time, though the thread had meant to sleep longer."""
    client = face.client(url=proxy.url, job="a")  # another address, so another thread than other tests'
    long = got(face.acquire(client, "long", lock_only=True, lease=600))
    short = got(face.acquire(client, "short", lock_only=True, lease=3))
    first = world.view("short").number("deadline_ms")
    wait_until(lambda: world.view("short").number("deadline_ms") > first, "the short one was renewed")
    short.ensure_held()
    long.ensure_held()
    face.close(client)


def test_a_lease_past_its_time_is_lost_when_asked(face: Face, world: World) -> None:
    """`ensure_held` goes by the clock, even when the renewal thread was starved and has not noticed yet."""
    lease = got(face.acquire(face.client(job="a"), "g", lock_only=True, lease=600))
    lease.expires_at = 0.0
    with pytest.raises(LeaseLostError, match="did not confirm it for 600 s"):
        lease.ensure_held()
    assert lease.lost.is_set()
    wait_until(lambda: not world.holder(), "the server is told")


def test_a_lease_that_was_yielded_is_not_held(face: Face, world: World) -> None:
    """`ensure_held` after the yield says so."""
    lease = got(face.acquire(face.client(job="a"), "g", lock_only=True))
    face.give_up(lease)
    with pytest.raises(LeaseLostError, match="it was yielded"):
        lease.ensure_held()
    assert not lease.lost.is_set()


def test_nothing_is_logged_above_info_in_an_ordinary_life(
    face: Face, world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """Acquire, renew and yield make no noise."""
    got(face.hold(face.client(job="a"), "g", lock_only=True, body=lambda _: None))
    assert [record for record in caplog.records if record.levelno > logging.INFO] == []
