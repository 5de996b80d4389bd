from __future__ import annotations

import os
from concurrent.futures import Future
from typing import Any

import pytest

from tests.client.faces import Face
from tests.client.world import World
from tests.support.jobs import DEADLINE_S, wait_until
from timeslice.client.identity import declared, process_start, this_target
from timeslice.errors import (
    AcquireTimeoutError,
    CancelledByOperatorError,
    GroupModeError,
    InvalidNameError,
    RedisUnreachableError,
    RefusedError,
    UnknownGroupError,
    UsageError,
)
from timeslice.locks import scripts
from timeslice.models import Target


def got(future: Future[Any]) -> Any:
    return future.result(DEADLINE_S)


def test_a_free_group_is_had_at_once_and_given_back(face: Face, world: World) -> None:
    """An uncontended acquire makes its job the holder, and a yield frees the group."""
    client = face.client(job="a")
    lease = got(face.acquire(client, "g", lock_only=True))
    assert (world.holder(), lease.job, lease.group) == ("a", "a", "g")
    assert lease.fencing_token == world.view().number("token")
    assert lease.grant.how == "no-op"
    reply = face.give_up(lease)
    assert (reply.pending, reply.kept) == (0, True)
    assert not world.holder()
    assert face.give_up(lease) is None


def test_waiters_are_served_in_order_and_tokens_rise(face: Face, world: World) -> None:
    """Three jobs get a lock-only group one after another, in the order they asked, with rising tokens."""
    first = got(face.acquire(face.client(job="a"), "g", lock_only=True))
    second = face.acquire(face.client(job="b"), "g", lock_only=True)
    world.until_queued("b")
    third = face.acquire(face.client(job="c"), "g", lock_only=True)
    world.until_queued("b", "c")
    face.give_up(first)
    b = got(second)
    assert not third.done()
    face.give_up(b)
    c = got(third)
    assert first.fencing_token < b.fencing_token < c.fencing_token
    assert c.grant.waited_s > 0


def test_priority_goes_first(face: Face, world: World) -> None:
    """A waiter of higher priority is served before one that asked earlier."""
    holder = got(face.acquire(face.client(job="a"), "g", lock_only=True))
    late = face.acquire(face.client(job="low"), "g", lock_only=True)
    world.until_queued("low")
    soon = face.acquire(face.client(job="high"), "g", lock_only=True, priority=5)
    world.until_queued("high", "low")
    face.give_up(holder)
    face.give_up(got(soon))
    face.give_up(got(late))


def test_a_wait_limit_withdraws_the_request(face: Face, world: World) -> None:
    """After `timeout` the error names holder and group, and nothing of the waiter is left in the queue."""
    got(face.acquire(face.client(job="a"), "g", lock_only=True))
    with pytest.raises(AcquireTimeoutError, match=r"group g: job b .* job a holds it"):
        got(face.acquire(face.client(job="b"), "g", lock_only=True, timeout=0.2))
    assert world.queue() == []
    assert world.holder() == "a"


def test_nobody_new_joins_a_full_queue(face: Face, world: World) -> None:
    """Ten thousand wait: the next is told so at once, with what to do, and nothing of it is left in the queue."""
    got(face.acquire(face.client(job="a"), "g", lock_only=True))
    world.redis.zadd(world.group().alive, dict.fromkeys(map(str, range(10_000)), world.view().now_ms + 600_000))
    with pytest.raises(RefusedError, match=r"group g: 10000 requests wait already.* timeslice queue g"):
        got(face.acquire(face.client(job="b"), "g", lock_only=True))
    assert world.queue() == []
    assert world.holder() == "a"


def test_a_zero_wait_limit_tries_once(face: Face, world: World) -> None:
    """`timeout=0` takes a free group and refuses a held one without waiting."""
    lease = got(face.acquire(face.client(job="a"), "g", lock_only=True, timeout=0))
    with pytest.raises(AcquireTimeoutError):
        got(face.acquire(face.client(job="b"), "g", lock_only=True, timeout=0))
    lease.ensure_held()


