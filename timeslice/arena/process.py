"""A process held so that it can't be mistaken: its /proc folder and its pidfd, both bound to this one process.

A process id alone may be reused between two looks; an open /proc folder and a pidfd never point to a successor.
"""

# pathlib knows no dir_fd and no descriptors, and would cost the command start-up time.
# ruff: noqa: PTH123, PTH208
from __future__ import annotations

import errno
import os
import select
import signal
import stat
import time

from timeslice.arena.errors import ArenaBusyError, NotAProcessError, TargetGoneError

TYPE_CHECKING = False  # typing costs the command a fifth of its start-up time
if TYPE_CHECKING:
    from typing import Self

_STOPPED = "TtZXx"  # stopped, traced, or a thread that is gone
_TICK_NS = 1_000_000_000 // os.sysconf("SC_CLK_TCK")
_REFUSED = {errno.EPERM, errno.EACCES, errno.ENOSYS}  # by a sandbox, or a kernel that has no pidfds
_END_POLL_S = 0.01
NO_PIDFD = -1


def _stat_fields(text: str) -> list[str]:
    return text[text.rindex(")") + 2 :].split()  # the name before it may hold blanks and brackets


def _stat_of(path: str) -> list[str] | None:
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return _stat_fields(file.read())
    except (FileNotFoundError, ProcessLookupError):
        return None


def start_time_of(pid: int) -> int | None:
    """Start time in clock ticks since boot, or None when the process is gone or a zombie."""
    fields = _stat_of(f"/proc/{pid}/stat")
    return int(fields[19]) if fields and fields[0] not in "ZXx" else None


def own_start(pid: int, start: int) -> int:
    """The start time that the process sees of itself, of which we see ``start``: in a time namespace every start time
    is moved by the offset of its boot clock. May be one tick too low, as an offset need not be whole ticks."""
    return start + (_boot_offset_ns(pid) - _boot_offset_ns("self")) // _TICK_NS


def is_start(pid: int, start: int, told: int) -> bool:
    """Whether ``told`` is the start time of the process of which we see ``start``, as we or itself may have told it."""
    return told == start or (own := own_start(pid, start)) == told or (own != start and own + 1 == told)


def _boot_offset_ns(pid: int | str) -> int:
    try:
        with open(f"/proc/{pid}/timens_offsets", encoding="ascii") as file:
            lines = [line.split() for line in file]
    except (FileNotFoundError, ProcessLookupError, PermissionError):  # it has ended, or an old kernel
        return 0
    return next((int(each[1]) * 1_000_000_000 + int(each[2]) for each in lines if each[0] == "boottime"), 0)


def open_pidfd(pid: int) -> int:
    """A pidfd, or ``NO_PIDFD`` where the system gives none to anybody: then start times have to tell processes apart.
    OSError: the process has ended (ProcessLookupError), the number is a mere thread's, or no descriptor is left."""
    try:
        return os.pidfd_open(pid)
    except OSError as error:
        if error.errno not in _REFUSED:
            raise
        return NO_PIDFD


class Target:
    """Which process is meant: number and start time."""

    __slots__ = ("pid", "start_time")

    def __init__(self, pid: int, start_time: int | None = None) -> None:
        self.pid = pid
        if start_time is None:
            start_time = start_time_of(pid)
            if start_time is None:
                raise TargetGoneError(f"process {pid} does not run; its device memory went with it")
        self.start_time = start_time

    def __repr__(self) -> str:
        return f"Target(pid={self.pid}, start_time={self.start_time})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Target) and (self.pid, self.start_time) == (other.pid, other.start_time)

    def __hash__(self) -> int:
        return hash((self.pid, self.start_time))

    @classmethod
    def current(cls) -> Target:
        """This process."""
        return cls(os.getpid())


