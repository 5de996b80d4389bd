"""What operators read of a process: the control block, believed no further than it can be checked."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.arena.conftest import MIB, DeviceMaker, JobProcess, Tool
from timeslice.arena import Device, Target, survey
from timeslice.arena.control import ControlBlock

StartJob = Callable[..., JobProcess]


def test_tool_opens_no_file_that_the_process_only_names(
    make_device: DeviceMaker, start_job: StartJob, tool: Tool, tmp_path: Path
) -> None:
    """A control block that names some other descriptor gets that file neither emptied nor overwritten."""
    precious = tmp_path / "precious"
    precious.write_bytes(b"p" * MIB)
    program = (
        "import os, sys\n"
        "from timeslice.arena import Arena\n"
        "arena = Arena(sys.argv[1]); arena.allocate(1 << 20)\n"
        "fd = os.open(sys.argv[2], os.O_RDONLY); found = os.fstat(fd)\n"
        "record = arena._control.read(); forged = record.allocations[0]\n"
        "forged.device_fd, forged.device_dev, forged.device_ino = fd, found.st_dev, found.st_ino\n"
        "arena._control.write(record)\n"
        "print('ready', flush=True); sys.stdin.read()\n"
    )
    forger = subprocess.Popen(
        [sys.executable, "-c", program, make_device().path, str(precious)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with forger:
        assert forger.stdout is not None
        assert forger.stdout.readline() == b"ready\n"
        tool.act(forger.pid, "lock")
        assert tool("--action", "checkpoint", "--pid", forger.pid).returncode == 1
        assert precious.read_bytes() == b"p" * MIB
        forger.kill()


def test_torn_record_is_not_believed(device: Device, start_job: StartJob) -> None:
    """A record whose writer died half way is ignored in favour of the one before."""
    job = start_job(device)
    job.allocate(MIB)
    (link,) = [p for p in Path(f"/proc/{job.pid}/fd").iterdir() if "memfd:timeslice-arena" in str(p.readlink())]
    control = ControlBlock(os.open(link, os.O_RDWR))
    try:
        before = control.read()
        record = control.read()
        record.state = "checkpointed"
        frames = [control._frame(slot) for slot in (0, 1)]
        control.write(record)
        (changed,) = [slot for slot in (0, 1) if control._frame(slot) != frames[slot]]
        assert control.read().state == "checkpointed"
        os.pwrite(control.fd, b"\0\0\0\0", changed * 256 * 1024 + 60)
        assert control.read().state == before.state == "running"
    finally:
        os.close(control.fd)


def test_survey_names_holders(device: Device, start_job: StartJob, tool: Tool) -> None:
    """Who holds the device is told with bytes, largest first; a suspended job is no holder."""
    small, large, out = (start_job(device) for _ in range(3))
    out.allocate(MIB)
    tool.act(out.pid, "lock", "checkpoint")
    small.allocate(MIB)
    large.allocate(3 * MIB)
    found = [(info.target.pid, info.bytes_on_device) for info in survey.holders(device)]
    assert found == [(large.pid, 3 * MIB), (small.pid, MIB)]
    (info,) = survey.arenas_of(out.pid)
    assert (info.state, info.bytes_on_device, info.bytes_allocated, info.bytes_on_host) == (
        "checkpointed",
        0,
        MIB,
        MIB,
    )


def test_an_empty_device_is_told_without_a_look_at_every_process(
    device: Device, start_job: StartJob, tool: Tool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who has nothing on it can't hold it, so a swap does not pay for all processes of the machine."""
    job = start_job(device)
    job.allocate(MIB)
    looked_at: list[Target | int] = []
    really = survey.arenas_of

    def look(target: Target | int) -> list[survey.ArenaInfo]:
        looked_at.append(target)
        return really(target)

    monkeypatch.setattr(survey, "arenas_of", look)
    assert [info.target.pid for info in survey.holders(device)] == [job.pid]
    assert job.pid in looked_at
    looked_at.clear()
    tool.act(job.pid, "lock", "checkpoint")
    assert survey.holders(device) == []
    assert looked_at == []
