"""The agent with the backends that are installed, on a real emulated device, with real bytes."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from tests.agent.rig import Rig, until
from timeslice.agent import procfs
from timeslice.arena import Device
from timeslice.arena.device import FAULTS_FILE
from timeslice.arena.survey import arenas_of
from timeslice.backends.registry import get_backend
from timeslice.locks import scripts

SIZE = 8 << 20
DEVICE = 12 << 20

# Says when it has its memory; on a line of input it says whether the content is still what it wrote.
JOB = f"""
import sys, numpy
from timeslice.arena import Arena, Device
arena = Arena(Device.open(sys.argv[1]))
print("up", flush=True)
sys.stdin.readline()
memory = numpy.frombuffer(arena.allocate({SIZE}), dtype="uint8")
memory[:] = 7
print("loaded", flush=True)
for _ in sys.stdin:
    print("same" if (memory == 7).all() else "different", flush=True)
"""


@asynccontextmanager
async def _agent(rig: Rig, folder: Path, device: int = DEVICE) -> AsyncIterator[None]:
    try:
        async with rig.agent(get_backend, emulate={rig.name: device}, backends={}, ttl_s=0.9):
            yield
    finally:
        Device.open(folder / "devices" / rig.name).destroy(force=True)


def _tell(process: subprocess.Popen[str]) -> str:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    return process.stdout.readline().strip()


async def _job(rig: Rig, name: str, folder: Path) -> subprocess.Popen[str]:
    process = rig.spawn(JOB, str(folder / "devices" / rig.name))
    await rig.register(rig.target(name, process.pid))
    return process


async def test_real_state_leaves_the_device_and_comes_back(rig: Rig, clean_environment: Path) -> None:
    """Two jobs that do not fit together take turns; the content is the same afterwards. One of them is stopped by
    its user and is moved all the same."""
    async with _agent(rig, clean_environment):
        first, second = await _job(rig, "a", clean_environment), await _job(rig, "b", clean_environment)
        assert _tell(first) == "loaded"
        first.send_signal(signal.SIGSTOP)
        await until(lambda: not procfs.runs(rig.target("a", first.pid)), "job a is stopped")
        await rig.swap("a", into="b")
        assert (await rig.member("a")).host_bytes == SIZE
        assert _tell(second) == "loaded"
        first.send_signal(signal.SIGCONT)
        await rig.yield_("b")
        await rig.acquire("a")
        swap = await rig.plan("b", into="a")
        assert (await rig.order(rig.command(swap, "prepare", "b", into="a")))["step"] == "prepared"
        await rig.step("prepare", "commit")
        assert (await rig.order(rig.command(swap, "commit", "b", into="a")))["step"] == "done"
        assert isinstance(await rig.promote(swap), scripts.Promoted)
        assert _tell(first) == "same"


async def test_memory_taken_without_a_hold_is_seen(rig: Rig, clean_environment: Path) -> None:
    """C20, F01: two jobs with an empty arena are no resident jobs; the one that loads unasked is flagged, and when
    its process ends nothing of it is left."""
    async with _agent(rig, clean_environment):
        idle, intruder = await _job(rig, "a", clean_environment), await _job(rig, "b", clean_environment)
        assert _tell(intruder) == "loaded"

        async def flagged() -> bool:
            member = await rig.member("b")
            return member is not None and bool(member.unheld)

        await until(flagged, "job b is flagged")
        assert (await rig.member("b")).device_bytes == SIZE
        assert await rig.member("a") is None
        intruder.kill()
        intruder.wait()

        async def gone() -> bool:
            return await rig.member("b") is None

        await until(gone, "job b is gone")
        assert isinstance(await rig.acquire("a"), scripts.Granted)
        assert idle.poll() is None


async def test_real_bytes_come_in_while_others_leave(rig: Rig, clean_environment: Path) -> None:
    """On an emulated device with room for two jobs, moved by the tool: the comer's bytes are there while the leaver's
    copy takes its time, and both contents are the same afterwards."""
    folder = clean_environment
    async with _agent(rig, folder, 3 * SIZE):
        device = Device.open(folder / "devices" / rig.name)
        a, b = [await _job(rig, name, folder) for name in "ab"]
        assert [_tell(process) for process in (a, b)] == ["loaded", "loaded"]
        await rig.swap("a", into="b")
        await rig.yield_("b")
        await rig.acquire("a")
        swap = await rig.plan("b", into="a")
        await rig.order(rig.command(swap, "prepare", "b", into="a"))
        await rig.step("prepare", "commit")
        faults = Path(device.path) / FAULTS_FILE
        faults.write_text("checkpoint:hang=4")
        command = rig.command(swap, "commit", "b", into="a")
        await rig.send(command)
        await until(lambda: device.used_bytes() >= 2 * SIZE, "both are on the device")
        assert arenas_of(b.pid)[0].state == "locked"
        assert (await rig.outcome(command))["step"] == "done"
        faults.unlink()
        assert device.used_bytes() == SIZE
        assert _tell(a) == "same"
        await rig.promote(swap)
        await rig.yield_("a")
        await rig.acquire("b")
        swap = await rig.plan("a", into="b")
        await rig.order(rig.command(swap, "prepare", "a", into="b"))
        await rig.step("prepare", "commit")
        assert (await rig.order(rig.command(swap, "commit", "a", into="b")))["step"] == "done"
        assert _tell(b) == "same"
