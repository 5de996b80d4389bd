"""What a server may forbid: keys outside the group's, and memory."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import Any

import pytest
import redis

from tests.conftest import NeedsTool, ServerFactory, valkey_binary
from tests.locks.conftest import BOTH
from tests.locks.lab import Lab
from tests.locks.test_headers import VERBS
from timeslice.embedded import EmbeddedServer
from timeslice.locks import scripts
from timeslice.locks.connection import connect
from timeslice.locks.faults import is_transient
from timeslice.locks.scripts import Call, Exited, Granted, Observed, Renewed, Yielded


def tour(lab: Lab) -> None:
    """Every verb, on its main path and on some refusals."""
    group = lab.group
    lab.run(scripts.configure(group, {"order": "1"}, mode="served"))
    lab.queue("a1", served=True)
    lab.join("n1", "n2")
    lab.grant("a1", served=True)
    lab.run(scripts.register(group, "a", "n1", 7, "{}"))
    lab.renew("a1", lab.number("token"), served=True)
    lab.run(scripts.phase(group, scripts.Stretch("p1", "a", "verify", "n1", 7), "began"))
    lab.queue("b1", served=True)
    lab.run(scripts.pause(group, True, "eve"))
    lab.release("a1", lab.number("token"))
    lab.run(scripts.pause(group, False, "eve"))
    epoch = lab.own()
    lab.pass_time(3)
    lab.run(scripts.poke(group, lab.swap, epoch))
    lab.refuse(epoch, "n1", "n2", defer_ms=1000)
    lab.pass_time(2)
    lab.own()
    lab.carry_out(epoch, "n1", "n2", seen=[Observed("a", "suspended", 5)])
    lab.run(scripts.waits(group, lab.holder, "elsewhere", "w1", still=True))
    lab.queue("e1", served=True)
    lab.run(scripts.nudge(group, "e1"))
    lab.cancel("e1")
    lab.report("n1", Observed("a", "gone"), ended=[Exited("a", 7, 1)])
    lab.cancel("b1")
    lab.jump(-50)
    lab.queue("c1", served=True)
    lab.cancel("c1", by="eve")
    lab.run(scripts.evict(group, "b", "eve", "maintenance"))
    lab.carry_out(lab.own(), "n1", "n2", seen=[Observed("b", "suspended", 5)])
    token = lab.grant("d1", served=True)
    lab.run(scripts.revoke(group, "d", "d1", token, "eve", "stuck"))
    lab.beat("n1", "n2")
    lab.carry_out(lab.own(), "n1", "n2", seen=[Observed("d", "suspended", 5)])
    lab.run(scripts.evict(group, "d", "eve", ""))
    lab.run(scripts.drain(group, "n2", True, "eve", ""))
    lab.run(scripts.drain(group, "n2", False, "eve", ""))
    lab.run(scripts.repair(group, "eve", ""))
    lab.run(scripts.disown(group, "c1"))
    lab.forget("n2", "a", "b", "c", "d")
    lab.run(scripts.leave(group, "n1"))
    lab.run(scripts.delete(group))
    ranks = [lab.request(f"r{n}", "r", pid=n, party=scripts.Party("x", n, 2)) for n in range(2)]
    for rank in ranks:
        lab.run(scripts.join(group, rank))
    lab.run(scripts.gang_point(group, "gang-r0", 1, 1, 0))
    for n in range(2):
        lab.run(scripts.yield_(group, "gang-r0", lab.number("token"), rank=n))


@pytest.fixture
def restricted(either: EmbeddedServer, prefix: str) -> Iterator[Lab]:
    """A group whose scripts run as a user with access to the passed keys and to grant streams, to nothing else."""
    lab = Lab(either.url, prefix)
    user = f"u{secrets.token_hex(4)}"
    keys = [key for key in lab.group.all if not key.endswith(":grant:")]
    patterns = [f"~{key}" for key in keys] + [f"~{lab.group.grant('*')}"]
    lab.redis.execute_command("ACL", "SETUSER", user, "on", ">pw", "+@all", *patterns)  # type: ignore[no-untyped-call]
    admin, lab.redis = lab.redis, connect(either.url.replace("://", f"://{user}:pw@"))
    yield lab
    lab.redis.close()
    admin.execute_command("ACL", "DELUSER", user)  # type: ignore[no-untyped-call]
    admin.close()


def test_scripts_touch_the_passed_keys_and_grant_streams_only(restricted: Lab) -> None:
    """The server itself refuses every other key to this user. †"""
    with pytest.raises(redis.exceptions.NoPermissionError):
        restricted.redis.get("another")
    tour(restricted)


def test_the_tour_calls_every_verb(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """So the test above leaves none out."""
    called: set[str] = set()
    send = lab.send

    def note(call: Call[Any]) -> list[Any]:
        called.add(call.script.name)
        return send(call)

    monkeypatch.setattr(lab, "send", note)
    lab.twice = False
    tour(lab)
    assert {"poke", "step", "promote", "settle"} <= called
    assert called == set(VERBS)


def test_a_group_that_was_used_and_left_keeps_little(lab: Lab) -> None:
    """After many jobs came and went, every hash is as small as if one had. Streams are capped."""
    lab.twice = False
    lab.join("n1")
    epoch = lab.own()
    for n in range(60):
        job = f"job{n}"
        lab.ask(f"w{n}", job, served=True)
        if lab.swap:
            lab.carry_out(epoch, "n1", seen=[Observed(other, "gone") for other in lab.view.resident])
        lab.grant(f"w{n}", job, served=True)
        lab.release(f"w{n}", lab.number("token"))
    group = lab.group
    assert [job.job for job in lab.view.jobs.values()] == ["job59"]
    assert lab.redis.hlen(group.jobs) <= 6
    assert lab.redis.hlen(group.members) <= 10
    assert lab.redis.hlen(group.waiters) == lab.redis.zcard(group.alive) == lab.redis.zcard(group.queue) == 0
    assert lab.redis.hlen(group.state) < 50
    assert lab.redis.xlen(group.inbox) < 400


@pytest.fixture(params=BOTH)
def full(request: pytest.FixtureRequest, server_factory: ServerFactory, prefix: str) -> Iterator[Lab]:
    """A server of the test's own, filled up after a swap was begun: job a out, b waiting, c waiting behind it."""
    needs_tool: NeedsTool = request.getfixturevalue("needs_tool")
    running = server_factory(binary=needs_tool("redis-server") if request.param == "redis7" else valkey_binary())
    lab = Lab(running.url, prefix)
    lab.join("n1")
    yield lab
    lab.redis.close()


