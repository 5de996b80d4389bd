"""Lock, checkpoint, restore, unlock: the four operations of a checkpoint tool, on the emulated device.

They work on a process from outside (by pid, with signals) and from inside (an `Arena`'s own suspend and resume,
where the caller keeps everything quiet). All state is in the target's control blocks, so operators may come and go,
and die: each step is written down before it is taken, and whoever comes next puts right what is half done.
"""

# pathlib knows no dir_fd and no descriptors, and would cost the command start-up time.
# ruff: noqa: PTH118
from __future__ import annotations

import os
import time

from timeslice.arena import faults
from timeslice.arena.control import (
    CHECKPOINTED,
    COPYING_IN,
    COPYING_OUT,
    FREEING,
    FREEING_LATE,
    LOCKED,
    NO_STEP,
    RUNNING,
    STATES,
)
from timeslice.arena.device import FAULTS_FILE, Device
from timeslice.arena.errors import ArenaBusyError, ArenaStateError, DeviceOutOfMemoryError
from timeslice.arena.process import HeldProcess, Target
from timeslice.arena.session import (
    OpenArena,
    Session,
    check_none_appeared,
    open_arenas,
    session,
    visible_devices,
)
from timeslice.arena.transfer import copy_all

TYPE_CHECKING = False  # typing costs the command a fifth of its start-up time
if TYPE_CHECKING:
    from collections.abc import Callable

    from timeslice.arena.control import Allocation

    FdOf = Callable[[Allocation], int]

DEFAULT_TIMEOUT_MS = 10_000
_HINT = "suspend or end who holds it, then restore again; the saved copy is intact"


def get_state(target: Target | int) -> str:
    """``running``, ``locked`` or ``checkpointed``; of several visible arenas, the least advanced one's."""
    try:
        with session(target, timeout=0, visible=visible_devices()) as opened:
            _begin("get-state", opened.arenas)
            return opened.state
    except ArenaBusyError:  # somebody is at it: then only look
        target = target if isinstance(target, Target) else Target(target)
        with HeldProcess(target) as process:
            arenas = open_arenas(process)
            try:
                return Session(process, arenas, visible_devices()).state
            finally:
                for arena in arenas:
                    arena.close()


def lock(target: Target | int, timeout_ms: int = DEFAULT_TIMEOUT_MS) -> None:
    """Make the process stand still. Fails, with all as it was, when that takes longer than ``timeout_ms``."""
    timeout = timeout_ms / 1000
    deadline = time.monotonic() + timeout
    with session(target, timeout=timeout, visible=visible_devices()) as opened:
        _lock(opened, deadline)


def checkpoint(target: Target | int) -> int:
    """Copy the device memory of a locked process to its host copies and free it; returns the bytes moved.

    Sealed memory of which there is a copy is only dropped.
    The process runs on afterwards, on the CPU. On an error it stays locked with its device memory in place.
    """
    with session(target, timeout=DEFAULT_TIMEOUT_MS / 1000, visible=visible_devices()) as opened:
        return _checkpoint(opened)


def restore(target: Target | int) -> int:
    """Bring the device memory of a checkpointed process back; it is locked then. Returns the bytes moved.

    All or nothing: on an error the saved copy is intact and the process stays checkpointed.
    """
    with session(target, timeout=DEFAULT_TIMEOUT_MS / 1000, visible=visible_devices()) as opened:
        return _restore(opened)


def unlock(target: Target | int) -> None:
    """Let a locked process run, unless a user had stopped it before it was locked."""
    with session(target, timeout=DEFAULT_TIMEOUT_MS / 1000, visible=visible_devices()) as opened:
        _unlock(opened)


def lock_arena(control_fd: int) -> None:
    """`lock` for one arena of this process."""
    with session(os.getpid(), timeout=DEFAULT_TIMEOUT_MS / 1000, only=control_fd) as opened:
        _lock(opened, time.monotonic())


def checkpoint_arena(control_fd: int) -> int:
    """`checkpoint` for one arena of this process."""
    with session(os.getpid(), timeout=DEFAULT_TIMEOUT_MS / 1000, only=control_fd) as opened:
        return _checkpoint(opened)


def restore_arena(control_fd: int) -> int:
    """`restore` for one arena of this process."""
    with session(os.getpid(), timeout=DEFAULT_TIMEOUT_MS / 1000, only=control_fd) as opened:
        return _restore(opened)


def unlock_arena(control_fd: int) -> None:
    """`unlock` for one arena of this process."""
    with session(os.getpid(), timeout=DEFAULT_TIMEOUT_MS / 1000, only=control_fd) as opened:
        _unlock(opened)


def free_late(target: Target, seconds: float) -> None:
    """Second half of a checkpoint that lied about having freed the memory already (fault ``late``)."""
    with HeldProcess(target) as process:
        if process.wait_for_end(seconds):
            return
    with session(target, timeout=DEFAULT_TIMEOUT_MS / 1000, visible=visible_devices()) as opened:
        for arena in opened.arenas:
            if (arena.record.state, arena.record.step) == (CHECKPOINTED, FREEING_LATE):
                arena.release()
                arena.record.step = NO_STEP
                arena.save()