@pytest.mark.parametrize(
    ("group", "options", "error"),
    [
        ("no/slash", {}, InvalidNameError),
        ("g", {"job": "a b"}, InvalidNameError),
        ("g", {"phase": "-"}, InvalidNameError),
        ("g", {"timeout": -1}, UsageError),
        ("g", {"timeout": float("nan")}, UsageError),
        ("g", {"priority": 101}, UsageError),
        ("g", {"lease": 0.5}, UsageError),
        ("g", {"timeout": "5"}, UsageError),
        ("g", {"timeout": True}, UsageError),
        ("g", {"priority": 1.5}, UsageError),
        ("g", {"lease": "x"}, UsageError),
        ("g", {"lock_only": "yes"}, UsageError),
        ("g", {"on_lost": "print"}, UsageError),
    ],
)
def test_nonsense_is_refused_before_a_byte_is_sent(
    face: Face, world: World, group: str, options: dict[str, Any], error: type[Exception]
) -> None:
    """Bad names and values raise at once, even without a server."""
    client = face.client(url="redis://127.0.0.1:1")
    with pytest.raises(error):
        got(face.acquire(client, group, **options))


def test_an_operator_can_end_a_wait(face: Face, world: World) -> None:
    """A cancelled waiter stops waiting with an error that names who cancelled it."""
    got(face.acquire(face.client(job="a"), "g", lock_only=True))
    waiting = face.acquire(face.client(job="b"), "g", lock_only=True)
    world.until_queued("b")
    world.run(scripts.cancel(world.group(), world.view().queue[0].waiter, by="alice"))
    with pytest.raises(CancelledByOperatorError, match="alice"):
        got(waiting)


def test_lock_only_of_a_served_group_is_refused(face: Face, world: World) -> None:
    """A group with agents can't be taken as a plain lock."""
    world.serve("g")
    with pytest.raises(GroupModeError, match="served"):
        got(face.acquire(face.client(job="a"), "g", lock_only=True))


def test_a_misspelt_group_is_refused_with_the_nearest_names(face: Face, world: World) -> None:
    """If agents serve other groups only, the wait ends at once, names them, and leaves nothing in the queue."""
    world.serve("trainers", "samplers")
    with pytest.raises(UnknownGroupError, match=r"trainers"):
        got(face.acquire(face.client(job="a"), "trainer"))
    assert world.queue("trainer") == []
    assert world.queue("trainers") == []


def test_without_any_agent_it_waits_and_says_so_once(
    face: Face, world: World, caplog: pytest.LogCaptureFixture, prefix: str
) -> None:
    """An undeclared group waits for its agent, the log says what to do, and the first agent lets it in."""
    group = f"g{prefix}"
    waiting = face.acquire(face.client(job="a"), group)
    wait_until(lambda: f"no agent serves group {group}" in caplog.text, "the log says what it waits for")
    assert world.view(group).reason == "no agent serves this group"
    assert group in {scripts.text(name) for name in world.redis.smembers(world.keys.groups)}
    world.serve(group)
    lease = got(waiting)
    assert lease.grant.how == "first load"
    assert caplog.text.count("no agent serves group") == 1


def test_a_process_is_registered_before_its_body_runs(face: Face, world: World) -> None:
    """In a served group the agents know the holder's process from the moment it holds."""
    world.serve("g")
    got(face.acquire(face.client(job="a"), "g"))
    target = Target.model_validate_json(world.view().targets[f"a/n1/{os.getpid()}"])
    assert (target.pid, target.start, target.uid) == (os.getpid(), process_start(os.getpid()), os.getuid())
    assert target.pid_namespace.startswith("pid:")