def fill(lab: Lab) -> None:
    """From now on the server takes nothing that needs memory."""
    lab.redis.config_set("maxmemory", "1")
    with pytest.raises(redis.exceptions.OutOfMemoryError):
        lab.redis.set("x", "y")


def test_a_full_server_still_lets_go(full: Lab) -> None:
    """Case R04. Renewals, yields, cancels, heartbeats, reports work; a new acquire is refused until there is room. †"""
    lab = full
    token = lab.grant("a1", served=True)
    lab.queue("b1", served=True)
    lab.queue("a2", served=True)
    fill(lab)
    assert isinstance(lab.renew("a1", token, served=True), Renewed)
    lab.run(scripts.heartbeat(lab.group, "n1", 15_000))
    lab.report("n1", Observed("z", "suspended", 5))
    assert lab.cancel("b1") == "queued"
    assert isinstance(lab.release("a1", token), Yielded)
    assert lab.holder == "a2"
    assert isinstance(lab.renew("a2", lab.number("token"), served=True), Renewed)
    with pytest.raises(redis.exceptions.OutOfMemoryError) as refusal:
        lab.ask("c1", served=True)
    assert is_transient(refusal.value)
    assert lab.redis.hget(lab.group.waiters, "c1/job") is None
    lab.redis.config_set("maxmemory", "0")
    assert lab.queue("c1", served=True).position == 0


def test_a_full_server_still_ends_a_swap(full: Lab) -> None:
    """Case R04. The device is in between: every step up to the grant goes through. †"""
    lab = full
    token = lab.grant("a1", served=True)
    lab.queue("b1", served=True)
    lab.pass_time(2)
    fill(lab)
    epoch = lab.own()
    lab.release("a1", token)
    lab.run(scripts.poke(lab.group, lab.swap, epoch))
    closed = lab.carry_out(epoch, "n1", seen=[Observed("a", "suspended", 5)])
    assert closed.lease_id == "b1"
    lab.run(scripts.disown(lab.group, "c1"))


def test_a_full_server_still_gives_a_swap_up(full: Lab) -> None:
    """Case R04. A refusal is settled, the waiter put off, the next one granted. †"""
    lab = full
    token = lab.grant("a1", served=True)
    lab.queue("b1", served=True)
    lab.queue("a2", served=True)
    epoch = lab.own()
    fill(lab)
    lab.release("a1", token)
    lab.refuse(epoch, "n1")
    assert lab.holder == "a2"


def test_an_operator_can_act_on_a_full_server(full: Lab) -> None:
    """Case R04. Pause, resume, forgetting a node and deleting the group need no memory either."""
    lab = full
    fill(lab)
    lab.run(scripts.pause(lab.group, True, "eve"))
    lab.run(scripts.pause(lab.group, False, "eve"))
    lab.forget("n1", "a", "b")
    lab.run(scripts.delete(lab.group))
    assert lab.redis.exists(*lab.group.all) == 1  # the memory of what ended, which expires


def test_a_full_server_grants_nothing_half(full: Lab) -> None:
    """A refused acquire of a free group leaves it free."""
    lab = full
    fill(lab)
    with pytest.raises(redis.exceptions.OutOfMemoryError):
        lab.ask("a1", served=True)
    assert lab.holder == ""
    lab.redis.config_set("maxmemory", "0")
    assert isinstance(lab.ask("a1", served=True), Granted)
