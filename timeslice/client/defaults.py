"""The clients behind ``timeslice.hold``: one a server and job, one more for each event loop."""

from __future__ import annotations

import asyncio
import os
import threading
from collections import OrderedDict
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any, Unpack, overload

from timeslice.client.aio import AsyncClient
from timeslice.client.gang import find_gang
from timeslice.client.hold import Hold
from timeslice.client.lease import AsyncLease, Lease
from timeslice.client.sync import Client
from timeslice.client.terms import HoldOptions, OnLost, Terms, find_leave
from timeslice.models import Mode
from timeslice.settings import url_file

# What a default client depends on. Reading a few variables costs a hold nothing; reading all settings would.
_VARIABLES = (
    "TIMESLICE_URL",
    "TIMESLICE_PREFIX",
    "TIMESLICE_JOB",
    "TIMESLICE_JOB_ID",
    "TIMESLICE_NODE",
    "TIMESLICE_DISABLE",
    "TIMESLICE_RUNTIME_DIR",
    "TIMESLICE_PATIENCE",
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
    "SLURM_STEPID",
    "TORCHELASTIC_RUN_ID",
)
Place = tuple[Any, ...]

# Of a process that changes its job or server now and then the last clients are kept; one that is still in use lives on.
_KEPT = 8


@dataclass
class _Loop:
    """The clients of one event loop."""

    loop: asyncio.AbstractEventLoop
    clients: OrderedDict[Place, AsyncClient] = field(default_factory=OrderedDict)
    guard: AsyncGenerator[None, None] | None = None


_clients: OrderedDict[Place, Client] = OrderedDict()
_loops: dict[int, _Loop] = {}
_making = threading.Lock()


def _start_clean() -> None:
    global _making  # noqa: PLW0603 - a forked child can't trust the lock it inherited
    _making = threading.Lock()


os.register_at_fork(after_in_child=_start_clean)


@overload
def hold(group: str, /, *, url: str | None = None, **options: Unpack[HoldOptions]) -> Hold[Lease, AsyncLease]: ...
@overload
def hold(
    first: str, second: str, /, *, url: str | None = None, **options: Unpack[HoldOptions]
) -> Hold[tuple[Lease, Lease], tuple[AsyncLease, AsyncLease]]: ...
@overload
def hold(
    first: str, second: str, third: str, /, *, url: str | None = None, **options: Unpack[HoldOptions]
) -> Hold[tuple[Lease, Lease, Lease], tuple[AsyncLease, AsyncLease, AsyncLease]]: ...
@overload
def hold(*groups: str, url: str | None = None, **options: Unpack[HoldOptions]) -> Hold[Any, Any]: ...
def hold(
    *groups: str,
    job: str | None = None,
    timeout: float | None = None,
    priority: int = 0,
    phase: str | None = None,
    lock_only: bool = False,
    lease: float = 30.0,
    on_lost: OnLost | None = None,
    gang: bool | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    mode: Mode | None = None,
    tags: Sequence[str] = (),
    slot: str = "",
    url: str | None = None,
) -> Hold[Any, Any]:
    """Hold one group or several around a block or a function.

    ::

        with timeslice.hold("trainers", phase="train") as lease: ...
        async with timeslice.hold("samplers"): ...

        @timeslice.hold("trainers", timeout=600)
        def train(): ...          # or async def: held for the whole await

    Several groups are taken in one order everywhere (configured order, trainers before samplers, name), all or none.
    Nested holds of one group by one job share the lease; child tasks and ``asyncio.to_thread`` inherit it. The terms
    are those of the outermost: ``phase="weight_sync"`` inside another hold of the group clears no ``needs_weights``.

    ``timeout``: seconds to wait for all of the groups; then AcquireTimeoutError, and the body does not run.
    ``priority``: -100 (last) to 100 (first). ``phase``: name of this part of the training loop, for people.
    ``lock_only``: a plain lock without devices, which needs no agent. ``lease``: seconds that the hold outlives this
    process; it is renewed meanwhile. ``on_lost``: called once with the lease if it is lost, on a thread of its own.
    ``job`` defaults to ``TIMESLICE_JOB``, ``url`` to ``TIMESLICE_URL`` or the server of ``timeslice up``.
    With ``TIMESLICE_DISABLE=1`` holds do nothing.

    ``gang=True``: all ranks of an SPMD program take this hold together, with one lease. It is granted when the last of
    them has asked, and given up when all have left; a rank that dies ends it for all. The rank comes from ``RANK`` and
    ``WORLD_SIZE``, or from ``rank`` and ``world_size``. None: a gang if torchrun (accelerate, ...) started several
    ranks. False: this process holds alone. All ranks need one job: set ``TIMESLICE_JOB``.

    ``mode``, ``tags``, ``slot``: what of this job's state leaves the device when another job gets the group after this
    hold, for workloads that can tell: only the parts named by ``tags`` (of one ``slot``, such as one LoRA adapter), by
    ``mode`` "offload" (kept in host memory) or "discard" (dropped). What is not given is as the workload registered it,
    else as the group is set, else all of it is kept.

    Raises InvalidNameError and UsageError before anything is sent; on entry what ``Client.acquire`` raises.
    """
    terms = Terms(
        *(job, priority, phase, lock_only, lease, on_lost),
        find_gang(gang, rank, world_size),
        find_leave(mode, tags, slot),
    )
    return Hold(groups, terms, timeout, url=url)


def default_client(url: str | None = None) -> Client:
    """This process's client for the server that ``url`` or the environment names."""
    place = _place(url)
    client = _clients.get(place)
    if client is None:
        with _making:
            client = _clients.setdefault(place, Client(url))
            while len(_clients) > _KEPT:
                _, old = _clients.popitem(last=False)
                if old.is_connected:
                    old.driver.drop_idle()
    elif len(_clients) == _KEPT:
        with _making:
            if place in _clients:
                _clients.move_to_end(place)
    return client


async def default_async_client(url: str | None = None) -> AsyncClient:
    """This event loop's client; it is closed when the loop shuts down its asynchronous generators."""
    loop, place = asyncio.get_running_loop(), _place(url)
    found = _loops.get(id(loop))
    if found is None or found.loop is not loop:
        with _making:
            for each in [number for number, known in _loops.items() if known.loop.is_closed()]:
                del _loops[each]  # closed without that: its clients can't be used, and can't be closed any more
            found = _loops[id(loop)] = _Loop(loop)
    if found.guard is None:
        found.guard = _close_with_the_loop(found)
        await anext(found.guard)
    client = found.clients.get(place)
    if client is None:
        client = found.clients[place] = AsyncClient(url)
        while len(found.clients) > _KEPT:
            _, old = found.clients.popitem(last=False)
            if old.is_connected:
                await old.driver.drop_idle()
    found.clients.move_to_end(place)
    return client


async def _close_with_the_loop(known: _Loop) -> AsyncGenerator[None, None]:
    try:
        yield
    finally:
        if _loops.get(id(known.loop)) is known:
            del _loops[id(known.loop)]
        for client in known.clients.values():
            await client.close()


def _place(url: str | None) -> Place:
    environment = tuple(map(os.environ.get, _VARIABLES))
    if url or environment[0] or environment[5]:
        return (os.getpid(), url, *environment)
    # The URL comes from a file that another `timeslice up` may have replaced.
    path = url_file()
    try:
        status = path.stat()
    except FileNotFoundError:
        return (os.getpid(), url, *environment)
    return (os.getpid(), status.st_mtime_ns, status.st_ino, *environment)
