"""Processes of jobs that an agent can't watch, or not by a pidfd: they never count as ended for that."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.agent.rig import Rig, until
from tests.agent.test_targets import Registry
from tests.agent.workers import SIZE, Starts, device_path, emulated, starts, watched
from tests.support.jobs import process_state
from timeslice.agent import procfs
from timeslice.agent import watched as watched_module
from timeslice.arena import Device
from timeslice.arena.survey import arenas_of

__all__ = ["starts"]

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
async def known(tmp_path: Path) -> AsyncIterator[Registry]:
    made = Registry(tmp_path)
    yield made
    made.registry.close()


def _no_descriptor(_: int) -> int:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


@pytest.mark.parametrize(
    ("reason", "told"),
    [
        ("descriptors", "let the agent open more files (ulimit -n)"),
        ("user", "run the agent as root"),
        ("namespace", "run the agent with the host's pid namespace (hostPID)"),
        ("proof", "let it register itself"),
    ],
)
async def test_a_process_that_is_not_watched_is_told_by_its_job_and_has_not_ended(
    rig: Rig, known: Registry, monkeypatch: pytest.MonkeyPatch, reason: str, told: str
) -> None:
    """Whatever keeps the agent from it: the job may be on the device, and who to ask is said in one line."""
    process = rig.spawn(job="other" if reason == "proof" else "a")
    target = rig.target("a", process.pid, **({"pid_namespace": "pid:[1]"} if reason == "namespace" else {}))
    with monkeypatch.context() as patched:
        if reason == "descriptors":
            patched.setattr(procfs, "open_pidfd", _no_descriptor)
        elif reason == "user":
            patched.setattr(os, "geteuid", lambda: target.uid + 1)
        await known.take(target)
    assert list(known.registry.unwatched) == ["a"]
    line = known.registry.unwatched["a"]
    assert line.startswith(f"process {process.pid} of host n1: ")
    assert told in line
    assert "\n" not in line
    assert (known.registry.ended, known.registry.departed) == (set(), {})


async def test_it_is_told_until_it_is_watched_or_has_ended(
    rig: Rig, known: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One is watched as soon as a descriptor is there for it; another one ends first. Nobody is told then."""
    first, second = rig.spawn(job="a"), rig.spawn(job="b")
    targets = [rig.target("a", first.pid), rig.target("b", second.pid)]
    with monkeypatch.context() as patched:
        patched.setattr(procfs, "open_pidfd", _no_descriptor)
        await known.take(*targets)
        assert sorted(known.registry.unwatched) == ["a", "b"]
    second.kill()
    second.wait()
    await known.take(*targets)
    assert known.registry.unwatched == {}
    assert known.registry.jobs() == ("a",)
    assert [each.job for each in known.registry.ended] == ["b"]


async def test_a_record_that_names_no_process_is_nobodys(known: Registry) -> None:
    """What can't be read, or says other than its name, is refused and keeps no job from being out."""
    await known.take(**{"a/n1/1": "{", "b/n1/2": "[]"})
    assert len(known.registry.refused) == 2
    assert known.registry.unwatched == {}


