"""SGLang's server: python/sglang/srt/entrypoints/http_server.py and managers/scheduler*, as of v0.4.8 to v0.5.23.

``POST /release_memory_occupation`` and ``/resume_memory_occupation`` take ``{"tags": [...]}``; none and an empty list
both mean all. The scheduler asserts that it is idle, and dies if not; resuming a tag that was not released raises, and
releasing one twice ends the process. No route tells what is released, so it is kept in marks. Weights come back as
they were only with --enable-weights-cpu-backup.

Of the routes that look harmless, ``/health`` and ``/health_generate`` generate a token since v0.4.10. While something
is released, v0.5.0 to v0.5.9 leave that without an answer and say 503 after 20 s; from v0.5.10 on it is computed on
memory that is not there, and the server dies. ``/server_info`` the scheduler answers from what it knows, in all.
"""

# ruff: noqa: ARG002 - the interface has these arguments
from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from timeslice.backends.base import Selection
from timeslice.backends.http_dialect import Dialect, Server
from timeslice.backends.http_marks import Mark
from timeslice.errors import BackendError, FaultKind

_ROUNDED, _LARGEST = 0.01, 1e6  # GiB
_KNOWS_TAGS = (0, 4, 8)
_INFO = ("/server_info", "/get_server_info")  # the first since v0.5.6; then the second logs a warning each time


class SglangDialect(Dialect):
    tags = ("weights", "kv_cache", "cuda_graph")
    apart = True
    tells = False

    async def run_of(self, server: Server, until: float) -> str:
        # Drawn anew at each start, unless somebody chose one.
        return str((await self._info(server, until)).get("random_seed", ""))[:300]

    async def asleep(self, server: Server, mark: Mark | None, until: float) -> tuple[str, ...] | None:
        if mark is None or not mark.is_of(await self.run_of(server, until), server.process):
            return ()
        return None if mark.unsure else mark.out

    async def objection(self, server: Server, selection: Selection, until: float) -> str:
        info = await self._info(server, until)
        version = tuple(map(int, re.findall(r"\d{1,9}", str(info.get("version", ""))[:100])[:3]))
        if version and version < _KNOWS_TAGS:
            return "it would end at the second part that wakes, for it knows no parts; use SGLang 0.4.8 or newer"
        if not info.get("enable_memory_saver"):
            return "it can free nothing; start it with --enable-memory-saver"
        weights = not selection.tags or "weights" in selection.tags
        if weights and selection.mode == "offload" and not info.get("enable_weights_cpu_backup"):
            return (
                "it has no copy of its weights, which would come back as garbage; start it with "
                "--enable-weights-cpu-backup, or register it with modes=('discard',) if the job pushes new weights"
            )
        return ""

    async def dropped(self, server: Server, until: float) -> int:
        """Its cache, which it tells in GiB with two decimals."""
        states = (await self._info(server, until)).get("internal_states")
        sizes = [_cache(state) for state in states] if isinstance(states, list) else []
        return max(0, int((min(sizes, default=0.0) - _ROUNDED) * (1 << 30)))

    async def work(self, server: Server, until: float) -> str:
        # It flushes only when nothing runs or waits; 400 says that. Old servers say 200 in any case.
        answer = await server.question("/flush_cache", until, method="POST", accept=(400,))
        if answer.status == 400:
            return "requests run or wait"
        load = await server.question("/get_load", until, accept=(404,))
        count = sum(_requests(each) for each in _ranks(load.json()))
        return f"{count} requests run or wait" if count else ""

    async def dead(self, server: Server, until: float) -> str:
        # Never /health. A scheduler that died takes the whole server along; one that hangs does not answer this.
        await self._info(server, until)
        return ""

    async def sleep(self, server: Server, selection: Selection, tags: Sequence[str], until: float) -> None:
        await server.order("/release_memory_occupation", until, body={"tags": list(tags)})

    async def wake(self, server: Server, tag: str, until: float) -> None:
        await server.order("/resume_memory_occupation", until, body={"tags": [tag]})

    async def _info(self, server: Server, until: float) -> dict[str, Any]:
        for path in _INFO:
            answer = await server.question(path, until, accept=(404,))
            if answer.status != 404:
                return answer.object()
        raise BackendError(f"{server.url} does not tell how it was started: no SGLang?", kind=FaultKind.UNSUPPORTED)


def _cache(state: Any) -> float:
    usage = state.get("memory_usage") if isinstance(state, dict) else None
    size = usage.get("kvcache") if isinstance(usage, dict) else None
    return size if isinstance(size, float) and 0 < size < _LARGEST else 0.0


def _ranks(load: Any) -> list[dict[str, Any]]:
    """One entry for each data-parallel rank."""
    return [each for each in (load if isinstance(load, list) else [load]) if isinstance(each, dict)]


def _requests(load: dict[str, Any]) -> int:
    return sum(value for value in (load.get("num_reqs"), load.get("num_waiting_reqs")) if isinstance(value, int))
