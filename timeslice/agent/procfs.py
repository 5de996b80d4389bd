"""What the kernel says of a process. Nothing here trusts a bare process id: the start time goes with it."""

from __future__ import annotations

import errno
import os
import select
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from timeslice.arena.process import NO_PIDFD, is_start, open_pidfd, own_start
from timeslice.models import Target

__all__ = ["NO_PIDFD", "is_start", "own_start"]  # and what follows

_NOT_RUNNING = "TtZXx"  # stopped, traced, zombie, dead
_PF_KTHREAD = 0x00200000
_PF_EXITING = 0x00000004
_CAP_SYS_PTRACE = 1 << 19
_FIRST_NAMESPACE = "pid:[4026531836]"  # the kernel's PROC_PID_INIT_INO


@dataclass(frozen=True)
class ProcessStatus:
    """One look at a process: state letter, start time in clock ticks since boot, real user id, parent."""

    state: str
    start: int
    uid: int
    parent: int = 0
    one_user: bool = True  # real, effective and saved user id are the same: no setuid program
    kernel: bool = False  # a thread of the kernel
    exiting: bool = False  # it has let go of its files and memory, and the kernel may not have freed them yet
    inner: int = 0  # its number in its own pid namespace
    leader: bool = True  # else the number is that of a mere thread
    threads: int = 1

    @property
    def runs(self) -> bool:
        """False while it is stopped, traced or a zombie: it computes nothing then."""
        return self.state not in _NOT_RUNNING

    @property
    def ended(self) -> bool:
        """Only its number is still taken."""
        return self.state in "ZXx" and self.threads <= 1


def look_at(pid: int) -> ProcessStatus | None:
    """The process's status, or None when there is none of that number, or it is hidden from us."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        status = Path(f"/proc/{pid}/status").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError, PermissionError):  # hidden: /proc mounted with hidepid=2, or with 1
        return None
    fields = stat[stat.rindex(")") + 2 :].split()  # the name before it may hold blanks and brackets
    told = {name: rest.split() for name, _, rest in (line.partition(":") for line in status.splitlines())}
    uids = told["Uid"][:3]
    return ProcessStatus(
        state=fields[0],
        start=int(fields[19]),
        uid=int(uids[0]),
        parent=int(fields[1]),
        one_user=len(set(uids)) == 1,
        kernel=bool(int(fields[6]) & _PF_KTHREAD),
        exiting=bool(int(fields[6]) & _PF_EXITING),
        inner=int(told.get("NSpid", [str(pid)])[-1]),
        leader=int(told.get("Tgid", [str(pid)])[0]) == pid,
        threads=int(fields[17]),
    )


@dataclass(frozen=True)
class Line:
    """One process in a list of all. ``image`` changes when it starts another program, where we may look into it."""

    parent: int
    start: int
    image: int


def everybody() -> dict[int, Line]:
    """All processes but the kernel's, by number: one small file each."""
    found = {}
    for pid in numbers():
        try:
            stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        except (FileNotFoundError, ProcessLookupError, PermissionError):  # it ended meanwhile, or is hidden from us
            continue
        fields = stat[stat.rindex(")") + 2 :].split()
        if not int(fields[6]) & _PF_KTHREAD:
            found[pid] = Line(int(fields[1]), int(fields[19]), int(fields[47]))
    return found


def numbers() -> list[int]:
    """Of all processes that can be seen from here."""
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]  # noqa: PTH208 - names are all that is wanted


@dataclass(frozen=True)
class Elsewhere:
    """Processes of other pid namespaces: by namespace and number there, the number and start time here. ``whole``:
    there are no others on this machine."""

    numbers: Mapping[tuple[str, int], tuple[int, int]] = field(default_factory=dict)
    whole: bool = False


def elsewhere() -> Elsewhere:
    """Those that can be seen from here."""
    own, found, whole = pid_namespace(), {}, sees_all()
    for pid in numbers():
        try:
            namespace = str(Path(f"/proc/{pid}/ns/pid").readlink())
        except PermissionError:  # a security module may hide it even from root
            status = look_at(pid)
            whole = whole and (status is None or status.inner == pid)
            continue
        except (FileNotFoundError, ProcessLookupError):  # it ended meanwhile
            continue
        if namespace != own and (status := look_at(pid)):
            found[namespace, status.inner] = pid, status.start
    return Elsewhere(found, whole)


