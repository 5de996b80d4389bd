"""A server that answers and refuses: the error says what it said and what to do, not that nobody is there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.conftest import ServerFactory
from tests.locks.faces import AsyncFace, Face
from tests.locks.lab import Lab
from timeslice.embedded import EmbeddedServer
from timeslice.errors import RedisUnreachableError, ServerUnsuitableError, TimeSliceError
from timeslice.locks import scripts
from timeslice.locks.drivers import SyncDriver
from timeslice.locks.faults import is_denial
from timeslice.torture.fleet_base import free_port

FACES = pytest.mark.parametrize("face", [SyncDriver, AsyncFace], ids=["sync", "asyncio"])
MakeFace = Callable[[str], Face]


def refusal(face: MakeFace, url: str, lab: Lab) -> TimeSliceError:
    """What a write ends with."""
    driver = face(url)
    try:
        with pytest.raises(TimeSliceError) as raised:
            driver.run(scripts.acquire(lab.group, lab.request("a1")), deadline_s=0.3)
    finally:
        driver.close()
    return raised.value


@pytest.fixture
def own(server_factory: ServerFactory) -> EmbeddedServer:
    return server_factory(port=free_port(), args=["--cluster-enabled", "no"])


@FACES
@pytest.mark.parametrize(
    ("settings", "said", "advice"),
    [
        (["min-replicas-to-write", "1"], "NOREPLICAS", "lower that setting"),
        (["replicaof", "127.0.0.1 1"], "read only replica", "use the master's address"),
    ],
)
def test_writes_that_are_refused_are_no_silence(
    face: MakeFace, own: EmbeddedServer, settings: list[str], said: str, advice: str
) -> None:
    """What the server says is told with its remedy; nobody is sent to start another server."""
    lab = Lab(own.url)
    admin: Any = lab.redis
    if settings[0] == "replicaof":
        admin.execute_command("REPLICAOF", *settings[1].split())
    else:
        admin.config_set(*settings)
    error = refusal(face, f"redis://127.0.0.1:{own.port}", lab)
    lab.redis.close()
    assert isinstance(error, RedisUnreachableError)
    assert "answers, but refuses what was asked" in str(error)
    assert said in str(error)
    assert advice in str(error)
    assert "timeslice up" not in str(error)


@FACES
def test_a_cluster_that_is_down_answers(face: MakeFace, server_factory: ServerFactory) -> None:
    """Half of its slots are nobody's; how to look closer is said."""
    server = server_factory(port=free_port(), args=["--cluster-enabled", "yes"])
    lab = Lab(server.url)
    lab.redis.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16_382)  # type: ignore[no-untyped-call]
    error = refusal(face, f"redis+cluster://127.0.0.1:{server.port}", lab)
    lab.redis.close()
    assert "answers, but refuses" in str(error)
    assert "redis-cli --cluster check" in str(error)
    assert "timeslice up" not in str(error)


@FACES
def test_missing_rights_are_no_wrong_password(face: MakeFace, own: EmbeddedServer) -> None:
    """User, command and the roles that have it are named; also where a script was refused."""
    lab = Lab(own.url)
    admin: Any = lab.redis
    for rules, said in (("+time", "client, agent, coordinator, operator"), ("+eval +evalsha ~*", "timeslice acl")):
        admin.execute_command("ACL", "SETUSER", "ann", "reset", "on", ">hunter2two", *rules.split())
        error = refusal(face, f"redis://ann:hunter2two@127.0.0.1:{own.port}", lab)
        assert isinstance(error, ServerUnsuitableError)
        assert is_denial(error)
        assert "refuses this to user ann, who lacks the right" in str(error)
        assert said in str(error)
        assert "credentials" not in str(error)
    lab.redis.close()


@FACES
@pytest.mark.parametrize(
    ("url", "up"),
    [("redis://127.0.0.1:1", True), ("unix:///nowhere/s.sock", True), ("redis+cluster://127.0.0.1:1", False)],
)
def test_up_is_advised_where_nothing_listens_on_this_machine(face: MakeFace, url: str, up: bool) -> None:
    """For one server; `up` starts no cluster."""
    lab = Lab("redis://127.0.0.1:1")
    said = str(refusal(face, url, lab))
    lab.redis.close()
    assert "does not answer" in said
    assert ("timeslice up" in said) == up
