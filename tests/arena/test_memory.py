"""Device memory inside one process: allocate, free, suspend, resume, close, fork."""

from __future__ import annotations

import collections
import errno
import faulthandler
import gc
import mmap
import os
import pickle
import signal
from collections.abc import Callable
from pathlib import Path
from threading import Event, Thread

import numpy as np
import pytest

from tests.arena.conftest import CAPACITY, MIB, DeviceMaker, JobError, JobProcess, wait_until
from timeslice.arena import Arena, Device, DeviceOutOfMemoryError
from timeslice.arena.errors import ArenaStateError
from timeslice.errors import UsageError

StartJob = Callable[..., JobProcess]


def address(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).__array_interface__["data"][0])


def open_files() -> set[str]:
    return {path.name for path in Path("/proc/self/fd").iterdir()}


def test_memory_is_zeroed_and_writable(device: Device) -> None:
    """A view has the size asked for, holds zeros and takes writes; the device accounts for whole pages."""
    with Arena(device) as arena:
        view = arena.allocate(5000)
        assert (len(view), view.format, view.readonly) == (5000, "B", False)
        assert bytes(view) == bytes(5000)
        view[4999] = 7
        assert view[4999] == 7
        assert arena.bytes_on_device == device.used_bytes() == 2 * mmap.PAGESIZE


