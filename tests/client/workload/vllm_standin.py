"""Stand-ins for the engines of vLLM 0.26, as far as sleeping goes: what was checked is theirs, the bytes are not.

Read from vllm/entrypoints/llm.py (``LLM``), vllm/v1/engine/llm_engine.py, vllm/v1/engine/async_llm.py (``AsyncLLM``),
vllm/v1/engine/core.py (pausing, what waking up does to the scheduler) and vllm/v1/executor/abstract.py (the tags that
sleep). vLLM itself needs a GPU and is not installed.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

TAGS = ("weights", "kv_cache")


class EngineCore:
    """Scheduler and executor: unfinished requests, and which memory is asleep."""

    def __init__(self) -> None:
        self.weights: bytes | None = b"weights as they were loaded"
        self.backup: bytes | None = None
        self.sleeping_tags: set[str] = set()
        self.requests: list[str] = []
        self.aborted: list[str] = []
        self.paused = False
        self.calls: list[tuple[Any, ...]] = []

    def sleep(self, level: int, mode: str) -> None:
        self.calls.append(("sleep", level, mode))
        self.paused = True
        if mode == "abort":
            self.aborted += self.requests
            self.requests.clear()
        if level == 0 or self.sleeping_tags:  # the executor sleeps already: it only warns
            return
        assert not self.requests, "memory is freed under a running request"
        self.backup = self.weights if level == 1 else None
        self.weights = None
        self.sleeping_tags = set(TAGS)

    def wake_up(self, tags: list[str] | None) -> None:
        self.calls.append(("wake_up", *(tags or ())))
        for tag in tags or TAGS:
            if tag not in self.sleeping_tags:
                raise RuntimeError(f"CUDA error: {tag} is mapped already")  # the end of the engine's process
        self.sleeping_tags -= set(tags or TAGS)
        if "weights" in (tags or TAGS):
            self.weights = self.backup or b"whatever lay in that memory"
        if not self.sleeping_tags:
            self.paused = False

    def is_sleeping(self) -> bool:
        return self.paused or bool(self.sleeping_tags)

    def reset_prefix_cache(self) -> bool:
        return not self.requests


class LLMEngine:
    def __init__(self, core: EngineCore, *, enable_sleep_mode: bool) -> None:
        self.core = core
        self.model_config = SimpleNamespace(enable_sleep_mode=enable_sleep_mode)

    def has_unfinished_requests(self) -> bool:
        return bool(self.core.requests)

    def is_sleeping(self) -> bool:
        return self.core.is_sleeping()


class LLM:
    def __init__(self, *, enable_sleep_mode: bool = True) -> None:
        self.core = EngineCore()
        self.llm_engine = LLMEngine(self.core, enable_sleep_mode=enable_sleep_mode)

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        if mode == "wait":
            raise ValueError("'wait' mode can't be used in inproc-engine mode")
        self.core.sleep(level, mode)

    def wake_up(self, tags: list[str] | None = None) -> None:
        self.core.wake_up(tags)

    def reset_prefix_cache(self) -> bool:
        return self.core.reset_prefix_cache()


class AsyncLLM:
    """Its output processor knows the requests that it has not delivered."""

    def __init__(self) -> None:
        self.core = EngineCore()
        self.loops: set[Any] = set()
        self.vllm_config = SimpleNamespace(model_config=SimpleNamespace(enable_sleep_mode=True))
        self.output_processor = SimpleNamespace(has_unfinished_requests=lambda: bool(self.core.requests))

    async def sleep(self, level: int = 1, mode: str = "abort") -> None:
        self.loops.add(asyncio.get_running_loop())
        if mode == "wait":
            while self.core.requests:
                await asyncio.sleep(0.01)
        self.core.sleep(level, mode)

    async def wake_up(self, tags: list[str] | None = None) -> None:
        self.loops.add(asyncio.get_running_loop())
        self.core.wake_up(tags)

    async def is_sleeping(self) -> bool:
        return self.core.is_sleeping()

    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        return self.core.reset_prefix_cache()
