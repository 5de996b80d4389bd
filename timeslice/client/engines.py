"""Objects that can be registered as workloads as they are: with methods of ours, or an engine of vLLM.

An engine is recognised by its methods; nothing of vLLM is imported. Its interface as of vLLM 0.26: ``LLM``
(vllm/entrypoints/llm.py) and ``AsyncLLM`` (vllm/v1/engine/async_llm.py).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

from timeslice.client.callbacks import Busy, Callbacks, Mode
from timeslice.errors import UsageError
from timeslice.models import Residency

T = TypeVar("T")

OWN, VLLM = ("suspend", "restore"), ("sleep", "wake_up")
LEVELS: dict[Mode, int] = {"offload": 1, "discard": 2}


def callbacks_of(workload: Any) -> Callbacks:
    """UsageError says which methods are missing."""
    if not _missing(workload, OWN):
        return Callbacks(
            on_suspend=workload.suspend,
            on_restore=workload.restore,
            probe=getattr(workload, "probe", None),
            modes=tuple(getattr(workload, "modes", ("offload",))),
            tags=tuple(getattr(workload, "tags", ())),
            slots=tuple(getattr(workload, "slots", ())),
        )
    if not _missing(workload, VLLM):
        return VllmEngine(workload).callbacks()
    kind = type(workload).__name__
    for methods in (OWN, VLLM):
        if len(missing := _missing(workload, methods)) < len(methods):
            present = next(name for name in methods if name not in missing)
            raise UsageError(f"a {kind} can't be registered: it has {present}() and lacks {missing[0]}()")
    raise UsageError(
        f"a {kind} can't be registered: it lacks suspend() and restore(), and is no vLLM engine, for it lacks sleep() "
        "and wake_up(); give on_suspend= and on_restore= instead"
    )


def _missing(workload: Any, methods: tuple[str, ...]) -> list[str]:
    return [name for name in methods if not callable(getattr(workload, name, None))]


class VllmEngine:
    """A vLLM engine in this process. It falls asleep as a whole, and wakes up by tags."""

    tags = ("weights", "kv_cache")

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._waits = inspect.iscoroutinefunction(engine.sleep)
        self._asleep: set[str] = set()
        for owner in self._owners("model_config"):
            if getattr(owner.model_config, "enable_sleep_mode", True) is False:
                raise UsageError("this vLLM engine would keep its memory asleep: make it with enable_sleep_mode=True")

    def callbacks(self) -> Callbacks:
        face = (lambda function: function) if self._waits else _at_once
        return Callbacks(
            on_suspend=face(self.suspend),
            on_restore=face(self.restore),
            probe=face(self.probe),
            modes=tuple(LEVELS),
            tags=self.tags,
        )

    async def suspend(self, mode: Mode, tags: tuple[str, ...]) -> None:
        """Level 1 keeps the weights in host memory, level 2 drops them; the cache is dropped by both."""
        if tags and set(tags) != set(self.tags):
            raise UsageError(f"a vLLM engine falls asleep as a whole; leave the tags out, or name {self.tags}")
        await self._drain()
        options = {}
        if (
            inspect.iscoroutinefunction(self._engine.sleep)
            and "mode" in inspect.signature(self._engine.sleep).parameters
        ):
            options["mode"] = "wait"  # for what arrived since; the engine's default would abort it
        await _result(self._engine.sleep(level=LEVELS[mode], **options))
        self._asleep = set(self.tags)

    async def restore(self, tags: tuple[str, ...]) -> None:
        wanted = [tag for tag in self.tags if tag in self._asleep and (not tags or tag in tags)]
        if wanted:  # an engine does not bear that what is awake is woken up
            await _result(self._engine.wake_up(tags=wanted))
            self._asleep -= set(wanted)

    async def probe(self) -> tuple[Residency, int, int]:
        """It tells no bytes. "Sleeping" may mean that only its scheduler pauses, with all its memory on the device;
        so it counts as suspended only when it was put to sleep here, and sleeps still."""
        for owner in self._owners("is_sleeping"):
            if not await _result(owner.is_sleeping()):
                self._asleep.clear()
            break
        return Residency.SUSPENDED if self._asleep else Residency.RESIDENT, 0, 0

    async def _drain(self) -> None:
        for owner in self._owners("has_unfinished_requests"):
            if await _result(owner.has_unfinished_requests()):
                raise Busy("the vLLM engine has unfinished requests; let them end before the hold does")
            break
        for owner in self._owners("reset_prefix_cache"):
            if await _result(owner.reset_prefix_cache()) is False:
                raise Busy("blocks of the vLLM engine's prefix cache are in use")
            break

    def _owners(self, attribute: str) -> Iterator[Any]:
        """Where it is found: on the engine, or on the part that has it in this version."""
        parts = (getattr(self._engine, name, None) for name in ("llm_engine", "output_processor", "vllm_config"))
        return (part for part in (self._engine, *parts) if getattr(part, attribute, None) is not None)


async def _result(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


def _at_once(function: Callable[..., Coroutine[Any, Any, T]]) -> Callable[..., T]:
    """The same for an engine whose methods wait by themselves, so that there is nothing to await."""

    def call(*arguments: Any) -> T:
        try:
            function(*arguments).send(None)
        except StopIteration as done:
            result: T = done.value
            return result
        raise UsageError("a method of the vLLM engine returned something to await, though sleep() does not")

    return call
