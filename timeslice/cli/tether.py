"""Becomes the command of ``timeslice hold``, which is to end with it. Run as a program of its own, by its path:

    python -I -S tether.py PARENT PIPE COMMAND [ARG]...

The kernel is asked to kill this process when its parent dies, whatever ends that. The wish survives the exec, but not
that of a set-user-ID program, and no child inherits it. It is made here and not between the parent's fork and its exec,
where no Python may run: other threads of the parent could hold locks there. A command that can't be run is told to the
parent as an errno on PIPE, which closes at the exec.
"""

from __future__ import annotations

import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(parent: int, pipe: int, command: list[str]) -> None:
    # An interpreter changes these when it starts; the command is to find them as it would without one.
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    except (ImportError, OSError, AttributeError):
        pass  # a system without it: the command runs as it would have
    if os.getppid() != parent:  # it died before it could be waited for
        os.kill(os.getpid(), signal.SIGKILL)
    os.set_inheritable(pipe, False)
    try:
        os.execvp(command[0], command)  # noqa: S606 - the command is the user's, and no shell is wanted
    except OSError as error:
        os.write(pipe, str(error.errno).encode())
        os._exit(1)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