def _begin(action: str, arenas: list[OpenArena]) -> faults.Plan:
    files = {os.path.join(arena.record.device, FAULTS_FILE) for arena in arenas}
    plan = faults.Plan(action, faults.rules_for(sorted(files)))
    plan.begin(arenas[0].record, arenas[0].save)
    return plan


def _in_state(opened: Session, state: str, action: str) -> list[OpenArena]:
    found = [arena for arena in opened.arenas if arena.record.state == state]
    if not found:
        raise ArenaStateError(
            f"{action} needs a process that is {state}, process {opened.process.pid} is {opened.state}; "
            "read the state first",
            state=opened.state,
        )
    return found


def _set(arenas: list[OpenArena], *, state: str | None = None, step: str = NO_STEP) -> None:
    assert state is None or state in STATES
    for arena in arenas:
        arena.record.state = state or arena.record.state
        arena.record.step = step
        arena.save()


def _lock(opened: Session, deadline: float) -> None:
    arenas = _in_state(opened, RUNNING, "lock")
    plan = _begin("lock", arenas)
    if plan.lies:
        return
    try:
        plan.at("stopping")
        opened.stop(arenas, max(0.0, deadline - time.monotonic()))
        plan.at("stopped")
        if not opened.process.itself:
            check_none_appeared(opened)
        _set(arenas, state=LOCKED)
    except BaseException:
        _set(arenas, state=RUNNING)
        opened.go_on(arenas)
        raise


def _checkpoint(opened: Session) -> int:
    arenas = _in_state(opened, LOCKED, "checkpoint")
    plan = _begin("checkpoint", arenas)
    total = sum(arena.record.total - arena.record.copied for arena in arenas)
    opened.stop(arenas, DEFAULT_TIMEOUT_MS / 1000)  # it stands still, unless somebody sent SIGCONT meanwhile
    try:
        _set(arenas, step=COPYING_OUT)
        plan.at("begun")
        copy_all(
            (
                (arena.device_fd(piece), arena.host_fd(piece), piece.size)
                for arena in arenas
                for piece in arena.record.allocations
                if not piece.copied
            ),
            plan.progress(total),
        )
        plan.at("copied")
        _check_still_stopped(opened)
        for arena in arenas:
            for piece in arena.record.allocations:
                piece.copied = piece.sealed
        _set(arenas, state=CHECKPOINTED, step=FREEING_LATE if plan.lies or plan.late else FREEING)
        plan.at("recorded")
        if plan.late:
            _spawn_free_late(opened, plan.late)
        elif not plan.lies:
            for arena in arenas:
                arena.release()
            plan.at("freed")
            _set(arenas)
        opened.go_on(arenas)
    except BaseException:
        opened.put_right()
        raise
    return total


def _check_still_stopped(opened: Session) -> None:
    if not opened.process.itself and not opened.process.is_stopped():
        raise ArenaBusyError(f"somebody continued process {opened.process.pid} during the copy; try again")


def _restore(opened: Session) -> int:
    arenas = _in_state(opened, CHECKPOINTED, "restore")
    plan = _begin("restore", arenas)
    if plan.lies:
        return 0
    for arena in arenas:
        arena.release()  # what a late or lying checkpoint left there would count against the space needed
    _check_space(arenas)
    try:
        opened.stop(arenas, DEFAULT_TIMEOUT_MS / 1000)
        plan.at("stopped")
        _set(arenas, step=COPYING_IN)
        for arena in arenas:
            record = arena.record
            files = [(arena.device_fd(piece), piece.size) for piece in record.allocations]
            if files:
                arena.device().reserve(files, arena.owner, record.total, _HINT)
        plan.at("reserved")
        total = sum(arena.record.total for arena in arenas)
        copy_all(
            (
                (arena.host_fd(piece), arena.device_fd(piece), piece.size)
                for arena in arenas
                for piece in arena.record.allocations
            ),
            plan.progress(total),
        )
        plan.at("copied")
        _set(arenas, state=LOCKED)
    except BaseException:
        opened.put_right()
        raise
    return total


def _check_space(arenas: list[OpenArena]) -> None:
    need: dict[str, int] = {}
    for arena in arenas:
        need[arena.record.device] = need.get(arena.record.device, 0) + arena.record.total
    for path, wanted in need.items():
        if wanted > (free := Device.open(path).free_bytes()):
            raise DeviceOutOfMemoryError(path, need=wanted, free=free, hint=_HINT)


def _unlock(opened: Session) -> None:
    arenas = _in_state(opened, LOCKED, "unlock")
    plan = _begin("unlock", arenas)
    if plan.lies:
        return
    _set(arenas, state=RUNNING)
    plan.at("recorded")
    opened.go_on(arenas)
    plan.at("continued")


def _spawn_free_late(opened: Session, seconds: str) -> None:
    import subprocess
    import sys

    tool = [sys.executable, "-m", "timeslice.arena.tool", "--free-late", seconds, "--pid", str(opened.process.pid)]
    # By way of a shell, so that it is nobody's child here and keeps none of the caller's pipes open.
    subprocess.run(["/bin/sh", "-c", '"$@" >/dev/null 2>&1 </dev/null &', "sh", *tool], check=True)
