"""A job's process that computes on a GPU by the CUDA driver API, told line by line what to do. Run by tests.

The same calls work on a real GPU and on the stand-in of stub/libcuda.c: the loader decides which libcuda.so.1 it is.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import json
import os
import signal
import sys
import threading
import time
from random import Random
from typing import Any

CHUNK = 1 << 24


class Job:
    """Each method can be called from the test."""

    def __init__(self) -> None:
        self._cuda: Any = None
        self._contexts: dict[int, ctypes.c_void_p] = {}
        self._blocks: list[tuple[int, int, int]] = []  # device, address, bytes
        self._pen = threading.Lock()

    def ping(self) -> int:
        return os.getpid()

    def thread(self) -> int:
        """The number of a thread that waits for ever."""
        made = threading.Thread(target=threading.Event().wait, daemon=True)
        made.start()
        assert made.native_id
        return made.native_id

    def context(self, device: int = 0) -> None:
        """A context on a device and nothing else."""
        if self._cuda is None:
            self._cuda = ctypes.CDLL("libcuda.so.1")
            self._do("cuInit", 0)
        if device not in self._contexts:
            made, handle = ctypes.c_void_p(), ctypes.c_int()
            self._do("cuDeviceGet", ctypes.byref(handle), device)
            self._do("cuCtxCreate_v2", ctypes.byref(made), 0, handle)
            self._contexts[device] = made
        self._do("cuCtxSetCurrent", self._contexts[device])

    def allocate(self, nbytes: int, seed: int = 1, device: int = 0) -> str:
        """Allocate on a device and fill it; the digest of what is there now."""
        self.context(device)
        address = ctypes.c_uint64()
        self._do("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(nbytes))
        self._blocks.append((device, address.value, nbytes))
        random = Random(seed).randbytes(min(nbytes, CHUNK))
        for at in range(0, nbytes, CHUNK):
            piece = random[: nbytes - at]
            self._do("cuMemcpyHtoD_v2", ctypes.c_uint64(address.value + at), piece, ctypes.c_size_t(len(piece)))
        return self.digest()

    def reserve(self, nbytes: int, device: int = 0) -> None:
        """Take memory without filling it, or looking at it in a digest."""
        self.context(device)
        self._do("cuMemAlloc_v2", ctypes.byref(ctypes.c_uint64()), ctypes.c_size_t(nbytes))

    def free(self) -> None:
        """The newest allocation."""
        device, address, _ = self._blocks.pop()
        self.context(device)
        self._do("cuMemFree_v2", ctypes.c_uint64(address))

    def digest(self) -> str:
        """Of everything allocated. It waits while the process is off the device."""
        total = hashlib.sha256()
        for device, address, nbytes in self._blocks:
            self.context(device)
            for at in range(0, nbytes, CHUNK):
                piece = ctypes.create_string_buffer(min(CHUNK, nbytes - at))
                self._do("cuMemcpyDtoH_v2", piece, ctypes.c_uint64(address + at), ctypes.c_size_t(len(piece)))
                total.update(piece)
        return total.hexdigest()

    def scribble(self, path: str) -> None:
        """From now on write to the oldest allocation as fast as it goes, and to ``path`` how often that worked."""
        device, address, _ = self._blocks[0]

        def write() -> None:
            self._do("cuCtxSetCurrent", self._contexts[device])
            file = os.open(path, os.O_WRONLY | os.O_CREAT)
            for number in itertools.count(1):
                data = number.to_bytes(8, "little")
                with self._pen:
                    self._do("cuMemcpyHtoD_v2", ctypes.c_uint64(address), data, ctypes.c_size_t(8))
                os.pwrite(file, data, 0)
                time.sleep(0.001)

        threading.Thread(target=write, daemon=True).start()

    def stand_still(self) -> None:
        """Stop, as by Ctrl-Z, though not within a write."""
        with self._pen:
            os.kill(os.getpid(), signal.SIGSTOP)

    def uuid(self, device: int = 0) -> str:
        """Of a device as this process counts them."""
        self.context(device)
        raw, handle = (ctypes.c_ubyte * 16)(), ctypes.c_int()
        self._do("cuDeviceGet", ctypes.byref(handle), device)
        self._do("cuDeviceGetUuid_v2", raw, handle)
        text = bytes(raw).hex()
        return f"GPU-{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"

    def _do(self, name: str, *arguments: Any) -> None:
        if code := getattr(self._cuda, name)(*arguments):
            raise RuntimeError(f"{name} returned {code}")


def main() -> None:
    job = Job()
    for line in sys.stdin:
        name, arguments = json.loads(line)
        print(json.dumps(getattr(job, name)(*arguments)), flush=True)


if __name__ == "__main__":
    main()
