"""veRL: a mix-in that holds the devices of a worker during the methods that use them.

::

    class Worker(TimesliceWorkerMixin, ActorRolloutRefWorker): ...

For trainers that call their workers without hooks of their own, such as those of ``fsdp_workers`` up to veRL 0.7.
All ranks of a worker group hold together, as a gang: veRL calls each of them, and sets ``RANK`` and ``WORLD_SIZE``.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from typing import Any

from timeslice.integrations.phases import PhaseCallback

# Method -> phase and role. What a class does not have is passed over.
METHODS = {
    "init_model": ("init", "both"),
    "load_checkpoint": ("init", "trainer"),
    "generate_sequences": ("generate", "sampler"),
    "compute_log_prob": ("train", "trainer"),
    "compute_ref_log_prob": ("train", "trainer"),
    "compute_values": ("train", "trainer"),
    "update_actor": ("train", "trainer"),
    "update_critic": ("train", "trainer"),
    "update_weights": ("weight_sync", "both"),
    "save_checkpoint": ("save", "trainer"),
}
# The hybrid engine generates from the first kind of call to the second, whoever asks it for tokens in between.
TO_ROLLOUT = ("rollout_mode", "wake_up")
TO_TRAINER = ("trainer_mode", "sleep")

Span = Callable[["TimesliceWorkerMixin"], AbstractContextManager[None]]


class TimesliceWorkerMixin:
    """Holds during the methods of the worker class behind it, and from ``rollout_mode`` or ``wake_up`` until
    ``trainer_mode`` or ``sleep``. What veRL registered about a method is kept."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        self.timeslice_phases = PhaseCallback(gang=True)
        self.timeslice_generates = False
        super().__init__(*arguments, **named)

    def __init_subclass__(cls, **named: Any) -> None:
        super().__init_subclass__(**named)
        spans = {name: _call(phase, role) for name, (phase, role) in METHODS.items()}
        spans |= dict.fromkeys(TO_ROLLOUT, _to_rollout) | dict.fromkeys(TO_TRAINER, _to_trainer)
        for name, span in spans.items():
            function = getattr(cls, name, None)
            if function:  # held more than once where a class between holds it too: the inner hold joins the outer
                setattr(cls, name, _held(function, span))


def _call(phase: str, role: str) -> Span:
    @contextmanager
    def span(worker: TimesliceWorkerMixin) -> Iterator[None]:
        worker.timeslice_phases.on_phase_begin(phase, role)
        try:
            yield
        finally:
            worker.timeslice_phases.on_phase_end(phase, role)

    return span


@contextmanager
def _to_rollout(worker: TimesliceWorkerMixin) -> Iterator[None]:
    with _call("weight_sync", "both")(worker):
        yield
        if not worker.timeslice_generates:
            worker.timeslice_phases.on_phase_begin("generate", "sampler")
            worker.timeslice_generates = True


@contextmanager
def _to_trainer(worker: TimesliceWorkerMixin) -> Iterator[None]:
    with _call("generate", "sampler")(worker):
        try:
            yield
        finally:
            if worker.timeslice_generates:
                worker.timeslice_generates = False
                worker.timeslice_phases.on_phase_end("generate", "sampler")


def _held(function: Callable[..., Any], span: Span) -> Callable[..., Any]:
    """The method with a span around it; ``wraps`` keeps the attributes by which veRL dispatches it."""
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def held_await(self: TimesliceWorkerMixin, *arguments: Any, **named: Any) -> Any:
            async with _on_a_thread(span(self)):
                return await function(self, *arguments, **named)

        return held_await

    @functools.wraps(function)
    def held_call(self: TimesliceWorkerMixin, *arguments: Any, **named: Any) -> Any:
        with span(self):
            return function(self, *arguments, **named)

    return held_call


@asynccontextmanager
async def _on_a_thread(span: AbstractContextManager[None]) -> AsyncIterator[None]:
    """Enter and leave on another thread: the wait for a group must not stop the event loop."""
    entering = asyncio.create_task(asyncio.to_thread(span.__enter__))
    try:
        await asyncio.shield(entering)
    except asyncio.CancelledError:
        # A thread can't be cancelled: let it leave again as soon as it is in.
        entering.add_done_callback(lambda entered: _leave(entered, span))
        raise
    try:
        yield
    finally:
        await asyncio.to_thread(span.__exit__, *sys.exc_info())


def _leave(entered: asyncio.Task[None], span: AbstractContextManager[None]) -> None:
    if not entered.cancelled() and entered.exception() is None:
        span.__exit__(asyncio.CancelledError, None, None)  # nothing was done in it
