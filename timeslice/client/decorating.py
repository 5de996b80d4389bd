"""What a hold or a phase does as a decorator, written once for both.

The kind of a function decides: a coroutine function is awaited inside, a plain one called inside. A generator's body
runs between the calls of whoever iterates, so no decorator can say when it needs the group: it is refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar, cast

from timeslice.errors import UsageError

F = TypeVar("F", bound=Callable[..., Any])


def decorated(function: F, what: str, around: Callable[[], Any]) -> F:
    """``function`` with each call inside of what ``around`` makes anew, which is for ``with`` and ``async with``.

    ``what`` names it for people: "hold" or "phase". Raises UsageError for what can't be decorated.
    """
    if isinstance(function, staticmethod | classmethod):
        return cast("F", type(function)(decorated(function.__func__, what, around)))
    if inspect.isclass(function) or not callable(function):
        raise UsageError(
            f"{function!r} is no function: a {what} decorates functions and methods. Decorate the method that computes."
        )
    if any(map(_is_generator, _callees(function))):
        raise _generator(function, what)
    if any(map(inspect.iscoroutinefunction, _callees(function))):
        return cast("F", _awaiting(function, around))
    if any(map(inspect.iscoroutinefunction, _wrapped(function))):
        return cast("F", _either(function, around))
    return cast("F", _calling(function, what, around))


def _awaiting(function: Callable[..., Any], around: Callable[[], Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    async def inside(*args: Any, **kwargs: Any) -> Any:
        async with around():
            return await function(*args, **kwargs)

    return inside


def _calling(function: Callable[..., Any], what: str, around: Callable[[], Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def inside(*args: Any, **kwargs: Any) -> Any:
        with around():
            result = function(*args, **kwargs)
        if isinstance(result, Coroutine):
            result.close()
            raise UsageError(
                f"{function!r} returned a coroutine, which would run without the {what}. Decorate the `async def`."
            )
        if asyncio.isfuture(result):
            result.cancel()
            raise UsageError(
                f"{function!r} returned {type(result).__name__.lower()} {result!r}, which would run on without the "
                f"{what}, and is cancelled. Await it in an `async def`, and decorate that."
            )
        if _runs_later(function, result):
            raise _generator(function, what)
        return result

    return inside


def _either(function: Callable[..., Any], around: Callable[[], Any]) -> Callable[..., Any]:
    """For a plain function around a coroutine function. ``@torch.no_grad()`` makes one that returns the coroutine, and
    ``lambda: asyncio.run(...)`` is one that runs it: only a call shows which it is, unless an event loop runs here,
    for then it can't be run."""
    returns_coroutine = False

    async def awaited(result: Any) -> Any:
        async with around():
            return await result

    async def called(*args: Any, **kwargs: Any) -> Any:
        """Where a loop runs, what is called may also compute at once, in another thread's loop."""
        async with around():
            result = function(*args, **kwargs)
            return await result if inspect.isawaitable(result) else result

    @functools.wraps(function)
    def either(*args: Any, **kwargs: Any) -> Any:
        nonlocal returns_coroutine
        if returns_coroutine or _in_loop():
            return called(*args, **kwargs)
        with around():
            result = function(*args, **kwargs)
        if not isinstance(result, Coroutine):
            return result
        returns_coroutine = True
        return awaited(result)  # nothing of it has run yet

    return either


def _in_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _callees(function: Any) -> Iterator[Any]:
    """The function, and what is called by its very call: behind a partial, or an object that can be called."""
    while True:
        yield function
        if isinstance(function, functools.partial):
            function = function.func
        else:
            break
    if not inspect.isroutine(function):
        yield type(function).__call__


def _wrapped(function: Any) -> Iterator[Any]:
    """What a decorator has wrapped, and that wrapped in turn."""
    seen, ahead = {id(function)}, [function]
    while ahead:
        for callee in _callees(ahead.pop()):
            inner = getattr(callee, "__wrapped__", None)
            if inner is not None and id(inner) not in seen:
                seen.add(id(inner))
                ahead.append(inner)
                yield from _callees(inner)


def _is_generator(function: Any) -> bool:
    return inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)


def _runs_later(function: Any, result: Any) -> bool:
    """Whether what a call returned still has the body of a generator to run."""
    if inspect.isgenerator(result) or inspect.isasyncgen(result):
        return True
    is_context = isinstance(result, contextlib.AbstractContextManager | contextlib.AbstractAsyncContextManager)
    return is_context and any(map(_is_generator, _wrapped(function)))  # @contextmanager


def _generator(function: Any, what: str) -> UsageError:
    name = getattr(function, "__qualname__", repr(function))
    return UsageError(
        f"{name} is a generator: its body runs between the calls of whoever iterates, so a decorator can't say when "
        f"the {what} begins and ends. Put `with timeslice.{what}(...)` inside it."
    )
