"""Which processes an agent takes for a job's, and how it learns that they ended."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.agent.rig import Rig, until
from tests.support.jobs import DEADLINE_S
from timeslice.agent.targets import TargetRegistry
from timeslice.models import Target


class Registry:
    """A registry, and how often it told of an exit."""

    def __init__(self, folder: Path) -> None:
        self.exits = 0
        self.path = folder / "targets.json"
        self.registry = TargetRegistry("g", "n1", self.path, self._count)

    def _count(self) -> None:
        self.exits += 1

    async def take(self, *targets: Target, **raw: str) -> None:
        busy = {target.pid for target in targets}
        await self.registry.refresh({f"{t.job}/{t.host}/{t.pid}": t.model_dump_json() for t in targets} | raw, busy)


def kill_unreaped(pid: int) -> None:
    """Afterwards it is dead for sure, and still a zombie."""
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


@pytest.fixture
async def known(tmp_path: Path) -> AsyncIterator[Registry]:
    made = Registry(tmp_path)
    yield made
    made.registry.close()


async def test_a_registered_process_is_known_until_it_ends(rig: Rig, known: Registry) -> None:
    """Its end is noticed without asking, and reported with number and start time."""
    process = rig.spawn()
    target = rig.target("a", process.pid)
    await known.take(target)
    assert known.registry.alive("a") == (target,)
    assert known.registry.find("a", str(target.pid), str(target.start)) == target
    process.kill()
    process.wait()
    await until(lambda: known.exits, "the exit was noticed")
    assert known.registry.jobs() == ()
    assert [(e.job, e.pid, e.start) for e in known.registry.ended] == [("a", target.pid, target.start)]
    assert known.registry.departed == {"a": {target.pid}}


async def test_what_is_known_last_is_on_disk(
    rig: Rig, known: Registry, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Two tasks of the agent learn of a process at a time: the slower one neither fails nor puts back what it knew."""
    first, second = (rig.target("a", rig.spawn().pid) for _ in range(2))
    begun, go, sync = threading.Event(), threading.Event(), os.fsync

    def slow_once(fd: int) -> None:
        if not begun.is_set():
            begun.set()
            assert go.wait(DEADLINE_S)
        sync(fd)

    monkeypatch.setattr(os, "fsync", slow_once)
    slower = asyncio.create_task(known.take(first))
    await until(begun.is_set, "the first is being written")
    faster = asyncio.create_task(known.take(first, second))
    await asyncio.wait({faster}, timeout=0.5)  # it may have to wait
    go.set()
    await asyncio.gather(slower, faster)
    assert {each["pid"] for each in json.loads(known.path.read_text())} == {first.pid, second.pid}
    assert caplog.messages == []


async def test_a_dead_process_is_not_alive_though_nobody_has_noticed_yet(rig: Rig, known: Registry) -> None:
    """The kernel is asked, not the event loop: a zombie is no living target."""
    process = rig.spawn()
    await known.take(rig.target("a", process.pid))
    kill_unreaped(process.pid)
    assert known.registry.alive("a") == ()


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"start": 1}, None),
        ({"uid": 12345}, "registered was 12345"),
        ({"pid_namespace": "pid:[1]"}, "another pid namespace"),
    ],
)
async def test_a_process_that_is_not_the_one_that_registered_is_never_watched(
    rig: Rig, known: Registry, caplog: pytest.LogCaptureFixture, changes: dict[str, Any], complaint: str | None
) -> None:
    """Another start time (a reused number), another user or another pid namespace: not a target. G27"""
    target = rig.target("a", rig.spawn().pid, **changes)
    with caplog.at_level(logging.WARNING):
        await known.take(target)
    assert known.registry.jobs() == ()
    if complaint:
        assert complaint in caplog.text
        assert known.registry.ended == set()
    else:
        assert {(e.pid, e.start) for e in known.registry.ended} == {(target.pid, 1)}


