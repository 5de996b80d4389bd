"""`@timeslice.hold(...)` and `@timeslice.phase(...)` on every kind of function that a job has."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

import timeslice
from tests.client.world import World
from timeslice.errors import UsageError


def held() -> timeslice.Hold:
    return timeslice.hold("g", job="a", lock_only=True)


def no_grad(function: Callable[..., Any]) -> Callable[..., Any]:
    """As torch.no_grad() wraps: a plain function, whatever it wraps."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return wrapper


def runs(function: Callable[..., Any]) -> Callable[..., Any]:
    """As commands wrap their coroutine functions: the wrapper runs them."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return asyncio.run(function(*args, **kwargs))

    return wrapper


def test_static_and_class_methods_run_inside(world: World) -> None:
    """In either order of the decorators, called on the class and on an instance."""

    class Trainer:
        @held()
        @staticmethod
        def above_static(step: int) -> tuple[int, str]:
            return step, world.holder()

        @staticmethod
        @held()
        def below_static(step: int) -> tuple[int, str]:
            return step, world.holder()

        @held()
        @classmethod
        def above_class(cls, step: int) -> tuple[str, int, str]:
            return cls.__name__, step, world.holder()

        @held()
        def method(self, step: int) -> tuple[int, str]:
            return step, world.holder()

    for trainer in (Trainer, Trainer()):
        assert trainer.above_static(1) == (1, "a")
        assert trainer.below_static(2) == (2, "a")
        assert trainer.above_class(3) == ("Trainer", 3, "a")
    assert Trainer().method(4) == (4, "a")
    assert not world.holder()


async def test_an_async_static_method_is_held_for_the_whole_await(world: World) -> None:
    """What is decorated is the function in it."""

    class Sampler:
        @held()
        @staticmethod
        async def sample() -> str:
            await asyncio.sleep(0)
            return world.holder()

    assert await Sampler.sample() == "a"


async def sample(world: World, step: int) -> tuple[int, str]:
    await asyncio.sleep(0)
    return step, world.holder()


async def test_a_wrapped_coroutine_function_is_held_for_the_whole_await(world: World) -> None:
    """`@torch.no_grad()` makes a plain function of it, which returns the coroutine."""
    decorated = held()(no_grad(functools.partial(no_grad(sample), world)))
    assert await decorated(7) == (7, "a")
    assert not world.holder()


def test_a_wrapped_coroutine_function_may_be_called_where_no_loop_runs(world: World) -> None:
    """As in asyncio.run(sample())."""
    decorated = held()(no_grad(sample))
    for step in range(2):
        assert asyncio.run(decorated(world, step)) == (step, "a")
    assert not world.holder()


def test_a_wrapper_that_runs_its_coroutine_is_held_around_the_call(world: World) -> None:
    """It returns the result, and so does what is decorated."""
    assert held()(runs(sample))(world, 3) == (3, "a")


async def test_a_wrapper_that_computes_elsewhere_never_runs_outside(world: World) -> None:
    """It runs its coroutine in another thread's loop: where a loop runs here, it is called inside, once awaited."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    seen: list[str] = []

    def elsewhere(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any) -> Any:
            return asyncio.run_coroutine_threadsafe(function(*args), loop).result(20)

        return call

    @held()
    @elsewhere
    async def step(number: int) -> int:
        seen.append(await asyncio.to_thread(world.holder))
        return number

    try:
        pending: Any = step(5)
        assert seen == []
        assert await pending == 5
        assert seen == ["a"]
        assert await asyncio.to_thread(step, 6) == 6
        assert seen == ["a", "a"]
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def test_a_task_that_would_run_on_is_refused(world: World) -> None:
    """Its body would run without the hold; it is cancelled before it begins."""
    ran: list[str] = []

    async def later() -> None:
        ran.append(world.holder())

    @held()
    def train() -> Any:
        return asyncio.ensure_future(later())

    with pytest.raises(UsageError, match="would run on without the hold, and is cancelled"):
        train()
    await asyncio.sleep(0)
    assert ran == []


async def test_partials_and_objects_that_can_be_called_run_inside(world: World) -> None:
    """Also where the call makes a coroutine."""

    class Model:
        def __call__(self) -> str:
            return world.holder()

    class AsyncModel:
        async def __call__(self) -> str:
            return world.holder()

    assert await held()(functools.partial(sample, world))(1) == (1, "a")
    assert held()(Model())() == "a"
    assert await held()(AsyncModel())() == "a"
    assert not world.holder()


def batches() -> Iterator[int]:
    yield 1


async def stream() -> AsyncIterator[int]:
    yield 1


def opened() -> AsyncIterator[int]:
    return stream()


@pytest.mark.parametrize("what", ["hold", "phase"])
@pytest.mark.parametrize(
    "function",
    [batches, stream, functools.partial(batches), staticmethod(stream)],
    ids=["generator", "async generator", "partial", "static"],
)
def test_a_generator_is_refused_where_it_is_decorated(world: World, function: Any, what: str) -> None:
    """Its body runs between the calls of whoever iterates; the error says what to write instead."""
    decorator = timeslice.hold("g") if what == "hold" else timeslice.phase("verify")
    with pytest.raises(UsageError, match=rf"is a generator: .* Put `with timeslice.{what}\(...\)` inside it"):
        decorator(function)


@pytest.mark.parametrize("function", [no_grad(batches), opened, contextlib.contextmanager(batches)])
def test_a_generator_that_only_a_call_shows_is_refused_there(world: World, function: Any) -> None:
    """Before anything of it runs: it would run without the hold."""
    with pytest.raises(UsageError, match="is a generator"):
        held()(function)()


@pytest.mark.parametrize("wrong", [type("Trainer", (), {}), property(lambda _: 1), 5])
def test_what_is_no_function_is_refused(wrong: Any) -> None:
    """Where it is written."""
    with pytest.raises(UsageError, match="decorates functions and methods"):
        timeslice.hold("g")(wrong)


async def test_a_phase_decorates_the_same_kinds(world: World) -> None:
    """One rule for both: a phase of a wrapped coroutine function ends when that does."""
    with timeslice.Client(job="a") as client:
        client.hold("g", lock_only=True)(lambda: None)()

    class Scorer:
        @timeslice.phase("verify", job="a", groups=["g"])
        @staticmethod
        def score(answer: int) -> int:
            return answer + 1

    async def load() -> str:
        await asyncio.sleep(0)
        return "loaded"

    assert Scorer.score(1) == 2
    assert await timeslice.phase("load", job="a", groups=["g"])(no_grad(load))() == "loaded"
