"""A job's process, told line by line what to do. Run by the tests, not by pytest."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from random import Random
from typing import Any

from timeslice.arena import Arena
from timeslice.models import Residency


class Job:
    """Each method can be called from the test."""

    def __init__(self) -> None:
        self._arenas: list[Arena] = []
        self._views: list[memoryview] = []
        self._workload: Any = None
        self._kept: list[memoryview] = []
        self._away: list[bytes] = []

    def ping(self) -> int:
        return os.getpid()

    def arena(self, device: str) -> int:
        self._arenas.append(Arena(device))
        return len(self._arenas) - 1

    def allocate(self, nbytes: int, seed: int, arena: int = 0) -> str:
        """Allocate and fill; the digest of what is there now."""
        self._views.append(self._filled(nbytes, seed, arena))
        return self.digest()

    def _filled(self, nbytes: int, seed: int, arena: int = 0) -> memoryview:
        view = self._arenas[arena].allocate(nbytes)
        view[:] = Random(seed).randbytes(nbytes)
        return view

    def digest(self) -> str:
        """Of everything allocated. Kills the process while it is off the device."""
        total = hashlib.sha256()
        for view in (*self._views, *self._kept):
            total.update(view)
        return total.hexdigest()

    def keep(self, nbytes: int, seed: int) -> None:
        """Allocate what the application moves by itself."""
        self._kept.append(self._filled(nbytes, seed))

    def application(self, url: str, prefix: str, group: str, job: str) -> str:
        """Let the channel backend move what is kept: copied and freed, as a framework does with its tensors."""
        os.environ["TIMESLICE_PREFIX"] = prefix
        from timeslice.client.workload import register_workload

        self._workload = register_workload(
            group, on_suspend=self._put_away, on_restore=self._take_back, probe=self._probe, job=job, url=url
        )
        return str(self._workload.target.model_dump_json())

    def _put_away(self, *_: object) -> int:
        for view in self._kept:
            self._away.append(bytes(view))
            self._arenas[0].free(view)
        self._kept.clear()
        return sum(map(len, self._away))

    def _take_back(self, *_: object) -> int:
        taken: list[memoryview] = []
        try:
            for content in self._away:
                taken.append(self._arenas[0].allocate(len(content)))
                taken[-1][:] = content
        except BaseException:
            for view in taken:
                self._arenas[0].free(view)
            raise
        self._kept, self._away = taken, []
        return sum(map(len, taken))

    def _probe(self) -> tuple[Residency, int, int]:
        state = Residency.SUSPENDED if self._away else Residency.RESIDENT if self._kept else Residency.ABSENT
        return state, sum(map(len, self._kept)), sum(map(len, self._away))

    def seal(self) -> None:
        """The content changes no more."""
        self._arenas[0].seal(self._views[0])

    def workload(self, url: str, prefix: str, group: str, job: str) -> str:
        """Let the channel backend move the first arena."""
        os.environ["TIMESLICE_PREFIX"] = prefix
        from timeslice.client.workload import register_arena

        self._workload = register_arena(group, self._arenas[0], job=job, url=url)
        return str(self._workload.target.model_dump_json())

    def server(self, device: str, nbytes: int, seed: int) -> str:
        """Be a vLLM server, with weights on the device; its address."""
        os.environ["VLLM_SERVER_DEV_MODE"] = "1"
        from tests.servers.vllm import Vllm, parser

        sizes = ("--weights", str(nbytes), "--kv-cache", "0", "--seed", str(seed))
        server = Vllm(parser().parse_args(["--enable-sleep-mode", "--device", device, *sizes]))
        self._views.append(server.weights.view)
        return server.start()

    def plain_memory(self, nbytes: int) -> None:
        """Memory that is no device's, every page of it touched."""
        self._plain = bytearray(os.urandom(4096)) * (nbytes // 4096)


def serve(job: Job) -> None:
    for line in sys.stdin:
        name, arguments = json.loads(line)
        print(json.dumps(getattr(job, name)(*arguments)), flush=True)


if __name__ == "__main__":
    serve(Job())
