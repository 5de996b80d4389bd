"""One process of a job in a torture run: it holds, checks and rewrites its device memory, and survives everything.

What it does is written once, as a generator of operations; the sync and the asyncio client carry them out.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import random
import threading
import time
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from timeslice.arena import Arena, EmulatedDeviceError
from timeslice.client import core
from timeslice.client.aio import AsyncClient
from timeslice.client.hold import Hold
from timeslice.client.lease import BaseLease
from timeslice.client.sync import Client
from timeslice.errors import LeaseError, LeaseUncertainError, TimeSliceError
from timeslice.torture.engine import Engine
from timeslice.torture.history import Asked, Checked, Cramped, Entered, GaveUp, Left, Lost, Surveyed, Writer
from timeslice.torture.scarce import refuse_threads, threads_file
from timeslice.torture.stage import LEASES_S
from timeslice.torture.survey import look, read_pids

_LOOK_S = 0.05  # how often a body looks whether it still holds
_CHUNK = 512 << 10
_UNCERTAIN_S = 120.0
_GANG_TIMEOUTS_S = (3.0, 6.0)  # the other rank may have ended, or not yet begun again


class Spec(BaseModel):
    """What the process is told. ``until``: it ends then, on the monotonic clock. ``drain``: it asks for nothing more
    once that file is there."""

    label: str
    job: str
    node: str
    url: str
    history: Path
    drain: Path
    seed: str
    asynchronous: bool
    devices: dict[str, Path]  # of the served groups
    bytes: int
    lock_group: str  # "": none
    until: float
    pace: float = 1.0  # of its bodies and pauses; below 1 it is quicker
    waiter_ttl_s: float = core.WAITER_TTL_MS / 1000  # of a waiter that gives no sign of life
    timeouts: tuple[float | None, ...] = (None, None, None, 0.0, 1.0, 6.0)  # of its tries
    form: str = ""  # see ``forms``
    knobs: Path = Path()
    everywhere: dict[str, dict[str, Path]] = {}  # of each served group: the devices of all its nodes
    pids: Path = Path()  # who may have memory on them
    rank: int | None = None  # in a gang of the job's processes, which takes ``gang_group`` together
    ranks: int = 1
    gang_group: str = ""


@dataclass(frozen=True)
class _Enter:
    hold: Hold


@dataclass(frozen=True)
class _Leave:
    hold: Hold


Steps = Generator[_Enter | _Leave | float, Any, None]


class Memory:
    """The job's device memory in one group, and what it left there last. ``titled``: an engine of its own has it."""

    def __init__(self, device: Path, label: str, size: int, *, group: str = "", titled: bool = False) -> None:
        self._engine = Engine(group, device, label, size) if titled else None
        self._arena = None if titled else Arena(device, label=label)
        self._size = size
        self._view: memoryview | None = None
        self.digest = ""  # "": not known

    @property
    def left(self) -> int:
        """Bytes that are known to have been left."""
        return self._size if self.digest else 0

    def close(self) -> None:
        """Give it back."""
        self._view = None
        if self._engine:
            self._engine.close()
        if self._arena:
            self._arena.close()

    def found(self) -> str:
        """Checksum of what is there now."""
        if self._engine:
            return self._engine.ask("found")
        assert self._view is not None
        return _digest(self._view)

    def fill(self, content: bytes, lease: BaseLease) -> None:
        """Replace the content. What ends it in the middle leaves it unknown."""
        self.digest = ""
        if self._engine:
            self._fill_engine(self._engine, content, lease)
            return
        if self._view is None:
            assert self._arena is not None
            self._view = self._arena.allocate(self._size)
        for start in range(0, self._size, _CHUNK):
            lease.ensure_held()
            self._view[start : start + _CHUNK] = content[start : start + _CHUNK]
        self.digest = _digest(content)

    def _fill_engine(self, engine: Engine, content: bytes, lease: BaseLease) -> None:
        lease.ensure_held()
        answer = engine.ask(f"fill {_digest(content)}")
        lease.ensure_held()
        if answer.startswith("!"):
            raise EmulatedDeviceError(f"the engine can't: {answer[1:]}")
        self.digest = answer