def test_odd_sizes_cost_their_pages(device: Device) -> None:
    """Huge pages do not make small allocations cost more than their own pages."""
    sizes = [1, 4096, 3 * MIB + 1, 2 * MIB, 5 * MIB - 1]
    with Arena(device) as arena:
        for size in sizes:
            arena.allocate(size)
        expected = sum(-(-size // mmap.PAGESIZE) * mmap.PAGESIZE for size in sizes)
        assert device.used_bytes() == arena.bytes_on_device == arena.bytes_allocated == expected
        arena.suspend()
        assert (device.used_bytes(), arena.bytes_on_device, arena.bytes_allocated) == (0, 0, expected)
        arena.resume()
        assert device.used_bytes() == expected


@pytest.mark.parametrize("nbytes", [0, -1])
def test_nothing_is_not_allocated(device: Device, nbytes: int) -> None:
    """An allocation has at least one byte."""
    with Arena(device) as arena, pytest.raises(UsageError):
        arena.allocate(nbytes)


def test_out_of_memory_is_an_os_error(device: Device) -> None:
    """The error is an OSError with ENOSPC, carries need and free, survives pickling, and nothing leaks."""
    with Arena(device) as arena:
        arena.allocate(MIB)
        before = open_files()
        with pytest.raises(OSError, match="free some of it") as raised:
            arena.allocate(CAPACITY)
        assert open_files() == before
        assert arena.bytes_allocated == device.used_bytes() == MIB
    error = raised.value
    assert isinstance(error, DeviceOutOfMemoryError)
    assert (error.errno, error.need, error.free) == (errno.ENOSPC, CAPACITY, CAPACITY - MIB)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_same_content_at_the_same_address(device: Device) -> None:
    """Over suspend and resume content and address stay; the bytes really leave the device and come back."""
    with Arena(device) as arena:
        view = arena.allocate(3 * MIB)
        array = np.frombuffer(view, np.uint8)
        array[:] = np.random.default_rng(1).integers(0, 256, array.size, dtype=np.uint8)
        before, place = array.copy(), address(view)
        for _ in range(3):
            assert arena.suspend() == 3 * MIB
            assert (arena.state, device.used_bytes(), arena.bytes_on_host) == ("checkpointed", 0, 3 * MIB)
            assert arena.resume() == 3 * MIB
            assert (arena.state, device.used_bytes()) == ("running", 3 * MIB)
            assert np.array_equal(array, before)
            assert address(view) == place
            array += 1
            before += 1
        del array


def test_content_comes_from_the_saved_copy(device: Device) -> None:
    """One byte flipped in the saved copy is one byte flipped in device memory after the resume."""
    with Arena(device) as arena:
        view = arena.allocate(MIB)
        view[:] = bytes(range(256)) * 4096
        arena.suspend()
        host = arena._pieces[0].allocation.host_fd
        os.pwrite(host, b"\xff", 1000)
        arena.resume()
        expected = bytearray(bytes(range(256)) * 4096)
        expected[1000] = 0xFF
        assert bytes(view) == bytes(expected)


def test_early_resume_leaves_the_copy_intact(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A resume that does not fit fails, changes nothing, and works once there is room."""
    with Arena(device) as first, Arena(device) as second:
        view = first.allocate(10 * MIB)
        view[:] = b"x" * len(view)
        first.suspend()
        other = second.allocate(10 * MIB)
        with monkeypatch.context() as patch:
            patch.delattr(Device, "reserve")  # a doomed restore does not even try: it would crowd out a neighbour
            with pytest.raises(DeviceOutOfMemoryError, match="saved copy is intact"):
                first.resume()
        assert (first.state, device.used_bytes()) == ("checkpointed", 10 * MIB)
        second.free(other)
        first.resume()
        assert bytes(view) == b"x" * len(view)


def test_touch_while_suspended_kills(device: Device, start_job: StartJob) -> None:
    """A process that touches suspended memory dies of SIGBUS: it never reads something else."""
    job = start_job(device)
    view = job.allocate(MIB)
    job.suspend()
    job.ask("touch", view)
    assert job.process.wait(60) == -signal.SIGBUS


def test_free_while_suspended(device: Device) -> None:
    """Memory can be given back while suspended; the rest comes back alone."""
    with Arena(device) as arena:
        keep, drop = arena.allocate(MIB), arena.allocate(2 * MIB)
        keep[0], drop[0] = 1, 2
        arena.suspend()
        arena.free(drop)
        assert arena.bytes_on_host == MIB
        arena.resume()
        assert keep[0] == 1
        assert device.used_bytes() == MIB


def test_allocate_while_suspended_is_refused(device: Device) -> None:
    """A suspended arena gives no memory, and says when it will."""
    with Arena(device) as arena:
        arena.suspend()
        with pytest.raises(ArenaStateError, match="after its resume"):
            arena.allocate(1)
        assert device.used_bytes() == 0


def test_states_are_checked(device: Device) -> None:
    """A second suspend and a second resume are errors and change nothing."""
    with Arena(device) as arena:
        view = arena.allocate(MIB)
        view[0] = 5
        with pytest.raises(ArenaStateError) as raised:
            arena.resume()
        assert raised.value.state == "running"
        arena.suspend()
        with pytest.raises(ArenaStateError):
            arena.suspend()
        assert arena.state == "checkpointed"
        arena.resume()
        assert view[0] == 5


def test_free_refused_while_arrays_live(device: Device) -> None:
    """Memory that an array still shows is not taken away; once the array is gone the same call works."""
    with Arena(device) as arena:
        view = arena.allocate(MIB)
        array = np.frombuffer(view, np.uint8)
        array[0] = 9
        with pytest.raises(UsageError, match="still alive"):
            arena.free(view)
        assert array[0] == 9
        assert device.used_bytes() == MIB
        del array
        arena.free(view)
        assert device.used_bytes() == 0
        with pytest.raises(UsageError, match="freed already"):
            arena.free(view)


def test_trim_gives_host_memory_back(device: Device) -> None:
    """Host memory of past copies is kept for the next suspend until it is trimmed; never trimmed while needed."""
    with Arena(device) as arena:
        view = arena.allocate(MIB)
        view[0] = 3
        arena.suspend()
        assert arena.trim() == 0
        arena.resume()
        assert arena.bytes_on_host == MIB
        assert arena.trim() == MIB
        assert arena.bytes_on_host == 0
        arena.suspend()
        arena.resume()
        assert view[0] == 3


def test_close_frees_everything(device: Device) -> None:
    """After a close nothing is left on the device, on the host or among the descriptors; twice is harmless."""
    before = open_files()
    arena = Arena(device)
    view = arena.allocate(MIB)
    array = np.frombuffer(view, np.uint8)
    arena.close()
    arena.close()
    assert device.used_bytes() == 0
    del view, array
    gc.collect()
    assert open_files() == before
    with pytest.raises(UsageError, match="closed"):
        arena.allocate(1)


def links_of(pid: int, word: str) -> list[str]:
    links = []
    for path in Path(f"/proc/{pid}/fd").iterdir():
        try:
            links.append(str(path.readlink()))
        except FileNotFoundError:
            continue  # closed meanwhile
    return [link for link in links if word in link]


def openers(inode: int) -> list[str]:
    """Descriptors of any process that are open on this host copy: a memfd lives as long as one is."""
    found = []
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if "timeslice-host-copy" in str(link.readlink()) and link.stat().st_ino == inode:
                found.append(str(link))
        except (FileNotFoundError, PermissionError):
            continue  # closed meanwhile, or a process of somebody else
    return found


@pytest.mark.parametrize("suspended", [False, True], ids=["resident", "suspended"])
def test_memory_goes_away_with_its_process(device: Device, start_job: StartJob, suspended: bool) -> None:
    """SIGKILL frees device memory and the saved copy."""
    job = start_job(device)
    job.fill(job.allocate(CAPACITY), 1)
    if suspended:
        job.suspend()
    (copy,) = [p for p in Path(f"/proc/{job.pid}/fd").iterdir() if "timeslice-host-copy" in str(p.readlink())]
    assert copy.stat().st_blocks * 512 == (CAPACITY if suspended else 0)
    inode = copy.stat().st_ino
    assert openers(inode) == [str(copy)]
    job.process.kill()
    job.process.wait()
    wait_until(lambda: device.used_bytes() == 0, "device memory is free")
    assert openers(inode) == []


def test_child_of_fork_has_none_of_it(device: Device, start_job: StartJob) -> None:
    """A forked child can't free its parent's memory, and does not keep it when the parent dies."""
    job = start_job(device)
    view = job.allocate(MIB)
    digest = job.fill(view, 4)
    child = job.fork()
    try:
        assert job.digest(view) == digest
        job.suspend()
        job.resume()
        assert job.digest(view) == digest
        assert device.used_bytes() == MIB
        wait_until(lambda: not links_of(child, "timeslice"), "the child has let go")
        job.process.kill()
        job.process.wait()
        wait_until(lambda: device.used_bytes() == 0, "device memory is free")
        assert Path(f"/proc/{child}").exists()
    finally:
        os.kill(child, signal.SIGKILL)


def test_child_of_fork_makes_its_own(device: Device) -> None:
    """In a forked child the parent's arena refuses, its memory can't be touched, a new arena works."""
    with Arena(device) as arena:
        view = arena.allocate(MIB)
        view[0] = 1
        child = os.fork()
        if child == 0:
            code = 1
            try:
                try:
                    arena.allocate(1)
                except UsageError:
                    assert arena.bytes_on_device == 0
                    with Arena(device) as own:
                        own.allocate(MIB)[0] = 2
                        own.suspend()
                        own.resume()
                    arena.close()
                    code = 0
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        toucher = os.fork()
        if toucher == 0:
            faulthandler.disable()  # its report would only frighten the reader of the log
            try:
                view[0] = 9
            finally:
                os._exit(0)
        assert os.WTERMSIG(os.waitpid(toucher, 0)[1]) == signal.SIGSEGV
        assert view[0] == 1
        assert device.used_bytes() == MIB


def test_threads_share_an_arena(device: Device) -> None:
    """Threads that allocate, free and suspend at once leave exact accounts."""
    errors: list[BaseException] = []
    with Arena(device) as arena, Arena(device) as other:
        go = Event()

        def churn() -> None:
            go.wait()
            try:
                for _ in range(50):
                    view = arena.allocate(8192)
                    view[0] = 1
                    arena.free(view)
            except BaseException as error:
                errors.append(error)

        threads = [Thread(target=churn) for _ in range(3)]
        for thread in threads:
            thread.start()
        other.allocate(MIB)
        go.set()
        for _ in range(20):
            other.suspend()
            other.resume()
        for thread in threads:
            thread.join()
        assert errors == []
        assert arena.bytes_allocated == 0
        assert device.used_bytes() == MIB


def test_failed_suspend_leaves_it_running(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A suspend whose copy fails leaves the arena running with its content, and the next one works."""
    from timeslice.arena import operations

    with Arena(device) as arena:
        view = arena.allocate(MIB)
        view[:] = b"y" * MIB

        def broken(*_: object) -> int:
            raise OSError(errno.ENOMEM, "no host memory")

        with monkeypatch.context() as patch:
            patch.setattr(operations, "copy_all", broken)
            with pytest.raises(OSError, match="no host memory"):
                arena.suspend()
        assert (arena.state, arena.bytes_on_device) == ("running", MIB)
        assert bytes(view) == b"y" * MIB
        arena.suspend()
        with monkeypatch.context() as patch:
            patch.setattr(operations, "copy_all", broken)
            with pytest.raises(OSError, match="no host memory"):
                arena.resume()
        assert (arena.state, arena.bytes_on_device) == ("checkpointed", 0)
        arena.resume()
        assert bytes(view) == b"y" * MIB


def test_too_many_open_files_says_what_to_do(make_device: DeviceMaker, start_job: StartJob) -> None:
    """Each allocation needs two descriptors; running out of them is told as such."""
    job = start_job(make_device())
    import resource

    resource.prlimit(job.pid, resource.RLIMIT_NOFILE, (20, 20))
    with pytest.raises(JobError, match="ulimit -n"):
        collections.deque((job.allocate(1) for _ in range(20)), maxlen=0)
