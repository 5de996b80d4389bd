"""Fleets do what their names say: the torture runs and the tests above rely on it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import valkey_binary
from tests.support.jobs import wait_until
from timeslice.errors import RedisUnreachableError, UsageError
from timeslice.torture import fleet_base
from timeslice.torture.fleet import KINDS, Fleet, make_fleet

KEY = "ts:{g}:state"


@pytest.mark.parametrize(
    "kind", ["standalone", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("cluster", "sentinel"))]
)
def test_servers_come_back_with_what_they_had(kind: str, tmp_path: Path) -> None:
    """All are killed and started again; a Valkey of the package can be any of them."""
    with make_fleet(kind, tmp_path, binary=valkey_binary()) as fleet:
        assert fleet.kind == kind
        with fleet.client(fleet.holder_of(KEY)) as client:
            client.set(KEY, "kept")
        for name in fleet.names():
            fleet.kill(name)
            fleet.kill(name)  # harmless
        fleet.start()
        with fleet.client(fleet.holder_of(KEY)) as client:
            assert client.get(KEY) == b"kept"


def holder(fleet: Fleet) -> str:
    """Empty while nobody is."""
    try:
        return fleet.holder_of(KEY)
    except RedisUnreachableError:
        return ""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["cluster", "sentinel"])
def test_a_failover_changes_roles_not_names(kind: str, tmp_path: Path) -> None:
    """The old master comes back as a replica of the new one."""
    with make_fleet(kind, tmp_path) as fleet:
        old = fleet.holder_of(KEY)
        fleet.kill(old)
        wait_until(lambda: holder(fleet) not in {"", old}, "another one takes over")
        fleet.start_one(old)
        assert fleet.holder_of(KEY) != old
        assert fleet.names() == make_fleet(kind, tmp_path / "other").names()


def test_no_two_servers_get_one_port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ports are given out before anybody listens, and however few there are to choose from."""
    few: set[int] = set()
    while len(few) < 12:
        few.add(fleet_base.free_port())
    monkeypatch.setattr(fleet_base, "_PORTS", sorted(few))
    for number in range(10):
        ports = make_fleet("cluster", tmp_path / str(number), binary=valkey_binary()).ports
        assert len(set(ports.values())) == len(ports)
    given, left, *_ = few
    monkeypatch.setattr(fleet_base, "_PORTS", [given, given + fleet_base._BUS, given - fleet_base._BUS, left])
    assert {fleet_base.free_port([given]) for _ in range(20)} == {left}  # a node of a cluster has two


def test_an_unknown_topology_is_refused(tmp_path: Path) -> None:
    """With those that there are."""
    with pytest.raises(UsageError, match=", ".join(KINDS)):
        make_fleet("ring", tmp_path)
