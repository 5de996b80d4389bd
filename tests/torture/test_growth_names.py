"""Names that come and go without a swap: jobs, waiters, nodes, coordinators, groups. None stays in the server."""

from __future__ import annotations

import json

import pytest
from prometheus_client import REGISTRY

from tests.agent.rig import until
from tests.conftest import ServerFactory
from tests.locks.lab import Lab
from timeslice.client.sync import Client
from timeslice.coordinator import service
from timeslice.coordinator.service import Coordinator, CoordinatorOptions
from timeslice.errors import AcquireTimeoutError
from timeslice.locks import scripts
from timeslice.locks.keys import Keys

MANY = 400


@pytest.fixture
def lab(server_factory: ServerFactory, prefix: str) -> Lab:
    """A server with nothing else on it."""
    return Lab(server_factory().url, prefix)


def sizes(lab: Lab) -> dict[str, int]:
    """Every key that does not expire, and how much is in it. Streams have caps of their own."""
    found = {}
    for key in map(scripts.text, lab.redis.scan_iter(count=1000)):
        kind = scripts.text(lab.redis.type(key))
        if lab.redis.ttl(key) < 0 and kind != "stream":
            found[key.rpartition(":")[2]] = {"hash": lab.redis.hlen, "zset": lab.redis.zcard, "set": lab.redis.scard}[
                kind
            ](key)
    return found


def test_lock_only_holds_of_new_jobs(lab: Lab) -> None:
    """Two minutes after them nothing is left but the group's state."""
    token = lab.grant("w", "a")
    lab.release("w", token)
    before = sizes(lab)
    for n in range(MANY):
        lab.release(f"w{n}", lab.grant(f"w{n}", f"job{n}"))
    lab.pass_time(200)
    lab.release("last", lab.grant("last", "b"))
    assert sizes(lab) == before
    assert lab.redis.dbsize() <= len(before) + 1  # the events


def test_waiters_that_fall_silent(lab: Lab) -> None:
    """Requests whose processes were killed while they waited: the next sign of life in the group sweeps them all."""
    token = lab.grant("w", "a", lease_ms=3_600_000)
    before = sizes(lab)
    for n in range(MANY):
        lab.queue(f"w{n}", f"job{n}")
    assert sizes(lab)["queue"] == MANY
    lab.pass_time(20)
    for _ in range(MANY // 64 + 1):  # a bounded sweep each time: no script may take long
        lab.queue("z", "z")
    lab.cancel("z")
    lab.renew("w", token, "a")
    assert {name: size for name, size in sizes(lab).items() if name not in before} == {"ended": 1}
    assert sizes(lab)["state"] - before["state"] <= 2  # reasons and times have fields of their own


def test_nodes_that_come_and_leave(lab: Lab) -> None:
    """Each with state of a job and a registered process: after it left the group knows nothing of it."""
    lab.join("n0", "pod")
    lab.forget("pod")
    before = sizes(lab)
    for n in range(MANY // 4):
        node = f"pod-{n}"
        lab.join(node)
        lab.run(scripts.register(lab.group, f"job{n}", node, 7, json.dumps({"pid": 7})))
        lab.report(node, scripts.Observed(f"job{n}", "resident", 0, 5, "arena"))
        lab.forget(node, f"job{n}")
    assert sizes(lab) == before
    assert lab.view.state["unheard"] == ""


async def test_coordinators_names(lab: Lab) -> None:
    """Each start has a new name. Those that ended without a word are swept by the next one."""
    keys = Keys(lab.group.prefix)
    for n in range(MANY):
        coordinator = Coordinator(CoordinatorOptions(url=lab.url, prefix=lab.group.prefix, name=f"c{n}", lease_ms=20))
        await coordinator.scan()
        await coordinator.driver.close()
    assert lab.redis.zcard(keys.coordinators) < MANY // 2


async def test_a_group_that_was_let_go_is_not_shown_any_more(lab: Lab) -> None:
    """Another coordinator owns it, or it was deleted: what its former owner last saw would be an alarm for ever."""
    lab.join("n1")
    lab.redis.sadd(Keys(lab.group.prefix).groups, lab.group.name)
    coordinator = Coordinator(CoordinatorOptions(url=lab.url, prefix=lab.group.prefix, name="c"))
    await coordinator.scan()
    await until(lambda: waiters() == 0, "the group is shown")
    await coordinator.close()
    assert waiters() is None


def waiters() -> float | None:
    return REGISTRY.get_sample_value("timeslice_waiters", {"group": "g"})


async def test_groups_that_nobody_serves(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """A misspelt name is taken off the index once it has expired, but one that is waited for or just made is not."""
    keys = Keys(lab.group.prefix)
    with Client(lab.url, job="a", prefix=lab.group.prefix) as client:
        for n in range(15):
            with pytest.raises(AcquireTimeoutError):
                client.acquire(f"typo-{n}", timeout=0.01)
    assert lab.redis.scard(keys.groups) == 15
    for key in list(lab.redis.scan_iter("*typo*")):
        assert lab.redis.ttl(key) > 0
        if b"typo-0}" not in key:
            lab.redis.delete(key)  # as its expiry will
    lab.redis.sadd(keys.groups, "just-made")
    coordinator = Coordinator(CoordinatorOptions(url=lab.url, prefix=lab.group.prefix, name="c"))
    await coordinator.scan()
    assert lab.redis.scard(keys.groups) == 16
    monkeypatch.setattr(service, "ABSENT_S", 0.0)
    lab.grant("w", "a")
    lab.redis.sadd(keys.groups, lab.group.name)
    await coordinator.scan()
    assert lab.redis.smembers(keys.groups) == {b"typo-0", lab.group.name.encode()}
    await coordinator.driver.close()