async def test_a_reused_number_is_not_the_leases_process(rig: Rig, known: Registry) -> None:
    """A lease names number and start time of its process; a later process with that number is not vouched for."""
    target = rig.target("a", rig.spawn().pid)
    await known.take(target)
    assert known.registry.find("a", str(target.pid), str(target.start - 1)) is None
    assert known.registry.find("a", str(target.pid), str(target.start)) == target


async def test_only_processes_of_this_node_are_taken(rig: Rig, known: Registry) -> None:
    """The hash names the processes of all nodes."""
    await known.take(rig.target("a", os.getpid(), host="n2"))
    assert known.registry.jobs() == ()
    assert known.registry.ended == set()


async def test_invalid_registrations_are_ignored(rig: Rig, known: Registry, caplog: pytest.LogCaptureFixture) -> None:
    """Garbage, and a record that says other than its field, are logged and dropped; the good one is taken."""
    good = rig.target("a", rig.spawn().pid)
    other = rig.target("b", os.getpid())
    with caplog.at_level(logging.WARNING):
        await known.take(good, **{"c/n1/5": "{", "d/n1/6": other.model_dump_json(), "nonsense": "x", "e/n1/7": "[]"})
    assert known.registry.jobs() == ("a",)
    assert caplog.text.count("its record is invalid") == 2
    assert "names other than its content" in caplog.text


async def test_what_redis_forgot_is_kept(rig: Rig, known: Registry) -> None:
    """An empty answer takes nothing away, and the next run finds the process on disk."""
    target = rig.target("a", rig.spawn().pid)
    await known.take(target)
    await known.take()
    assert known.registry.alive("a") == (target,)
    later = Registry(known.path.parent)
    later.registry.load()
    assert later.registry.alive("a") == (target,)
    later.registry.close()


async def test_what_could_not_be_written_is_written_later(rig: Rig, tmp_path: Path) -> None:
    """The disk failed once, and nothing has changed since: who is watched is on it all the same as soon as it works."""
    known = Registry(tmp_path / "away")
    await known.take(rig.target("a", rig.spawn().pid))
    assert not known.path.exists()
    known.path.parent.mkdir()
    await known.take()
    assert '"job":"a"' in known.path.read_text()
    known.registry.close()


async def test_one_that_ended_meanwhile_is_not_kept_for_ever(rig: Rig, known: Registry) -> None:
    """The next run tells its end once, and the run after that knows nothing of it."""
    process = rig.spawn()
    await known.take(rig.target("a", process.pid))
    process.kill()
    process.wait()
    for ended in (1, 0):
        later = Registry(known.path.parent)
        later.registry.load()
        assert len(later.registry.ended) == ended
        await later.take()
        later.registry.close()


async def test_a_second_registration_adds_what_the_first_one_lacked(rig: Rig, known: Registry) -> None:
    """The same process tells of its channel later."""
    process = rig.spawn()
    await known.take(rig.target("a", process.pid))
    await known.take(rig.target("a", process.pid, channel="n1.1.1"))
    assert [target.channel for target in known.registry.alive("a")] == ["n1.1.1"]


async def test_jobs_and_their_processes_are_kept_apart(rig: Rig, known: Registry) -> None:
    """One job's end is not another's, and a job with a process left has not departed."""
    first, second, other = rig.spawn(), rig.spawn(), rig.spawn()
    await known.take(rig.target("a", first.pid), rig.target("a", second.pid), rig.target("b", other.pid))
    first.kill()
    first.wait()
    await until(lambda: known.exits, "the exit was noticed")
    assert [target.pid for target in known.registry.alive("a")] == [second.pid]
    assert known.registry.departed == {}
    assert known.registry.pids() == {second.pid, other.pid}


async def test_an_unreadable_file_does_not_stop_the_agent(
    rig: Rig, known: Registry, caplog: pytest.LogCaptureFixture
) -> None:
    """What is in the file is not trusted."""
    known.path.write_text('[{"job": "../x"}]')
    known.registry.load()
    assert known.registry.jobs() == ()
    assert "known again when they register" in caplog.text