def test_a_host_that_no_agent_serves_is_said_aloud_at_the_first_hold(
    face: Face, world: World, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container, whose host name is not the node's: who it is, which nodes there are, and what to set; once."""
    world.serve("g", "n1")
    monkeypatch.setenv("TIMESLICE_NODE", "3fa9c1d2e4b5")
    client = face.client(job="a")
    for _ in range(2):
        got(face.hold(client, "g", body=lambda _: None))
    (said,) = [each.getMessage() for each in caplog.records if "3fa9c1d2e4b5" in each.getMessage()]
    assert f"group g: process {os.getpid()} of job a calls its host 3fa9c1d2e4b5, and no agent serves" in said
    assert "(nodes of the group: n1)" in said
    assert "set TIMESLICE_NODE" in said
    assert world.view().targets == {}


def test_a_waiting_process_is_registered_too(face: Face, world: World) -> None:
    """A queued process is known to the agents before its turn."""
    world.serve("g")
    got(face.acquire(face.client(job="a"), "g"))
    face.acquire(face.client(job="b"), "g")
    field = f"b/n1/{os.getpid()}"
    wait_until(lambda: field in world.view().targets, "b is registered")


def test_a_workloads_own_registration_is_repeated_not_replaced(
    face: Face, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that listens on a channel stays registered with it when its client has to register it again."""
    target = this_target("g", "a", "n1").model_copy(update={"channel": "c", "modes": ("offload",)})
    monkeypatch.setitem(declared, ("g", "a"), target)
    world.serve("g")
    got(face.acquire(face.client(job="a"), "g"))
    assert Target.model_validate_json(world.view().targets[f"a/n1/{os.getpid()}"]) == target


def test_a_host_without_an_agent_is_fine(face: Face, world: World) -> None:
    """A client on a node that serves nothing holds without being registered."""
    world.serve("g", node="elsewhere")
    lease = got(face.acquire(face.client(job="a"), "g"))
    assert world.view().targets == {}
    lease.ensure_held()


def test_a_swapped_grant_says_what_happened(face: Face, world: World) -> None:
    """The grant after a swap tells how long the swap took and that saved state came back."""
    world.serve("g")
    face.give_up(got(face.acquire(face.client(job="a"), "g")))
    waiting = face.acquire(face.client(job="b"), "g")
    world.swap(out="a", how="restored")
    lease = got(waiting)
    assert lease.grant.how == "restored"
    assert lease.grant.swap_s == world.view().number("swap_ms") / 1000
    assert not lease.lock_only


def test_the_phase_label_is_seen_by_people(face: Face, world: World) -> None:
    """The job's phase stands in the state while it holds."""
    got(face.acquire(face.client(job="a"), "g", lock_only=True, phase="weight_sync"))
    assert world.view().state["label"] == "weight_sync"


def test_a_lock_only_group_is_indexed(face: Face, world: World) -> None:
    """A group that only clients know is listed like any other."""
    got(face.acquire(face.client(job="a"), "g", lock_only=True))
    assert world.redis.sismember(world.keys.groups, "g")


def test_closing_gives_back_what_is_held(face: Face, world: World) -> None:
    """A closed client holds nothing; it can be used again."""
    client = face.client(job="a")
    got(face.acquire(client, "g", lock_only=True))
    got(face.acquire(client, "h", lock_only=True))
    face.close(client)
    assert (world.holder("g"), world.holder("h")) == ("", "")
    got(face.acquire(client, "g", lock_only=True)).ensure_held()


def test_no_server_is_said_plainly(face: Face, world: World) -> None:
    """An unreachable server is an error that says what to do; nothing is entered."""
    client = face.client(url="redis://127.0.0.1:1", job="a")
    with pytest.raises(RedisUnreachableError, match="timeslice up"):
        got(face.acquire(client, "g", timeout=0.1))


def test_two_hundred_waiters_need_no_pool(face: Face, world: World) -> None:
    """200 waiters of one client all get their turn."""
    client = face.client(job="a")
    count = 200
    inside: list[str] = []
    futures = [
        face.hold(client, "g", lock_only=True, body=lambda lease: inside.append(lease.lease_id)) for _ in range(count)
    ]
    for future in futures:
        future.result(60)
    assert len(set(inside)) == count
    assert world.queue() == []
    grants = [event for event in world.events() if event["type"] == "LeaseGranted"]
    tokens = [int(event["token"]) for event in grants]
    assert tokens == sorted(set(tokens))