class Job:
    """What one process does, try after try."""

    def __init__(self, spec: Spec, client: Client | AsyncClient, writer: Writer) -> None:
        self._spec, self._client, self._writer = spec, client, writer
        self._random = random.Random(spec.seed)  # noqa: S311 - load needs no secrecy
        titled = spec.form == "title"
        self._memory = {
            group: Memory(path, spec.job, spec.bytes, group=group, titled=titled)
            for group, path in spec.devices.items()
        }
        self._tries = 0
        self._lost: set[str] = set()
        self._writing = threading.Lock()

    def live(self) -> Steps:
        """Try after try, until its time is over."""
        while time.monotonic() < self._spec.until and not self._spec.drain.exists():
            yield from self._turn()
            yield self._random.uniform(0.0, 0.4) * self._spec.pace  # reward and data, on the CPU

    def _turn(self) -> Steps:
        if self._spec.rank is not None:
            yield from self._try((self._spec.gang_group,), patience=self._random.choice(_GANG_TIMEOUTS_S))
            return
        draw = self._random.random()
        served, locked = list(self._memory), self._spec.lock_group
        # Nested in the order in which everybody takes them, so that nobody waits in a circle.
        inner = served[-1] if len(served) > 1 else locked
        if draw < 0.2 and locked:
            yield from self._try((locked,))
        elif draw < 0.35 and len(served) > 1:
            yield from self._try(tuple(served))
        elif draw < 0.5 and inner:
            yield from self._try(served[:1], inner=inner)
        else:
            yield from self._try((self._random.choice(served),))

    def _try(self, groups: Any, *, inner: str = "", patience: float | None = None) -> Steps:
        """Ask, and if granted work inside. ``inner``: a group to take inside as well."""
        spec, groups = self._spec, tuple(groups)
        timeout = patience if patience is not None else self._random.choice(self._spec.timeouts)
        requests = {group: self._request() for group in groups}
        lock_only = groups == (spec.lock_group,)
        hold = self._client.hold(
            *groups,
            timeout=timeout,
            priority=0 if spec.rank is not None else self._random.choice((0, 0, 0, 0, 5, -5)),
            lease=LEASES_S[-1] if spec.rank is not None else self._random.choice(LEASES_S),
            rank=spec.rank,
            world_size=spec.ranks if spec.rank is not None else None,
            lock_only=lock_only,
            phase="torture",
            on_lost=lambda lease: self._note_loss(requests[lease.group], lease),
        )
        for group, request in requests.items():
            said = self._of(group, request)
            self._writer.write(Asked(**said, node=spec.node, lock_only=lock_only, ranks=spec.ranks))
        try:
            granted = yield _Enter(hold)
        except Exception as error:
            if not isinstance(error, TimeSliceError) and not _is_shortage(error):
                raise
            for group, request in requests.items():
                self._writer.write(GaveUp(**self._of(group, request), error=f"{type(error).__name__}: {error}"))
            yield 0.2
            return
        leases: tuple[BaseLease, ...] = granted if isinstance(granted, tuple) else (granted,)
        for lease in leases:
            said = self._of(lease.group, requests[lease.group])
            self._writer.write(Entered(**said, token=lease.fencing_token, how=lease.grant.how))
        for lease in leases:
            self._survey(lease.group, requests[lease.group])
        try:
            yield from self._body(leases, requests, inner)
            for lease in leases:
                yield from self._sure(lease)
        except LeaseError:  # of one of them; the body ends for all
            for lease in leases:
                if lease.state != "held":
                    self._note_loss(requests[lease.group], lease)
        for lease in leases:
            if lease.state == "held":
                said = self._of(lease.group, requests[lease.group])
                self._writer.write(Left(**said, token=lease.fencing_token))
        yield _Leave(hold)

    def _body(self, leases: tuple[BaseLease, ...], requests: dict[str, str], inner: str) -> Steps:
        for lease in leases:
            if lease.group in self._memory:
                yield from self._use(lease, requests[lease.group])
        if inner:
            yield from self._try((inner,), patience=3.0)
        until = time.monotonic() + self._random.choice((0.05, 0.1, 0.2, 0.5, 1.0)) * self._spec.pace
        while (left := until - time.monotonic()) > 0:
            yield min(left, _LOOK_S)
            for lease in leases:
                yield from self._sure(lease)

    def _survey(self, group: str, request: str) -> None:
        """Write down who is on the devices now that this body is in, before it uses its own."""
        nodes, since = self._spec.everywhere.get(group), time.monotonic_ns()
        if not nodes or self._spec.form == "pid-namespace":  # there nobody else can be seen
            return
        try:
            found, at = look({group: nodes}, read_pids(self._spec.pids)), time.monotonic_ns()
        except OSError as error:
            if error.errno != errno.EMFILE:
                raise
            return  # what it can't look at it says nothing of
        own = self._memory[group].left
        for (_, node), jobs in found.items():
            here = own if node == self._spec.node else 0
            said = {"who": self._spec.label, "node": node, "group": group, "request": request}
            self._writer.write(Surveyed.model_validate({**said, "since": since, "at": at, "found": jobs, "own": here}))

    def _use(self, lease: BaseLease, request: str) -> Steps:
        """Compare what is on the device with what was left there, and leave something new."""
        memory = self._memory[lease.group]
        content = self._random.randbytes(self._spec.bytes)
        yield from self._sure(lease)
        if known := memory.digest:
            self._writer.write(Checked(**self._of(lease.group, request), expected=known, found=memory.found()))
        try:
            memory.fill(content, lease)
            if not known:  # so that the checker knows that it is on the device
                said = self._of(lease.group, request)
                self._writer.write(Checked(**said, expected=memory.digest, found=memory.found()))
        except LeaseUncertainError:
            yield from self._sure(lease)  # it is still ours: what is there is half written, and unknown
        except EmulatedDeviceError as error:
            lease.ensure_held()  # if it is not, the device rightly belongs to somebody else
            self._writer.write(Cramped(**self._of(lease.group, request), error=f"{type(error).__name__}: {error}"))
        except OSError as error:
            if not _is_shortage(error):
                raise

    def _sure(self, lease: BaseLease) -> Steps:
        """Go on only while the lease stands; wait where the server can't be asked. Raises LeaseError."""
        patient_until = time.monotonic() + _UNCERTAIN_S
        while True:
            try:
                lease.ensure_held()
                return
            except LeaseUncertainError:
                if time.monotonic() > patient_until:
                    raise
            yield _LOOK_S

    def _note_loss(self, request: str, lease: BaseLease) -> None:
        with self._writing:  # told by a thread and by the body
            if request not in self._lost:
                self._lost.add(request)
                self._writer.write(Lost(**self._of(lease.group, request), token=lease.fencing_token))

    def _request(self) -> str:
        self._tries += 1
        return f"{self._spec.label}/{self._tries}"

    def _of(self, group: str, request: str) -> dict[str, Any]:
        return {"who": self._spec.label, "job": self._spec.job, "group": group, "request": request}