async def test_who_was_watched_before_is_not_forgotten_for_want_of_a_descriptor(
    rig: Rig, known: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent starts again and can't watch it at first; Redis has lost it. It is told, kept on disk, and watched as
    soon as that can be."""
    target = rig.target("a", rig.spawn(job="a").pid)
    await known.take(target)
    later = Registry(known.path.parent)
    with monkeypatch.context() as patched:
        patched.setattr(procfs, "open_pidfd", _no_descriptor)
        later.registry.load()
        await later.take()
        assert "let the agent open more files" in later.registry.unwatched["a"]
        assert any("job a is not watched" in line for line in later.registry.complaints())
        assert json.loads(later.path.read_text())[0]["pid"] == target.pid
    await later.take()
    assert later.registry.alive("a") == (target,)
    assert later.registry.unwatched == {}
    later.registry.close()


async def test_what_discovery_may_not_take_is_told_too(rig: Rig, known: Registry) -> None:
    """It shows the job, and goes on as another user before it is watched: it is left alone, and the job is told."""
    process = rig.spawn(job="a")
    start = rig.target("a", process.pid).start
    why = known.registry.take_found("a", process.pid, start, os.getuid() + 1)
    assert why is not None
    known.registry.passed_over = {(process.pid, start): ("a", why)}
    assert "run as user id" in known.registry.unwatched["a"]


@pytest.mark.skipif(not procfs.sees_all(), reason="only who sees all processes can tell that one is not here")
@pytest.mark.parametrize("lives", [True, False])
async def test_a_process_of_a_namespace_that_nobody_here_is_in_may_live_in_a_sandbox(
    rig: Rig, known: Registry, monkeypatch: pytest.MonkeyPatch, lives: bool
) -> None:
    """A sandbox has a kernel of its own, so its processes are not among this machine's. It is struck off once: a living
    one registers again, and then counts as one that can't be watched; else it has ended."""
    target = rig.target("a", os.getpid(), pid_namespace="pid:[7]")
    record = {f"a/n1/{target.pid}": target.model_dump_json()}
    await known.registry.refresh(record)
    assert [each.job for each in known.registry.ended] == ["a"]
    assert known.registry.departed == {}, "it may live"
    assert "if it lives in a sandbox" in known.registry.unwatched["a"]
    await known.registry.refresh({})  # the group has struck it off
    if not lives:
        monkeypatch.setattr(watched_module, "COMES_BACK_S", 0.0)
    for _ in range(2):
        await known.registry.refresh(record if lives else {})
    if lives:
        assert "lives in a sandbox with a kernel of its own" in known.registry.unwatched["a"]
        assert known.registry.departed == {}
    else:
        assert known.registry.unwatched == {}
        assert list(known.registry.departed) == ["a"]


HIDDEN = """
import asyncio, concurrent.futures.thread, json, os, sys
from pathlib import Path
from timeslice.agent.targets import TargetRegistry

os.setgroups([])
os.setresgid(65534, 65534, 65534)
os.setresuid(65534, 65534, 65534)  # only now: that user need not be able to read this Python

async def main():
    registry = TargetRegistry("g", "n1", Path("/nowhere/targets.json"), lambda: None)
    target = json.loads(sys.argv[1])
    await registry.refresh({f"a/n1/{target['pid']}": sys.argv[1]})
    print(json.dumps([registry.unwatched, len(registry.ended), list(registry.departed)]))

asyncio.run(main())
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
@pytest.mark.parametrize("hidepid", ["1", "2"])
@pytest.mark.parametrize("uid", [0, 65534], ids=["another-users", "as-if-its-own"])
def test_a_process_that_proc_hides_has_not_ended(rig: Rig, hidepid: str, uid: int) -> None:
    """The agent's user may not see it: neither the user that it registered nor its absence from /proc is a proof."""
    record = rig.target("a", rig.spawn(job="a").pid, uid=uid).model_dump_json()
    script = f'mount -t proc -o hidepid={hidepid} proc /proc && exec "$@"'
    line = ["unshare", "--mount", "sh", "-c", script, "sh", sys.executable, "-c", HIDDEN, record]
    done = subprocess.run(line, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.stdout, done.stderr
    unwatched, ended, departed = json.loads(done.stdout)
    assert list(unwatched) == ["a"]
    assert "run the agent as root" in unwatched["a"]
    assert (ended, departed) == (0, [])


def _sandboxed(rig: Rig, refusal: str, module: str, *arguments: str) -> subprocess.Popen[str]:
    line = [sys.executable, "-m", "tests.agent.sandboxed", refusal, module, *arguments]
    process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    rig.processes.append(process)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("refusal", ["EPERM", "ENOSYS"])
async def test_where_the_system_gives_no_pidfds_start_times_tell_processes_apart(rig: Rig, refusal: str) -> None:
    """The agent of a sandbox watches a holder, says once what it lacks, and notices the end."""
    agent = _sandboxed(rig, refusal, "tests.agent.runner", json.dumps(rig.options(ttl_s=0.9)))
    process, other = await rig.job("a", 600), await rig.job("b")
    await until(lambda: watched(rig) == {process.pid: "a", other.pid: "b"}, "both are watched")

    async def resident() -> bool:
        return await rig.member_state("a") == "resident"

    await until(resident, "it is seen on the device")
    process.kill()
    process.wait()

    async def gone() -> bool:
        return await rig.member("a") is None and watched(rig) == {other.pid: "b"}

    await until(gone, "its end is noticed")
    agent.send_signal(signal.SIGTERM)
    _, said = agent.communicate()
    assert said.count("this system gives no pidfds") == 1
    assert "is ignored" not in said


async def test_state_is_moved_where_the_system_gives_no_pidfds(
    rig: Rig, starts: Starts, clean_environment: Path
) -> None:
    """The backend's tool stops and moves exactly the process that was meant, and lets it go on."""
    options = json.dumps(rig.options(**emulated("g")))
    agent = _sandboxed(rig, "EPERM", "tests.kinds.daemon", "agent", options)
    try:
        worker = starts(JOB="a", GROUPS="g")
        worker.do("load")
        await until(lambda: watched(rig) == {worker.pid: "a"}, "it is found")

        async def resident() -> bool:
            return await rig.member_state("a") == "resident"

        await until(resident, "it is seen on the device")
        await rig.acquire("b")
        swap = await rig.plan("a", into="b")
        assert (await rig.order(rig.command(swap, "prepare", "a", into="b")))["step"] == "prepared"
        await rig.step("prepare", "commit")
        assert (await rig.order(rig.command(swap, "commit", "a", into="b")))["step"] == "done"
        (arena,) = arenas_of(worker.pid)
        assert (arena.bytes_on_device, arena.bytes_on_host) == (0, SIZE)
    finally:
        agent.kill()
        agent.wait()
        Device.open(device_path(clean_environment, "g")).destroy(force=True)


async def test_a_later_process_of_that_number_is_another_one_without_a_pidfd_too(
    rig: Rig, known: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A zombie has ended, and so has one whose start time is another's now."""

    def refused(_: int) -> int:
        return procfs.NO_PIDFD

    monkeypatch.setattr(procfs, "open_pidfd", refused)
    process, other = rig.spawn(job="a"), rig.spawn(job="b")
    await known.take(rig.target("a", process.pid), rig.target("b", other.pid))
    os.kill(process.pid, signal.SIGKILL)
    await until(lambda: process_state(process.pid) == "Z", "it is a zombie")
    assert known.registry.jobs() == ("b",)
    look = procfs.look_at(other.pid)
    assert look is not None
    values: dict[str, Any] = {**vars(look), "start": look.start + 1}
    monkeypatch.setattr(procfs, "look_at", lambda _: procfs.ProcessStatus(**values))
    assert known.registry.jobs() == ()
    await known.take()
    assert {each.job for each in known.registry.ended} == {"a", "b"}
