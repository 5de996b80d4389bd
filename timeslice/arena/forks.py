"""What a forked child must let go of, so that it neither keeps nor destroys its parent's device memory.

As with a GPU, a child of fork has no device memory: the mappings are not inherited (MADV_DONTFORK) and the
descriptors are closed in the child at once, so the memory still goes away with the parent.
"""

from __future__ import annotations

import os
from contextlib import suppress
from threading import RLock

TYPE_CHECKING = False  # typing costs the command a fifth of its start-up time
if TYPE_CHECKING:
    import mmap
    import weakref

guard = RLock()
"""Held while descriptors are made and noted; a fork waits for it, so that none slips through unnoted."""

_fds: set[int] = set()
mappings: weakref.WeakKeyDictionary[mmap.mmap, tuple[int, int]] | None = None
"""Live mappings with address and size; made by the first arena."""


def note(fd: int) -> int:
    _fds.add(fd)
    return fd


def close(fd: int) -> None:
    """Close a noted descriptor."""
    with guard:
        _fds.discard(fd)
        os.close(fd)


def _in_child() -> None:
    global guard  # noqa: PLW0603
    guard = RLock()  # the parent's was taken by the thread that forked
    for fd in _fds:
        with suppress(OSError):
            os.close(fd)
    _fds.clear()
    if mappings:
        from timeslice.arena import syscalls

        # The child's mmap objects will unmap these addresses when they are collected. Nothing of ours lies there
        # any more, but something of the child's might by then: so keep the addresses taken.
        for mapping, (address, size) in list(mappings.items()):
            if not syscalls.block_range(address, size):
                syscalls.keep_forever(mapping)


def _before() -> None:
    guard.acquire()  # looked up anew each time: a child has a new one


def _in_parent() -> None:
    guard.release()


os.register_at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)
