"""What a run reads beside the product: devices by their processes, heartbeats by the server, kinds that came about."""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.torture.tale import Tale
from timeslice.arena import Device
from timeslice.embedded import EmbeddedServer
from timeslice.locks import scripts
from timeslice.locks.drivers import SyncDriver
from timeslice.locks.keys import Keys
from timeslice.torture.checker import Terms, check
from timeslice.torture.heartbeats import Beat, Heartbeats, overdue
from timeslice.torture.history import Silent, Surveyed, Writer, read_so_far
from timeslice.torture.report import Judged, document
from timeslice.torture.stage import GANG_GROUP, GANG_RANKS, SERVED, seats
from timeslice.torture.survey import Surveyor, look, read_pids

SIZE = 1 << 20
OWNER = """
import sys
from timeslice.arena import Arena
arena = Arena(sys.argv[1], label=sys.argv[2])
view = arena.allocate(int(sys.argv[3]))
view[:] = b"x" * len(view)
print("there", flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def device(tmp_path: Path) -> Iterator[Device]:
    made = Device.create(tmp_path / "device", 4 * SIZE, advisory=True)
    yield made
    made.destroy(force=True)


def test_who_is_on_a_device_is_read_from_the_processes(device: Device, tmp_path: Path) -> None:
    """Jobs and bytes, of those processes that are asked for; children of a job's process are among them."""
    devices = {"g": {"n1": Path(device.path)}}
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, device.path, "a", str(SIZE)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as owner:
        assert owner.stdout
        assert owner.stdout.readline() == "there\n"
        assert look(devices, [owner.pid]) == {("g", "n1"): {"a": SIZE}}
        assert look(devices, []) == {("g", "n1"): {}}
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
        try:  # who can open nothing has not seen that nothing is there
            with pytest.raises(OSError, match="no descriptor left"):
                look(devices, [owner.pid])
            with pytest.raises(OSError, match="Too many open files"):
                read_pids(tmp_path / "pids")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        file = tmp_path / "pids"
        surveyor = Surveyor(devices, lambda: [owner.pid], file, Writer(tmp_path / "survey.jsonl"))
        _await(lambda: any(isinstance(line, Surveyed) for line in read_so_far(tmp_path / "survey.jsonl")))
        surveyor.close()
        assert str(owner.pid) in file.read_text().split()
        owner.communicate("")
    assert look(devices, [owner.pid]) == {("g", "n1"): {}}


def test_a_heartbeat_tells_when_it_came() -> None:
    """One that came after the deadline before it was overdue for so long; one that still is to come is overdue now."""
    before, ns = Beat(deadline=5000, now=3000, offset=0), 1_000_000
    assert overdue(before, Beat(deadline=8000, now=4500, offset=0), 4000) == []
    assert overdue(before, Beat(deadline=9700, now=5800, offset=0), 4000) == [(5000 * ns, 5700 * ns)]
    assert overdue(before, Beat(deadline=5000, now=5500, offset=7), 4000) == [(5000 * ns + 7, 5500 * ns + 7)]
    assert overdue(before, Beat(deadline=3_605_000, now=3_603_000, offset=-3_600_000 * ns), 4000) == []
    assert overdue(None, Beat(deadline=8000, now=4500, offset=0), 4000) == []


def test_a_silent_node_is_written_down(tmp_path: Path) -> None:
    """While its heartbeat is overdue, by the server's own clock."""
    with EmbeddedServer() as own:
        driver = SyncDriver(own.url)
        driver.run(scripts.heartbeat(Keys().group("g"), "n1", 1))
        began = time.monotonic_ns()
        beats = Heartbeats(own.url, ("g",), 0.001, Writer(tmp_path / "beats.jsonl"))
        _await(lambda: list(read_so_far(tmp_path / "beats.jsonl")))
        beats.close()
        driver.close()
    (first, *_) = read_so_far(tmp_path / "beats.jsonl")
    assert isinstance(first, Silent)
    assert (first.group, first.node) == ("g", "n1")
    assert first.since < began + 1e9
    assert first.since < first.at


def test_the_report_names_kinds_that_did_not_come_about() -> None:
    """Of those that were planned: what the machine can't do is told apart, with its reason."""
    tale = Tale()
    for kind in ("kill", "title"):
        tale.heals(tale.fault(kind, "a.1", kills=("a.1",)))
    tale.ends()
    facts = {"planned": ["kill-job", "title", "trim", "clock"], "kinds_left_out": {"clock": "no libfaketime"}}
    told = document(Judged(tale.lines, check(tale.lines, Terms()), True), facts, None)
    assert told["faults_by_kind"] == {"kill-job": 1, "title": 1}
    assert told["kinds_not_injected"] == ["trim"]
    assert told["kinds_left_out"] == {"clock": "no libfaketime"}


def test_eight_seats_have_one_gang() -> None:
    """Its ranks are processes of one job, on nodes of the group that they take together."""
    ranks = [seat for seat in seats(8) if seat.rank is not None]
    assert [seat.rank for seat in ranks] == list(range(GANG_RANKS))
    assert len({seat.pair for seat in ranks}) == 1
    assert {seat.node for seat in ranks} <= set(SERVED[GANG_GROUP])
    assert not [seat for seat in seats(7) if seat.rank is not None]


def _await(condition: object) -> None:
    until = time.monotonic() + 30
    assert callable(condition)
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)