def _is_shortage(error: BaseException | None) -> bool:
    """Whether it says, or came of it, that there is no descriptor or no thread."""
    while error is not None:
        if getattr(error, "errno", None) in {errno.EMFILE, errno.ENFILE} or "can't start new thread" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def _digest(content: bytes | memoryview) -> str:
    return hashlib.blake2b(content, digest_size=12).hexdigest()


def run_job(spec: Spec) -> None:
    """Live until the time is over. It never raises for what the product says may happen."""
    writer = Writer(spec.history / f"{spec.label}.jsonl")
    core.WAITER_TTL_MS = int(spec.waiter_ttl_s * 1000)
    if spec.form == "threads":
        refuse_threads(threads_file(spec.knobs, spec.label.rpartition(".")[0]))
    if spec.asynchronous:
        asyncio.run(_run_async(spec, writer))
    else:
        with Client(spec.url, spec.job) as client:
            _run_sync(Job(spec, client, writer).live())
    os._exit(0)  # arrays live on in frames; the interpreter's own end could touch them


def _run_sync(steps: Steps) -> None:
    answer: Any = None
    error: Exception | None = None
    while True:
        try:
            step = steps.throw(error) if error else steps.send(answer)
        except StopIteration:
            return
        answer = error = None
        try:
            if isinstance(step, _Enter):
                answer = step.hold.__enter__()
            elif isinstance(step, _Leave):
                step.hold.__exit__(None, None, None)
            else:
                time.sleep(step)
        except Exception as raised:
            error = raised


async def _run_async(spec: Spec, writer: Writer) -> None:
    async with AsyncClient(spec.url, spec.job) as client:
        steps = Job(spec, client, writer).live()
        answer: Any = None
        error: Exception | None = None
        while True:
            try:
                step = steps.throw(error) if error else steps.send(answer)
            except StopIteration:
                return
            answer = error = None
            try:
                if isinstance(step, _Enter):
                    answer = await step.hold.__aenter__()
                elif isinstance(step, _Leave):
                    await step.hold.__aexit__(None, None, None)
                else:
                    await asyncio.sleep(step)
            except Exception as raised:
                error = raised
