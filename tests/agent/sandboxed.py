"""Runs a module in a sandbox that refuses pidfd_open, as gVisor, older seccomp profiles and old kernels do.

Called with the name of the error, the module and its arguments.
"""

from __future__ import annotations

import ctypes
import errno
import runpy
import struct
import sys

PIDFD_OPEN = 434  # on every architecture
_LOAD, _IS, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_NO_NEW_PRIVS, _SECCOMP, _FILTER = 38, 22, 2


class _Program(ctypes.Structure):
    _fields_ = (("count", ctypes.c_ushort), ("code", ctypes.c_char_p))


def refuse_pidfds(number: int) -> None:
    """From now on pidfd_open fails with this error, in this process and all that it starts."""
    steps = [(_LOAD, 0, 0, 0), (_IS, 0, 1, PIDFD_OPEN), (_RETURN, 0, 0, _ERRNO | number), (_RETURN, 0, 0, _ALLOW)]
    code = b"".join(struct.pack("HBBI", *step) for step in steps)
    library = ctypes.CDLL(None, use_errno=True)
    assert library.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
    assert library.prctl(_SECCOMP, _FILTER, ctypes.byref(_Program(len(steps), code))) == 0, ctypes.get_errno()


if __name__ == "__main__":
    refuse_pidfds(getattr(errno, sys.argv[1]))
    sys.argv = sys.argv[2:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
