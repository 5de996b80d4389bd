"""vLLM's OpenAI server: vllm/entrypoints/serve/dev/sleep/api_router.py, as of v0.8.3 to v0.32.

``POST /sleep?level=1`` keeps the weights in pinned host memory, level 2 drops them; both drop the KV cache. ``mode`` is
known since v0.16; older servers pass over it and abort. An executor that sleeps ignores a further ``/sleep``, and
passes over a whole ``/wake_up`` in which one tag is awake already (both with status 200), so tags are woken one by one.
``/is_sleeping`` is true until all are awake, and while only the scheduler pauses; the gauge ``engine_sleep_state`` of
``/metrics`` (vllm/v1/metrics/loggers.py) tells these apart. The routes are there with VLLM_SERVER_DEV_MODE=1 only.
"""

# ruff: noqa: ARG002 - the interface has these arguments
from __future__ import annotations

import re
from collections.abc import Sequence

from timeslice.backends.base import Selection
from timeslice.backends.http_dialect import Dialect, Server
from timeslice.backends.http_marks import Mark
from timeslice.errors import BackendError, FaultKind

_NUMBER = r"(\d+(?:\.\d*)?(?:[eE][+-]?\d+)?)"
_COUNT = re.compile(rf"^vllm:num_requests_(running|waiting)(?:\{{[^}}]*\}})?\s+{_NUMBER}\s*$", re.MULTILINE)
_SLEEP_STATE = re.compile(
    rf'^vllm:engine_sleep_state\{{[^}}]*sleep_state="(\w+)"[^}}]*\}}\s+{_NUMBER}\s*$', re.MULTILINE
)
_CACHE = re.compile(r'^vllm:cache_config_info\{[^}]*kv_cache_memory_bytes="(\d{1,15})"', re.MULTILINE)
_WHOLE_BLOCKS = 0.98
_START = "start it with VLLM_SERVER_DEV_MODE=1 and --enable-sleep-mode"
_LEVELS = {"offload": "1", "discard": "2"}


class VllmDialect(Dialect):
    tags = ("weights", "kv_cache")
    apart = False
    tells = True

    def __init__(self, *, drain: str, reload: bool) -> None:
        self._drain, self._reload = drain, reload

    async def run_of(self, server: Server, until: float) -> str:
        return ""  # what /is_sleeping says overrules it anyway

    async def asleep(self, server: Server, mark: Mark | None, until: float) -> tuple[str, ...] | None:
        answer = await server.question("/is_sleeping", until, accept=(404,))
        if answer.status == 404:
            raise BackendError(f"{server.url} knows no /is_sleeping; {_START}", kind=FaultKind.UNSUPPORTED)
        found = answer.object().get("is_sleeping")
        if not isinstance(found, bool):
            raise BackendError(f"{server.url}/is_sleeping answered something else", kind=FaultKind.UNSUPPORTED)
        if not found:
            return ()
        known = mark is not None and mark.out and mark.is_of("", server.process)
        if mark and known and not (mark.unsure and mark.out == self.tags):
            return mark.out
        return self.tags if await self._is_out(server, until) else ()

    async def dropped(self, server: Server, until: float) -> int:
        """Its cache, where it was started with ``--kv-cache-memory-bytes``; it is made of whole blocks."""
        told = _CACHE.findall((await server.question("/metrics", until, accept=(404,))).text())
        return int(min(map(int, told), default=0) * _WHOLE_BLOCKS)

    async def _is_out(self, server: Server, until: float) -> bool:
        """Whether one that says that it sleeps has really put something away. One whose scheduler pauses (``/pause``,
        level 0) says so too, with all its memory on the device. Where it keeps no statistics it is believed."""
        states = _SLEEP_STATE.findall((await server.question("/metrics", until, accept=(404,))).text())
        return not states or any(kind != "awake" and float(number) for kind, number in states)

    async def objection(self, server: Server, selection: Selection, until: float) -> str:
        if selection.tags and set(selection.tags) != set(self.tags):
            return f"vLLM puts all to sleep at once, not {', '.join(selection.tags)} alone; leave the tags out"
        return ""

    async def work(self, server: Server, until: float) -> str:
        if self._drain == "abort":
            return ""
        answer = await server.question("/metrics", until, accept=(404,))
        counts = dict.fromkeys(("running", "waiting"), 0.0)
        for kind, number in _COUNT.findall(answer.text() if answer.status < 300 else ""):
            counts[kind] += float(number)
        return ", ".join(f"{number:g} requests {kind}" for kind, number in counts.items() if number)

    async def dead(self, server: Server, until: float) -> str:
        # It only tells whether the engine's process has failed.
        answer = await server.question("/health", until, accept=(500, 503))
        return "" if answer.status < 300 else f"GET {server.url}/health answered {answer.status}: its engine has died"

    async def sleep(self, server: Server, selection: Selection, tags: Sequence[str], until: float) -> None:
        await server.order("/sleep", until, params={"level": _LEVELS[selection.mode], "mode": self._drain})

    async def wake(self, server: Server, tag: str, until: float) -> None:
        await server.order("/wake_up", until, params={"tags": tag})

    async def refill(self, server: Server, until: float) -> None:
        if self._reload:
            await server.order("/collective_rpc", until, body={"method": "reload_weights"})
