"""The clients behind ``timeslice.hold``: one a server and job, one more for each event loop."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from timeslice.client.aio import AsyncClient
from timeslice.client.gang import find_gang
from timeslice.client.hold import Hold
from timeslice.client.sync import Client
from timeslice.client.terms import OnLost, Terms, find_leave
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
    "TORCHELASTIC_RUN_ID",
)
Place = tuple[Any, ...]

_clients: dict[Place, Client] = {}
_loop_clients: dict[tuple[int, Place], AsyncClient] = {}
_guards: dict[tuple[int, Place], AsyncGenerator[None, None]] = {}


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
) -> Hold:
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
        client = _clients.setdefault(place, Client(url))
    return client


async def default_async_client(url: str | None = None) -> AsyncClient:
    """This event loop's client; it is closed when the loop shuts down its asynchronous generators."""
    loop = asyncio.get_running_loop()
    place = (id(loop), _place(url))
    client = _loop_clients.get(place)
    if client is None:
        client = _loop_clients[place] = AsyncClient(url)
        _guards[place] = _close_with_the_loop(place, client)
        await anext(_guards[place])
    return client


async def _close_with_the_loop(place: tuple[int, Place], client: AsyncClient) -> AsyncGenerator[None, None]:
    try:
        yield
    finally:
        del _loop_clients[place], _guards[place]
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
