"""A job's process, told line by line what to do. Run by the tests, not by pytest."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from random import Random
from typing import Any

from timeslice.arena import Arena


class Job:
    """Each method can be called from the test."""

    def __init__(self) -> None:
        self._arenas: list[Arena] = []
        self._views: list[memoryview] = []
        self._workload: Any = None

    def ping(self) -> int:
        return os.getpid()

    def arena(self, device: str) -> int:
        self._arenas.append(Arena(device))
        return len(self._arenas) - 1

    def allocate(self, nbytes: int, seed: int, arena: int = 0) -> str:
        """Allocate and fill; the digest of what is there now."""
        view = self._arenas[arena].allocate(nbytes)
        view[:] = Random(seed).randbytes(nbytes)
        self._views.append(view)
        return self.digest()

    def digest(self) -> str:
        """Of everything allocated. Kills the process while it is off the device."""
        total = hashlib.sha256()
        for view in self._views:
            total.update(view)
        return total.hexdigest()

    def workload(self, url: str, prefix: str, group: str, job: str) -> str:
        """Let the channel backend move the first arena."""
        os.environ["TIMESLICE_PREFIX"] = prefix
        from timeslice.client.workload import register_arena

        self._workload = register_arena(group, self._arenas[0], job=job, url=url)
        return str(self._workload.target.model_dump_json())

    def plain_memory(self, nbytes: int) -> None:
        """Memory that is no device's, every page of it touched."""
        self._plain = bytearray(os.urandom(4096)) * (nbytes // 4096)


def serve(job: Job) -> None:
    for line in sys.stdin:
        name, arguments = json.loads(line)
        print(json.dumps(getattr(job, name)(*arguments)), flush=True)


if __name__ == "__main__":
    serve(Job())