def sees_all() -> bool:
    """Whether no process of this machine can hide from this one: the first pid namespace, and eyes for everybody's."""
    status = Path("/proc/self/status").read_text(errors="replace")
    capabilities = next(line for line in status.splitlines() if line.startswith("CapEff:"))
    return pid_namespace() == _FIRST_NAMESPACE and bool(int(capabilities.split()[1], 16) & _CAP_SYS_PTRACE)


def start_here(pid: int, told: int) -> int:
    """What we see as the start time of the process that told us this one of itself; what was told if it is another
    process now, or can't be looked at."""
    try:
        found = look_at(pid)
    except OSError:  # such as no descriptor left
        return told
    return found.start if found and is_start(pid, found.start, told) else told


def runs(target: Target) -> bool:
    """Whether exactly this process exists and is not stopped, traced or a zombie."""
    found = look_at(target.pid)
    return found is not None and found.start == target.start and found.runs


def exits(target: Target) -> bool:
    """Whether exactly this process is on its way out."""
    found = look_at(target.pid)
    return found is not None and found.start == target.start and found.exiting


def ancestors() -> frozenset[int]:
    """This process, its parent, and so on up to the first process."""
    found = set[int]()
    pid = os.getpid()
    while pid > 0 and pid not in found:
        found.add(pid)
        status = look_at(pid)
        pid = status.parent if status else 0
    return frozenset(found)


def pid_namespace(pid: int | str = "self") -> str:
    """Name of a process's pid namespace, by default ours; the same number means another process in another one. '' when
    that can't be told."""
    try:
        return str(Path(f"/proc/{pid}/ns/pid").readlink())
    except OSError:
        if pid == "self":
            raise
        return ""


def open_process(pid: int, start: int) -> int | None:
    """A pidfd of exactly this process (``NO_PIDFD`` where there are none), or None when it has ended. OSError: it
    can't be watched."""
    found = open_and_look(pid, start)
    return found and found[0]


def open_and_look(pid: int, start: int) -> tuple[int, ProcessStatus] | None:
    """The same, and what it is."""
    try:
        fd = open_pidfd(pid)
    except ProcessLookupError:
        return None
    try:
        # Compared after the descriptor is open: from here on it can't point to a later process of that number.
        found = look_at(pid)
        _check(found, hidden=found is None and is_there(pid) and not (fd != NO_PIDFD and has_exited(fd)))
    except OSError:
        let_go(fd)
        raise
    if found is None or found.start != start or has_ended(fd, pid, start):
        let_go(fd)
        return None
    return fd, found


def _check(found: ProcessStatus | None, *, hidden: bool) -> None:
    if hidden:
        raise PermissionError(errno.EACCES, "/proc hides it from this agent")
    if found and not found.leader:  # as pidfd_open refuses it
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))


def let_go(pidfd: int) -> None:
    if pidfd != NO_PIDFD:
        os.close(pidfd)


def is_there(pid: int) -> bool:
    """Whether some process has this number, be it that /proc hides it from us."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def has_ended(pidfd: int, pid: int, start: int) -> bool:
    """Whether this process has ended (it may still be a zombie). Without a pidfd its start time tells, as long as /proc
    can be read: else it counts as alive."""
    if pidfd != NO_PIDFD:
        return has_exited(pidfd)
    try:
        found = look_at(pid)
    except OSError:  # such as no descriptor left
        return False
    if found is None:
        return not is_there(pid)
    return found.start != start or found.ended


def send_signal(pidfd: int, pid: int, start: int, number: int) -> None:
    """To this process, if it has not ended. ProcessLookupError if it has."""
    if pidfd != NO_PIDFD:
        signal.pidfd_send_signal(pidfd, number)
    elif has_ended(pidfd, pid, start):
        raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH))
    else:
        os.kill(pid, number)


def unwatchable(error: OSError) -> str:
    """Why a process can't be watched, and what to do."""
    remedy = {
        errno.EMFILE: "let the agent open more files (ulimit -n)",
        errno.ENFILE: "let the machine open more files (sysctl fs.file-max)",
        errno.EACCES: "run the agent as root, or mount /proc without hidepid",
    }.get(error.errno or 0, "the number of a thread is no process's")
    return f"it can't be watched ({error.strerror}); {remedy}"


def has_exited(pidfd: int) -> bool:
    """Whether the process behind the descriptor has ended (it may still be a zombie)."""
    poll = select.poll()  # select.select() can't take descriptors above 1023
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))