class HeldProcess:
    """An open target. Signals and files go to exactly this process or fail with `TargetGoneError`."""

    def __init__(self, target: Target) -> None:
        self.pid = target.pid
        self.itself = target.pid == os.getpid()
        try:
            self._proc = os.open(f"/proc/{target.pid}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            raise TargetGoneError(f"process {target.pid} does not run") from None
        self._pidfd = -1
        try:
            self.start_time, self.pid_inside = self._identify(target)
        except BaseException as error:
            self.close()
            if isinstance(error, (ProcessLookupError, FileNotFoundError)):
                raise TargetGoneError(f"process {target.pid} ended") from error
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _identify(self, target: Target) -> tuple[int, int]:
        status = self._status()
        if int(status["Tgid"]) != target.pid:
            raise NotAProcessError(f"{target.pid} is a thread of process {status['Tgid'].strip()}; name the process")
        self._pidfd = open_pidfd(target.pid)
        # Compared after both are open: from here on neither can point to a later process of that number.
        start_time = int(self._read_stat("stat")[19])
        if start_time != target.start_time:
            raise TargetGoneError(
                f"process {target.pid} is another one now (started at tick {start_time}, "
                f"meant was {target.start_time}); the one that was meant ended"
            )
        return start_time, int(status.get("NSpid", str(target.pid)).split()[-1])

    def close(self) -> None:
        for fd in (self._pidfd, self._proc):
            if fd >= 0:
                os.close(fd)
        self._pidfd = self._proc = -1

    def _read(self, name: str) -> str:
        try:
            fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._proc)
        except (FileNotFoundError, ProcessLookupError):
            raise TargetGoneError(f"process {self.pid} ended") from None
        try:
            return os.read(fd, 65536).decode("ascii", "replace")
        except ProcessLookupError:
            raise TargetGoneError(f"process {self.pid} ended") from None
        finally:
            os.close(fd)

    def _list(self, name: str) -> list[str]:
        try:
            folder = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self._proc)
        except (FileNotFoundError, ProcessLookupError):
            raise TargetGoneError(f"process {self.pid} ended") from None
        try:
            return os.listdir(folder)
        finally:
            os.close(folder)

    def _read_stat(self, name: str) -> list[str]:
        return _stat_fields(self._read(name))

    def _status(self) -> dict[str, str]:
        return dict(line.split(":", 1) for line in self._read("status").splitlines() if ":" in line)

    def file_links(self, word: str) -> list[int]:
        """Numbers of the open files whose link contains ``word``."""
        found = []
        for name in self._list("fd"):
            try:
                if word in os.readlink(f"fd/{name}", dir_fd=self._proc):
                    found.append(int(name))
            except (FileNotFoundError, ProcessLookupError):
                continue  # closed meanwhile
        return found

    def open_file(self, number: int, filesystem: int) -> int | None:
        """Open the file behind one of its descriptors anew (own position, own lock), for reading and writing.

        None when that is no nameless regular file on ``filesystem`` (an ``st_dev``). What the process says about
        its descriptors is not believed: with our rights it could else have any file opened and cut short.
        """
        try:
            look = os.open(f"fd/{number}", os.O_PATH | os.O_CLOEXEC, dir_fd=self._proc)
        except (FileNotFoundError, ProcessLookupError):
            return None
        try:
            found = os.fstat(look)
            if not stat.S_ISREG(found.st_mode) or found.st_nlink or found.st_dev != filesystem:
                return None
            return os.open(f"/proc/self/fd/{look}", os.O_RDWR | os.O_CLOEXEC)
        finally:
            os.close(look)

    def is_stopped(self) -> bool:
        """True when no thread of it runs."""
        states = []
        for thread in self._list("task"):
            try:
                states.append(self._read_stat(f"task/{thread}/stat")[0])
            except TargetGoneError:
                continue  # one thread ended; the caller's next look tells whether all did
        if not states or all(state in "ZXx" for state in states):
            raise TargetGoneError(f"process {self.pid} ended")
        return all(state in _STOPPED for state in states)

    def stop(self, timeout: float) -> None:
        """SIGSTOP, and wait until every thread really stands still."""
        self.send_signal(signal.SIGSTOP)
        deadline = time.monotonic() + timeout
        pause = 0.0001
        while not self.is_stopped():
            if time.monotonic() > deadline:
                raise ArenaBusyError(f"process {self.pid} did not stop within {timeout:g} s; try again")
            time.sleep(pause)
            pause = min(pause * 2, 0.01)

    def go_on(self) -> None:
        self.send_signal(signal.SIGCONT)

    def wait_for_end(self, timeout: float) -> bool:
        """Wait for the process to end; False when it still runs after ``timeout``."""
        if self._pidfd != NO_PIDFD:
            return bool(select.select([self._pidfd], [], [], timeout)[0])
        deadline = time.monotonic() + timeout
        while (runs := self._runs()) and time.monotonic() < deadline:
            time.sleep(_END_POLL_S)
        return not runs

    def _runs(self) -> bool:
        """Its folder in /proc never shows a later process of that number."""
        try:
            return self._read_stat("stat")[0] not in "ZXx"
        except TargetGoneError:
            return False

    def send_signal(self, number: int) -> None:
        try:
            if self._pidfd != NO_PIDFD:
                signal.pidfd_send_signal(self._pidfd, number)
            else:
                self._read("stat")
                os.kill(self.pid, number)
        except ProcessLookupError:
            raise TargetGoneError(f"process {self.pid} ended") from None
