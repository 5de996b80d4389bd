"""``phase``: a named stretch of a job's work off the devices, recorded in its groups' events and never waited for."""

from __future__ import annotations

import numbers
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from timeslice.client.context import here
from timeslice.client.decorating import decorated
from timeslice.client.identity import new_waiter_id
from timeslice.errors import UsageError
from timeslice.locks import scripts
from timeslice.locks.keys import GroupKeys
from timeslice.locks.scripts import Stretch
from timeslice.models import NUMBER_MAX
from timeslice.names import check_name

if TYPE_CHECKING:
    from timeslice.client.lease import BaseLease
    from timeslice.client.sync import Client

F = TypeVar("F", bound=Callable[..., Any])

_LONGEST_S = 1e9
_LONGEST_NAME = 200  # bytes


def phase(name: str, *, job: str | None = None, groups: Sequence[str] | None = None, url: str | None = None) -> Phase:
    """Record that this process does ``name`` now: a stretch that needs no device, such as verifying answers.

    ::

        with timeslice.phase("verify"):
            rewards = score(answers)

        @timeslice.phase("load_data")      # or async with, or an async def
        def batches(): ...

    It holds nothing and never waits: what began and how it ended is sent in the background, and lost if the server
    stays away. It appears in ``timeslice jobs`` and as PhaseBegan and PhaseEnded in the events of the groups that this
    process has held for ``job``, or of ``groups``. With TIMESLICE_DISABLE=1 it does nothing.

    Raises InvalidNameError, and on entry UsageError if no server is known.
    """
    return Phase(name, job=job, groups=groups, url=url)


@dataclass(frozen=True)
class _Entered:
    by: object  # thread or task
    client: Client
    stretch: Stretch
    groups: Sequence[GroupKeys]
    at: float


class Phase:
    """Use it as ``with``, ``async with`` or decorator; as often as you like, nested or from several threads."""

    def __init__(self, name: str, *, job: str | None, groups: Sequence[str] | None, url: str | None) -> None:
        self._name = check_name("phase", name)
        self._job = None if job is None else check_name("job", job)
        if isinstance(groups, str):
            raise UsageError(f"groups={groups!r}: give a list of names, as in groups=[{groups!r}]")
        self._groups = None if groups is None else tuple(check_name("group", group) for group in groups)
        self._url = url
        self._entered: list[_Entered] = []

    def __enter__(self) -> Self:
        from timeslice.client.defaults import default_client

        client = default_client(self._url)
        job = self._job or client.job
        stretch = Stretch(new_waiter_id(), job, self._name, client.host, os.getpid())
        groups: Sequence[GroupKeys] = ()
        if not client.disabled:
            if self._groups is None:
                groups = client.renewer.held_for(client.keys.prefix, job)
            else:
                groups = [client.group_keys(group) for group in self._groups]
        entered = _Entered(here(), client, stretch, groups, time.monotonic())
        self._entered.append(entered)
        for keys in groups:
            floor = client.floors.get(keys.name, 0)
            _tell(client, keys, scripts.phase(keys, stretch, "began", floor=floor), stretch)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        own = here()
        entered = next((each for each in reversed(self._entered) if each.by is own), self._entered[-1])
        self._entered.remove(entered)
        if entered.stretch.pid != os.getpid():
            return  # a forked child's copy: the phase is its parent's
        seconds = min(time.monotonic() - entered.at, _LONGEST_S)
        outcome = "ok" if kind is None else kind.__name__.encode()[:_LONGEST_NAME].decode(errors="ignore")
        for keys in entered.groups:
            floor = entered.client.floors.get(keys.name, 0)
            call = scripts.phase(keys, entered.stretch, "ended", seconds=seconds, outcome=outcome, floor=floor)
            _tell(entered.client, keys, call, entered.stretch)

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.__exit__(kind, error, trace)

    def __call__(self, function: F) -> F:
        """Record each call of ``function``; of a coroutine function the whole await."""
        return decorated(function, "phase", lambda: self)


def measured(lease: BaseLease, nbytes: int | None, seconds: float | None) -> None:
    """Record what was moved in a hold; sent in the background."""
    if nbytes is None and seconds is None:
        raise UsageError("record needs bytes, seconds, or both, as in lease.record(bytes=moved, seconds=took)")
    if nbytes is not None and not (_is(numbers.Integral, nbytes) and 0 <= nbytes <= NUMBER_MAX):
        raise UsageError(f"bytes={nbytes!r}: give a whole number, 0 or more")
    if seconds is not None and not (_is(numbers.Real, seconds) and 0 <= seconds <= _LONGEST_S):
        raise UsageError(f"seconds={seconds!r}: give 0 or more seconds")
    client, keys, request = lease._client, lease._keys, lease._request  # noqa: SLF001
    if client.disabled:
        return
    stretch = Stretch(new_waiter_id(), lease.job, request.label, request.host, request.pid)
    call = scripts.phase(
        keys,
        stretch,
        "measured",
        nbytes=None if nbytes is None else int(nbytes),
        seconds=None if seconds is None else float(seconds),
        token=lease.fencing_token,
        floor=client.floors.get(keys.name, 0),
    )
    _tell(client, keys, call, stretch)


def _tell(client: Any, keys: GroupKeys, call: scripts.Call[bool], stretch: Stretch) -> None:
    client.renewer.tell(call, f"group {keys.name}: phase {stretch.phase} of job {stretch.job}")


def _is(kind: type, value: Any) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)
