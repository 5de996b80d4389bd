"""The device itself: capacity, finding it again, making and destroying it."""

from __future__ import annotations

import logging
import mmap
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.arena.conftest import CAPACITY, MIB, DeviceMaker, JobError, JobProcess, wait_until
from timeslice.arena import Arena, Device, DeviceOutOfMemoryError
from timeslice.arena.errors import DeviceInUseError, NotADeviceError
from timeslice.errors import UsageError

StartJob = Callable[..., JobProcess]


def test_whole_capacity_can_be_allocated(device: Device) -> None:
    """A new device is empty, and every byte of its capacity can be allocated, none more."""
    assert (device.capacity, device.free_bytes(), device.used_bytes()) == (CAPACITY, CAPACITY, 0)
    with Arena(device) as arena:
        arena.allocate(CAPACITY)
        assert (device.free_bytes(), device.used_bytes()) == (0, CAPACITY)
        with pytest.raises(DeviceOutOfMemoryError):
            arena.allocate(1)


def test_kernel_enforces_the_capacity(make_device: DeviceMaker) -> None:
    """On a mounted device somebody who does not ask this package gets the kernel's ENOSPC."""
    device = make_device()
    assert not device.advisory
    fd = os.open(device.path, os.O_TMPFILE | os.O_RDWR, 0o600)
    with pytest.raises(OSError, match="No space left"):
        os.posix_fallocate(fd, 0, CAPACITY + mmap.PAGESIZE)
    os.close(fd)
    assert device.used_bytes() == 0


def test_create_again_is_the_same_device(device: Device) -> None:
    """Making the device again with the same size changes nothing, with another size it is refused."""
    with Arena(device) as arena:
        arena.allocate(MIB)
        again = Device.create(device.path, CAPACITY)
        assert again.used_bytes() == MIB
        assert again.advisory == device.advisory
        with pytest.raises(UsageError, match="destroy it first"):
            Device.create(device.path, CAPACITY * 2)


def test_open_finds_it(device: Device) -> None:
    """A device is found again by its folder."""
    found = Device.open(device.path)
    assert (found.path, found.capacity, found.advisory) == (device.path, CAPACITY, device.advisory)


def test_open_of_something_else(tmp_path: Path) -> None:
    """A folder that is no device gives an error that says how to make one."""
    with pytest.raises(NotADeviceError, match="no emulated device; make one"):
        Device.open(tmp_path)


def test_create_spares_foreign_files(tmp_path: Path) -> None:
    """A folder with files in it is not covered by a mount."""
    (tmp_path / "thesis.tex").write_text("42")
    with pytest.raises(UsageError, match="not empty"):
        Device.create(tmp_path, MIB)
    assert (tmp_path / "thesis.tex").read_text() == "42"


def test_destroy_refused_while_used(device: Device) -> None:
    """A device with memory in use is not destroyed; afterwards it is, and its folder is no device any more."""
    with Arena(device) as arena:
        arena.allocate(MIB)
        with pytest.raises(DeviceInUseError):
            device.destroy()
        assert device.used_bytes() == MIB
    device.destroy()
    with pytest.raises(NotADeviceError):
        Device.open(device.path)
    Device.create(device.path, CAPACITY, advisory=device.advisory)


def test_without_the_right_to_mount() -> None:
    """Who may not mount gets an advisory device and is told so."""
    program = (
        "import logging, os, sys\n"
        "from timeslice.arena import Device, syscalls\n"
        "logging.basicConfig()\n"
        "if os.geteuid() == 0: os.setuid(65534)\n"
        "device = Device.create(sys.argv[1], 1 << 20)\n"
        "print(device.advisory, device.free_bytes())\n"
        "device.destroy()\n"
    )
    with tempfile.TemporaryDirectory() as folder:  # not tmp_path: its parents are closed to other users
        if os.geteuid() == 0:
            os.chown(folder, 65534, 65534)
        result = subprocess.run([sys.executable, "-c", program, folder], capture_output=True, text=True, check=False)
    assert (result.stdout, result.returncode) == (f"True {1 << 20}\n", 0), result.stderr
    assert "its capacity is advisory" in result.stderr


def test_advisory_share_of_a_dead_process_is_free(make_device: DeviceMaker, start_job: StartJob) -> None:
    """On an advisory device a crash frees the share of the process."""
    device = make_device(advisory=True)
    job = start_job(device)
    job.allocate(CAPACITY)
    assert device.free_bytes() == 0
    job.process.kill()
    wait_until(lambda: device.free_bytes() == CAPACITY, "the share is free")
    with Arena(device) as arena:
        arena.allocate(CAPACITY)


def test_asking_for_a_mount_never_gives_a_pool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """``advisory=False`` fails rather than to take a pool whose capacity nobody enforces."""
    monkeypatch.setattr("timeslice.arena.syscalls.mount_tmpfs", lambda *_: 1)
    with pytest.raises(PermissionError, match="mounting a tmpfs failed"):
        Device.create(tmp_path / "device", MIB, advisory=False)
    with caplog.at_level(logging.WARNING):
        pool = Device.create(tmp_path / "device", MIB)
    assert pool.advisory
    assert "advisory" in caplog.text
    pool.destroy()


def test_kernel_refuses_what_looked_free(make_device: DeviceMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    """When a neighbour takes the memory between the look and the request, it is all or nothing all the same."""
    device = make_device()
    monkeypatch.setattr(Device, "free_bytes", lambda self: 1 << 40)
    files = [device.new_file(), device.new_file()]
    with pytest.raises(DeviceOutOfMemoryError) as raised:
        device.reserve([(files[0], MIB), (files[1], CAPACITY)], (os.getpid(), 0, 0), CAPACITY + MIB, "wait")
    assert isinstance(raised.value.__cause__, OSError)
    assert [os.fstat(fd).st_size for fd in files] == [0, 0]
    for fd in files:
        os.close(fd)
    monkeypatch.undo()
    assert device.used_bytes() == 0


def test_second_job_does_not_fit(device: Device, start_job: StartJob) -> None:
    """The second job gets an out-of-memory error that names need and free, and leaves nothing behind."""
    first, second = start_job(device), start_job(device)
    first.allocate(10 * MIB)
    with pytest.raises(JobError, match=r"need 10\.0 MiB, 6\.0 MiB free") as raised:
        second.allocate(10 * MIB)
    assert raised.value.kind == "DeviceOutOfMemoryError"
    assert second.on_device() == 0
    assert device.used_bytes() == 10 * MIB
    second.allocate(6 * MIB)
