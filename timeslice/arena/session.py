"""One operator's exclusive look at the arenas of one process: opened, locked, and put right if somebody died."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack, contextmanager

from timeslice.arena import forks
from timeslice.arena.control import (
    COPYING_IN,
    FREEING,
    FREEING_LATE,
    LOCKED,
    MEMFD_NAME,
    NO_STEP,
    STATES,
    Allocation,
    ControlBlock,
    Record,
)
from timeslice.arena.device import Device
from timeslice.arena.errors import ArenaBusyError, NoArenaError, NotAllowedError, TargetGoneError
from timeslice.arena.ledger import Owner
from timeslice.arena.process import HeldProcess, Target, is_start

TYPE_CHECKING = False  # typing costs the command a fifth of its start-up time
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

VISIBLE = "TIMESLICE_VISIBLE_ARENAS"


class OpenArena:
    """One arena, opened by an operator."""

    def __init__(self, process: HeldProcess, control: ControlBlock, record: Record) -> None:
        self.control = control
        self.record = record
        self._process = process
        self._fds: dict[int, int] = {}

    def save(self) -> None:
        self.control.write(self.record)

    def reread(self) -> None:
        self.record = self.control.read()

    @property
    def owner(self) -> Owner:
        return self._process.pid, self.record.start_time, self.record.arena

    def device(self) -> Device:
        return Device.open(self.record.device)

    def device_fd(self, allocation: Allocation) -> int:
        fd = self._open(allocation.device_fd, allocation.device_dev)
        if os.fstat(fd).st_ino != allocation.device_ino:
            raise self._lost()
        return fd

    def host_fd(self, allocation: Allocation) -> int:
        fd = self._open(allocation.host_fd, os.fstat(self.control.fd).st_dev)
        if os.fstat(fd).st_ino != allocation.host_ino:
            raise self._lost()
        return fd

    def device_fds(self) -> list[int]:
        return [self.device_fd(allocation) for allocation in self.record.allocations]

    def on_device(self) -> int:
        """Bytes it has on the device now, measured."""
        return sum(os.fstat(fd).st_blocks * 512 for fd in self.device_fds())

    def on_host(self) -> int:
        """Bytes of host memory behind its saved copies, measured."""
        return sum(os.fstat(self.host_fd(piece)).st_blocks * 512 for piece in self.record.allocations)

    def release(self) -> None:
        """Take everything off the device. Harmless when it is off already."""
        if self.record.allocations:
            self.device().release(self.device_fds(), self.owner, 0)

    def close_files(self) -> None:
        for fd in self._fds.values():
            forks.close(fd)
        self._fds.clear()

    def close(self) -> None:
        self.close_files()
        self.control.close()

    def _open(self, number: int, filesystem: int) -> int:
        if number not in self._fds:
            with forks.guard:
                fd = self._process.open_file(number, filesystem)
                if fd is None:
                    raise self._lost()
                self._fds[number] = forks.note(fd)
        return self._fds[number]

    def _lost(self) -> TargetGoneError:
        return TargetGoneError(
            f"process {self._process.pid} ended, or closed descriptors of its arena behind its back; "
            "if it still runs, end it: its device memory can't be told any more"
        )


class Session:
    """The arenas of one process, locked. ``arenas`` are those to work on, ``all`` those that share its signals."""

    def __init__(self, process: HeldProcess, every: list[OpenArena], visible: Sequence[str] | None) -> None:
        self.process = process
        self.all = every
        self.arenas = [a for a in every if visible is None or a.record.device in visible]
        if not self.arenas:
            seen = ", ".join(sorted({a.record.device for a in every})) or "none"
            raise NoArenaError(
                f"process {process.pid} has no arena on a visible emulated device (it has: {seen}; {VISIBLE}: "
                f"{'unset' if visible is None else ','.join(visible)})"
            )

    @property
    def state(self) -> str:
        """The state of the process: that of its least advanced arena."""
        return min((a.record.state for a in self.arenas), key=STATES.index)

    def stop(self, arenas: Sequence[OpenArena], timeout: float) -> None:
        """Make the process stand still on behalf of these arenas, which note it first."""
        if self.process.itself:
            return
        ours = [a.record.was_stopped for a in self.all if a.record.stopped]
        # One that runs though it was noted as stopped was continued meanwhile, and is ours to continue.
        was_stopped = self.process.is_stopped() and (any(ours) or not ours)
        for arena in arenas:
            arena.record.stopped, arena.record.was_stopped = True, was_stopped
            arena.save()
        self.process.stop(timeout)

    def go_on(self, arenas: Sequence[OpenArena]) -> None:
        """End the stop on behalf of these arenas; it runs unless others need it still or a user had stopped it."""
        stopped = [arena for arena in arenas if arena.record.stopped]
        needed = any(a.record.stopped for a in self.all if a not in stopped)
        if stopped and not needed and not any(a.record.was_stopped for a in stopped):
            self.process.go_on()
        for arena in stopped:  # after the signal: an operator that dies in between leaves a note to repeat it
            arena.record.stopped = False
            arena.save()

    def put_right(self) -> None:
        """Finish or undo what an operator left half done. What the records say is what holds:

        not yet ``checkpointed``: the device's content counts, the half-made copy is forgotten;
        ``checkpointed``: the copy is whole and counts, whatever is on the device goes.
        """
        for arena in self.all:
            if arena.record.step in (FREEING, COPYING_IN):
                arena.release()
            if arena.record.step not in (NO_STEP, FREEING_LATE):
                arena.record.step = NO_STEP
                arena.save()
        self.go_on([a for a in self.all if a.record.state != LOCKED])


def visible_devices() -> list[str] | None:
    """The devices that ``TIMESLICE_VISIBLE_ARENAS`` names; None when it is unset, which means all."""
    text = os.environ.get(VISIBLE)
    return None if text is None else [os.path.realpath(path) for path in text.split(",") if path]


def open_arenas(process: HeldProcess) -> list[OpenArena]:
    """All arenas of the process, unlocked."""
    memfds = _memfd_filesystem()
    found: list[OpenArena] = []
    try:
        for number in process.file_links(f"memfd:{MEMFD_NAME}"):
            found += _open_arena(process, number, memfds)
    except BaseException:
        for arena in found:
            arena.close()
        raise
    return found


@contextmanager
def session(
    target: Target | int,
    *,
    timeout: float,
    visible: Sequence[str] | None = None,
    only: int | None = None,
) -> Iterator[Session]:
    """Lock the arenas of a process and put them right. ``only``: one control descriptor of this process."""
    deadline = time.monotonic() + timeout
    with ExitStack() as stack:
        try:
            process = stack.enter_context(HeldProcess(target if isinstance(target, Target) else Target(target)))
            arenas = open_arenas(process) if only is None else _open_arena(process, only, _memfd_filesystem())
        except PermissionError as error:
            raise NotAllowedError(
                f"no right to work on process {target}; run as its user or as root ({error.strerror})"
            ) from error
        for arena in arenas:
            stack.callback(arena.close)
        for arena in sorted(arenas, key=lambda a: a.record.arena):  # one order for all, or two could block each other
            stack.enter_context(arena.control.locked(deadline))
            arena.reread()
        opened = Session(process, [a for a in arenas if not a.record.closed], visible)
        opened.put_right()
        yield opened


def check_none_appeared(opened: Session) -> None:
    """An arena made between the look and the stop would stay on the device unseen."""
    now = set(opened.process.file_links(f"memfd:{MEMFD_NAME}"))
    known = open_arenas(opened.process) if now else []
    try:
        fresh = {a.record.arena for a in known if not a.record.closed} - {a.record.arena for a in opened.all}
    finally:
        for arena in known:
            arena.close()
    if fresh:
        raise ArenaBusyError(f"process {opened.process.pid} made an arena just now; try again")


def _memfd_filesystem() -> int:
    fd = os.memfd_create("timeslice-probe")
    try:
        return os.fstat(fd).st_dev
    finally:
        os.close(fd)


def _open_arena(process: HeldProcess, number: int, memfds: int) -> list[OpenArena]:
    with forks.guard:
        fd = process.open_file(number, memfds)
        if fd is None:
            return []
        control = ControlBlock(forks.note(fd))
    try:
        record = control.read()
        # A descriptor inherited over a fork names its parent: the child has no part in that memory.
        same = record.pid == process.pid_inside and is_start(process.pid, process.start_time, record.start_time)
        if same and not record.closed:
            return [OpenArena(process, control, record)]
    except BaseException:
        control.close()
        raise
    control.close()
    return []
