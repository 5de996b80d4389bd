"""Ends what a ``timeslice hold`` that was killed has left of its command. Run as a program of its own, by its path:

    python -I -S reaper.py MARK

MARK stands in the environment of the command, so in that of all it starts, in whatever session or under whatever parent
they run. The kernel ends the command itself (see ``tether``); a shell's children would go on outside of the hold. The
holder keeps the other end of standard input: a word on it means that the command has ended, and what it started in the
background may stay; its end without a word, that the holder was killed.
"""

from __future__ import annotations

import os
import signal
import sys
import time

_CLEAN = 2  # scans in a row that find nothing: one that forked meanwhile may have been passed by
_PAUSE_S = 0.01
LONGEST_S = 30.0  # what the kernel does not let go of by then nobody can end


def reap(mark: bytes) -> None:
    """Kill every process with that mark in its environment, and those it has started, until there is none."""
    clean, until = 0, time.monotonic() + LONGEST_S
    doomed: set[tuple[int, int]] = set()  # by number and start time: the parent that gave one away may end before it
    while clean < _CLEAN and time.monotonic() < until:
        living = _living()
        marked = {pid for pid in living if _is_marked(pid, mark)}
        others = [(pid, start) for pid, (_, start) in living.items() if pid != os.getpid()]
        doomed |= {(pid, start) for pid, start in others if marked & set(_line(pid, living))}
        there = [pid for pid, (_, start) in living.items() if (pid, start) in doomed]
        clean = 0 if [pid for pid in there if _kill(pid, living[pid][1])] else clean + 1
        time.sleep(_PAUSE_S)


def _line(pid: int, living: dict[int, tuple[int, int]]) -> list[int]:
    """A process and its ancestors."""
    line: list[int] = []
    while pid in living and pid not in line:
        line.append(pid)
        pid, _ = living[pid]
    return line


def _living() -> dict[int, tuple[int, int]]:
    """Number -> its parent's, and start time."""
    found = {}
    for name in filter(str.isdecimal, os.listdir("/proc")):  # noqa: PTH208 - pathlib takes long to load
        if look := _look(int(name)):
            found[int(name)] = look
    return found


def _look(pid: int) -> tuple[int, int] | None:
    """Parent and start time; None for one that has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:  # noqa: PTH123
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in {b"Z", b"X"} else (int(fields[1]), int(fields[19]))


def _is_marked(pid: int, mark: bytes) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:  # noqa: PTH123
            return mark in file.read()
    except OSError:
        return False


def _kill(pid: int, start: int) -> bool:
    """Whether it had to be killed. By a descriptor, so that its number can't pass to another process meanwhile; some
    sandboxes have none."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    except OSError:
        process = -1
    try:
        look = _look(pid)
        if look is None or look[1] != start:
            return False
        if process < 0:
            os.kill(pid, signal.SIGKILL)
        else:
            signal.pidfd_send_signal(process, signal.SIGKILL)
    except OSError:
        return False  # it has ended, or has become another user's
    finally:
        if process >= 0:
            os.close(process)
    return True


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    if not os.read(0, 1):
        reap(sys.argv[1].encode())
