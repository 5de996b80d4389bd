"""The users of ``timeslice acl`` on a real Redis Cluster, where key patterns and slots both count."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis

from tests.conftest import valkey_binary
from tests.security.conftest import SECRET, load_users, printed_users, refusals
from timeslice.client.sync import Client
from timeslice.errors import ServerUnsuitableError
from timeslice.locks import scripts
from timeslice.locks.drivers import SyncDriver
from timeslice.locks.keys import Keys
from timeslice.torture.fleet import Fleet, make_fleet

pytestmark = pytest.mark.slow  # six servers


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A cluster that knows the users, on every server."""
    fleet = make_fleet("cluster", tmp_path_factory.mktemp("cluster"), binary=valkey_binary())
    with fleet as running:
        for name in running.names():
            load_users(running.client(name), printed_users("--group", "g", "--group", "g2", "--node", "n1"))
        yield running


def url_of(fleet: Fleet, role: str) -> str:
    user = f"timeslice-{role}-{'n1' if role == 'agent' else 'g%2Bg2'}"
    return fleet.url.replace("://", f"://{user}:{SECRET}@", 1)


def test_roles_work_with_their_rights_on_a_cluster(cluster: Fleet) -> None:
    """Clients hold, agents join and take orders, coordinators own, viewers look, over groups on several servers."""
    keys = Keys()
    with Client(url_of(cluster, "client"), job="a") as client, client.hold("g2", lock_only=True):
        assert client.status("g2").holder == "a"
    agent = SyncDriver(url_of(cluster, "agent"))
    assert not agent.run(scripts.heartbeat(keys.group("g"), "n1", 15_000)).known
    assert agent.run(scripts.take_node(keys, "n1", "me", 15_000, 60, {"a": "b"})) is None
    agent.pipe([("SADD", keys.groups, "g"), ("SADD", keys.nodes, "n1")])
    coordinator = SyncDriver(url_of(cluster, "coordinator"))
    assert isinstance(coordinator.run(scripts.own(keys.group("g"), "c1")), scripts.Mine)
    coordinator.pipe([("XADD", keys.commands("n1"), "*", "body", "{}"), ("ZADD", keys.coordinators, "1", "c1")])
    viewer = SyncDriver(url_of(cluster, "viewer"))
    assert viewer.view(keys.group("g")).mode == "served"
    for driver in (agent, coordinator, viewer):
        driver.close()
    assert [each for name in cluster.names() for each in refusals(cluster.client(name))] == []


def test_nobody_reaches_beyond_on_a_cluster(cluster: Fleet) -> None:
    """What is others' is refused there as on one server."""
    keys = Keys()
    client = SyncDriver(url_of(cluster, "client"))
    for command in (
        ("XADD", keys.commands("n1"), "*", "body", "{}"),
        ("HSET", keys.node_state("n1"), "a", "b"),
        ("HSET", keys.group("theirs").state, "a", "b"),
        ("ZADD", keys.coordinators, "1", "me"),
    ):
        with pytest.raises(ServerUnsuitableError) as refused:
            client.pipe([command])
        assert isinstance(refused.value.__cause__, redis.exceptions.NoPermissionError)
    client.close()
