"""A job's memory in a torture run, and what the run reads beside it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from timeslice.arena import Device
from timeslice.client.lease import BaseLease
from timeslice.embedded import EmbeddedServer
from timeslice.errors import LeaseLostError
from timeslice.locks import scripts
from timeslice.locks.drivers import SyncDriver
from timeslice.locks.keys import Keys
from timeslice.locks.scripts import Request
from timeslice.torture.events import EventReader
from timeslice.torture.history import Told, Writer, read
from timeslice.torture.job import Memory
from timeslice.torture.samples import quarters

SIZE = 1 << 20


class Held:
    """A lease that is lost after so many looks."""

    def __init__(self, looks: int) -> None:
        self.looks = looks

    def ensure_held(self) -> None:
        self.looks -= 1
        if self.looks < 0:
            raise LeaseLostError("lost")


def lease(looks: int = 100) -> BaseLease:
    return cast("BaseLease", Held(looks))


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Memory]:
    device = Device.create(tmp_path / "device", 2 * SIZE, advisory=True)
    found = Memory(Path(device.path), "a", SIZE)
    yield found
    found.close()
    device.destroy(force=True)


def test_what_was_left_is_found(memory: Memory) -> None:
    """The checksum of what was written is that of what is there, and another content has another."""
    memory.fill(b"a" * SIZE, lease())
    first = memory.digest
    assert first == memory.found()
    memory.fill(b"b" * SIZE, lease())
    assert first != memory.digest == memory.found()


def test_a_lease_lost_in_mid_write_leaves_unknown_content(memory: Memory) -> None:
    """Half of the old content and half of the new is nothing to compare with; what is written next is."""
    memory.fill(b"a" * SIZE, lease())
    with pytest.raises(LeaseLostError):
        memory.fill(b"b" * SIZE, lease(looks=1))
    assert not memory.digest
    memory.fill(b"c" * SIZE, lease())
    assert memory.digest == memory.found()


def test_events_are_read_once_and_again_after_the_server_began_anew(tmp_path: Path) -> None:
    """A stream with lower ids than those that were read is another stream, and read from its start."""
    with EmbeddedServer() as own:
        driver, keys = SyncDriver(own.url), Keys().group("g")
        driver.client.xadd(keys.events, {"type": "NodeJoined", "node": "n1"}, id="9999999999999-0")
        reader = EventReader(own.url, ("g",), Writer(tmp_path / "events.jsonl"))
        _await(tmp_path / "events.jsonl", 1)
        driver.client.flushall()
        request = Request("w", "a", "n1", 1, 1, lock_only=True)
        driver.run(scripts.acquire(keys, request))
        found = _await(tmp_path / "events.jsonl", 2)
        reader.close()
        driver.close()
    assert found[0].type == "NodeJoined"
    assert "LeaseGranted" in {line.type for line in found[1:]}
    assert len({line.entry for line in found}) == len(found)


def test_quarters() -> None:
    """What grows shows in the last quarter; what rose and fell in the highest."""
    assert quarters({"keys": [1, 1, 5, 5, 9, 9, 3, 3]}) == {"keys": {"first": 1, "last": 3, "highest": 9}}
    assert quarters({"keys": [2.0]}) == {"keys": {"first": 2, "last": 2, "highest": 2}}


def _await(path: Path, count: int) -> list[Told]:
    until = time.monotonic() + 20
    while True:
        found = [line for line in read(path) if isinstance(line, Told)]
        if len(found) >= count:
            return found
        assert time.monotonic() < until, found
        time.sleep(0.02)
