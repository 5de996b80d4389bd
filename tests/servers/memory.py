"""A part of a server's state: bytes on the emulated device, or plain ones where there is none."""

from __future__ import annotations

import hashlib
from pathlib import Path
from random import Random

from timeslice.arena import Arena


class Part:
    """Content comes from a seed: weights that were pushed. Without one it is empty: a cache."""

    def __init__(self, name: str, nbytes: int, device: Path | None, seed: int | None = None) -> None:
        self.name, self.seed = name, seed
        self._nbytes, self._device = nbytes, device
        self._arena: Arena | None = None
        self._kept: bytes | None = None  # copy in host memory, where there is no device
        self.view: memoryview = memoryview(b"")
        self.on_device = False
        self._load(seed)

    def offload(self) -> None:
        """Out, with its content."""
        if self._arena:
            self._arena.suspend()
        else:
            self._kept, self.view = bytes(self.view), memoryview(b"")
        self.on_device = False

    def discard(self) -> None:
        """Out, without its content."""
        if self._arena:
            self._arena.close()
        self._arena, self._kept, self.view = None, None, memoryview(b"")
        self.on_device = False

    def back(self) -> None:
        """In again: what was kept, else what happens to lie there."""
        if self._arena:
            self._arena.resume()
        elif self._kept is not None:
            self.view, self._kept = memoryview(bytearray(self._kept)), None
        else:
            self._load(None if self.seed is None else -1 - self.seed)
            return
        self.on_device = True

    def push(self, seed: int) -> None:
        """New content, in place."""
        self.seed = seed
        self.view[:] = Random(seed).randbytes(self._nbytes)

    def digest(self) -> str:
        """Of what is there now. Kills a process whose memory is not."""
        return hashlib.sha256(self.view).hexdigest()

    def touch(self) -> None:
        """As a forward pass does. Kills a process whose memory is not there."""
        if not self.on_device:
            raise RuntimeError(f"illegal memory access: {self.name} is not on the device")
        if self._nbytes:
            self.view[0] = self.view[0]

    def _load(self, seed: int | None) -> None:
        if self._device and self._nbytes:
            self._arena = Arena(self._device, label=self.name)
            try:
                self.view = self._arena.allocate(self._nbytes)
            except BaseException:
                self._arena.close()
                self._arena = None
                raise
        else:
            self.view = memoryview(bytearray(self._nbytes))
        if seed is not None:
            self.view[:] = Random(seed).randbytes(self._nbytes)
        self.on_device = True
